"""A random six-layer Llama with a byte-level ChatML tokenizer: a real target folder in a second."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
LAYERS = 6
AUX_LAYER_IDS = (1, 2, 3)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_target(
    folder: Path,
    *,
    seed: int = 0,
    context_tokens: int = 512,
    words: Mapping[int, str] | None = None,
) -> Path:
    """Write the target into `folder` and return it. The same seed gives the same weights.

    `words` are further tokens by their ids, as far up as in a large vocabulary: no text becomes one
    of them, and they decode to themselves.
    """
    tokenizer = _tokenizer(words or {})
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context_tokens,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        tie_word_embeddings=True,
        # Large enough that a random model's next token depends on what it read.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(words: Mapping[int, str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    unused = set(range(len(vocabulary), max(words, default=0))) - words.keys()
    vocabulary |= {f"unused-{one}": one for one in unused}
    vocabulary |= {text.replace(" ", "\u0120"): one for one, text in words.items()}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
