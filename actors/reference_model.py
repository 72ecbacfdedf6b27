"""The target: a Hugging Face causal LM run over slots of a batch. No scheduling, no sampling.

Shapes: `n` rows, `q` tokens a row, `H` hidden size, `A` aux layers, `V` vocabulary.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.reference_cache import SLOT_ATTENTION, SlotCache, causal_mask, slot_attention

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Largest difference of a logit, as a share of the largest logit, between our passes and the
# model's own: the order of sums in fp32, a few roundings in bf16. A scale or cap that we do not
# apply is far above either.
_SELF_CHECK_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.06}


class TargetRefused(Exception):
    """A folder that is not a target, or a target that this engine would serve wrongly."""


@dataclass(frozen=True, eq=False)
class States:
    """What one pass computed. Rows past a prompt's end hold nothing of meaning."""

    last: torch.Tensor  # [n, q, H], after the final norm
    aux: torch.Tensor | None  # [n, q, A*H], residual stream after the aux layers, ascending


class Target:
    """The model, its tokenizer and its slots. One thread at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        device: str,
        slots: int,
        context_length: int | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> None:
        """Read the folder and prove on a few tokens that its passes here are the model's own.

        Raises `TargetRefused`.
        """
        _check_folder(folder)
        model, self.tokenizer = _load(folder, DTYPES[dtype], device)
        config = model.config.get_text_config()
        missing = [name for name in _NEEDED if not hasattr(config, name)]
        if missing:
            raise TargetRefused(
                f"{', '.join(model.config.architectures or ())} has no {', '.join(missing)} in its "
                "configuration, which this engine needs"
            )
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self.model_type: str = model.config.model_type
        self.architectures: list[str] = list(model.config.architectures or ())
        self.layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_context_length: int = config.max_position_embeddings
        self.context_length = _context_length(config, context_length)
        self.eos_ids = _eos_ids(model, self.tokenizer)
        self.aux_layer_ids = _aux_layer_ids(aux_layer_ids, self.layers)
        # Absent where a family of models has no grouped heads.
        kv_heads = config.to_dict().get("num_key_value_heads") or config.num_attention_heads
        self._groups: int = config.num_attention_heads // kv_heads
        self._trunk = model.base_model
        self._head = model.get_output_embeddings()
        self._captured: dict[int, torch.Tensor] = {}
        names = inspect.signature(type(self._trunk).forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self.cache = SlotCache(self.layers, slots)
        try:
            _prove(self, model)
            self._watch_layers(config)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise TargetRefused(
                f"{', '.join(self.architectures)} does not run on this engine: {error!r}"
            ) from error

    @property
    def embedding(self) -> torch.Tensor:
        """The input embedding [V, H]."""
        weight: torch.Tensor = self._trunk.get_input_embeddings().weight
        return weight

    def prefill(self, prompts: Sequence[Sequence[int]], *, first_slot: int | None) -> States:
        """Read whole prompts, together, into slots from `first_slot` on; None keeps nothing.

        q is the longest prompt's length; shorter ones are padded on the right, where a causal
        pass cannot see the padding.
        """
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        self.cache.plan_prefill(first_slot, len(prompts), longest)
        return self._pass(ids.to(self.device), positions, None)

    def extend(
        self,
        ids: torch.Tensor,  # [n, q]
        starts: Sequence[int],  # [n] how many tokens each slot holds that stay
    ) -> States:
        """Add q tokens to each of slots 0..n-1; what a slot held from its start on is replaced."""
        first = torch.tensor(starts, device=self.device)
        queries = ids.shape[1]
        used = self.cache.plan_extend(first, queries)
        mask = causal_mask(first, queries, used, self._groups, self.dtype)
        positions = first[:, None] + torch.arange(queries, device=self.device)
        # A drafted token may lie past the context's end. It is never kept, but learned positions
        # have no row for it.
        positions = positions.clamp(max=self.max_context_length - 1)
        return self._pass(ids.to(self.device), positions, mask)

    def logits(
        self,
        last: torch.Tensor,  # [..., H]
    ) -> torch.Tensor:  # [..., V] fp32
        """Score the vocabulary, for the rows that are asked for only."""
        scores: torch.Tensor = self._head(last)
        return scores.float()

    def _pass(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> States:
        out = self._trunk(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: self.cache},
        )
        aux = None
        if self._captured:
            aux = torch.cat([self._captured[layer] for layer in self.aux_layer_ids], dim=-1)
            self._captured.clear()
        return States(out.last_hidden_state, aux)

    def _watch_layers(self, config: Any) -> None:
        stacks = [
            module
            for module in self._trunk.modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
        ]
        if not stacks:
            raise ValueError("it has no list of its layers, so their outputs cannot be captured")
        for layer in self.aux_layer_ids:

            def keep(_module: Any, _inputs: Any, output: Any, layer: int = layer) -> None:
                self._captured[layer] = output[0] if isinstance(output, tuple) else output

            stacks[0][layer].register_forward_hook(keep)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise TargetRefused(f"{folder} is no folder; give the folder of a Hugging Face model")
    if not (folder / "config.json").is_file():
        raise TargetRefused(f"{folder} has no config.json: it is not a Hugging Face model folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise TargetRefused(f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    if not any(folder.glob("*.safetensors")):
        raise TargetRefused(f"{folder} has no *.safetensors: convert the weights to safetensors")


def _load(folder: Path, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise TargetRefused(f"transformers cannot load {folder}: {error}") from error
    model, report = loaded
    # transformers fills in random numbers for what is missing, and only warns.
    broken = {name: sorted(map(str, report[name])) for name in ("missing_keys", "mismatched_keys")}
    if any(broken.values()):
        raise TargetRefused(f"the weights in {folder} do not fit its config.json: {broken}")
    return model.to(device).eval(), tokenizer


def _context_length(config: Any, asked: int | None) -> int:
    limit: int = config.max_position_embeddings
    if asked is not None and asked > limit:
        raise TargetRefused(f"a context of {asked} tokens was asked for; the target has {limit}")
    length = limit if asked is None else asked
    settings = config.to_dict()
    # Both are absent where a family of models has nothing but full attention.
    kinds, window = set(settings.get("layer_types") or ()), settings.get("sliding_window")
    windowed = "sliding_attention" in kinds or (not kinds and window is not None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise TargetRefused(f"layers of kinds {sorted(kinds)}: only full attention is served here")
    if windowed and (window is None or window < length):
        raise TargetRefused(
            f"attention slides over {window} tokens and the context is {length}: only full "
            f"attention is served here; give --context-length {window} or less"
        )
    return length


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for ids in (
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        match ids:
            case int():
                found.add(ids)
            case list():
                found.update(ids)
    return frozenset(found)


def _aux_layer_ids(ids: Sequence[int], layers: int) -> tuple[int, ...]:
    if list(ids) != sorted(set(ids)) or any(not 0 <= layer <= layers - 2 for layer in ids):
        # SGLang cannot capture the last layer's output, and sorts the ids in silence.
        raise TargetRefused(
            f"aux layer ids {list(ids)}: expected distinct ids in ascending order from 0 to "
            f"{layers - 2} (the target has {layers} layers)"
        )
    return tuple(ids)


@torch.inference_mode()
def _prove(target: Target, model: Any) -> None:
    """Compare a prefill and two extensions of ours with one plain pass of the model's own."""
    ids = [(7 * n + 11) % target.vocab_size for n in range(12)]
    expected = model(input_ids=torch.tensor([ids], device=target.device), use_cache=False).logits
    model.set_attn_implementation(SLOT_ATTENTION)
    parts = [target.prefill([ids[:7]], first_slot=0).last]
    for start, stop in ((7, 8), (8, 12)):
        parts.append(target.extend(torch.tensor([ids[start:stop]]), [start]).last)
    seen = target.logits(torch.cat(parts, dim=1))
    target.cache.clear()
    worst = float((seen - expected.float()).abs().max() / expected.float().abs().max())
    if not worst <= _SELF_CHECK_SHARE[target.dtype]:
        raise TargetRefused(
            f"{', '.join(target.architectures)} needs something that this engine does not do: its "
            f"logits differ from the model's own by {worst:.2g} of the largest"
        )
    logger.info("the target's passes agree with the model's own to %.2g", worst)
