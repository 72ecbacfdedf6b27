"""Messages become token ids here, once, by the target's own tokenizer and chat template.

Nothing downstream turns text into tokens again.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from pipelines.errors import PreflightFailed
from pipelines.recipe import Target, TargetProfile
from pipelines.sources.row import Json, Reason, dump_json
from pipelines.token_bytes import TokenBytes, token_bytes

logger = logging.getLogger(__name__)

Tokenizer = Any  # transformers has no one class for it

TOOLS_INSTRUCTION = (
    "You may call the functions declared below. To call one, answer with a JSON object that holds "
    'its "name" and its "arguments", between <tool_call> and </tool_call>.'
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
PROBE = "What do hawks eat?"


@dataclass(frozen=True)
class Rendered:
    """A conversation as the target reads it. `decode(prompt_ids) == text`, checked."""

    text: str
    prompt_ids: list[int]


@dataclass(frozen=True)
class NotRendered:
    """Why a conversation has no faithful rendering."""

    reason: Reason
    detail: str


def read_target_config(folder: Path) -> Json:
    """The target's `config.json`, after a look at the folder. Raises `PreflightFailed`."""
    if not folder.is_dir():
        raise PreflightFailed(
            f"there is no target folder {folder}",
            expected="a local Hugging Face model folder",
            change="correct target.path in the recipe; `make target` makes the quick start's",
        )
    path = folder / "config.json"
    if not path.is_file() or not any(folder.glob("*.safetensors")):
        missing = "config.json" if not path.is_file() else "*.safetensors"
        raise PreflightFailed(
            f"the target folder {folder} holds no {missing}",
            expected="config.json and the weights as *.safetensors",
            change="copy the whole model folder, or convert its weights to safetensors",
        )
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise PreflightFailed(
            f"{path} is not JSON: {error}",
            expected="the model's configuration",
            change="copy the file again",
        ) from error
    if not isinstance(config, dict):
        raise PreflightFailed(
            f"{path} holds a {type(config).__name__}",
            expected="one object",
            change="copy the file again",
        )
    return config


def load_tokenizer(target: Target) -> Tokenizer:
    """The target's tokenizer, from its folder only; nothing is downloaded.

    The folder's own code runs only if the recipe says so. Raises `PreflightFailed`.
    """
    folder = Path(target.path)
    if not folder.is_dir():
        read_target_config(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise PreflightFailed(
            f"the target folder {folder} holds no tokenizer",
            expected=f"one of {', '.join(_TOKENIZER_FILES)}",
            change="copy the tokenizer's files from the place that the weights came from",
        )
    if not target.trust_remote_code:
        _check_needs_no_code(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise PreflightFailed(
            f"the tokenizer in {folder} does not load: {error}",
            expected="a tokenizer that transformers knows",
            change="copy the tokenizer's files again, or install the transformers that it asks for",
        ) from error
    if not tokenizer.chat_template:
        raise PreflightFailed(
            f"the tokenizer in {folder} has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            change="use the instruction-tuned target, or add its template to the folder",
        )
    return tokenizer


def _check_needs_no_code(folder: Path) -> None:
    """Without its code, another tokenizer may load in its place, and say nothing."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise PreflightFailed(
            f"{path} is not JSON: {error}",
            expected="the tokenizer's configuration",
            change="copy the file again",
        ) from error
    code = config.get("auto_map") if isinstance(config, dict) else None
    # Older folders list the tokenizer's two classes alone.
    if named := code.get("AutoTokenizer") if isinstance(code, dict) else code:
        raise PreflightFailed(
            f"the tokenizer in {folder} is code of its own: {path.name} names {named} in auto_map",
            expected="a tokenizer that transformers knows, since target.trust_remote_code is false",
            change="read that code; if you trust it, set trust_remote_code: true below target",
        )


class ChatTemplate:
    """A target's chat template with its tokenizer, as a profile says to use them."""

    def __init__(self, tokenizer: Tokenizer, profile: TargetProfile) -> None:
        self.tokenizer, self._profile = tokenizer, profile
        self._special_token = _any_of(special_tokens(tokenizer))
        # Found in a text before anything else is tokenised: nothing grows into them.
        self.own_tokens = frozenset(tokenizer.added_tokens_decoder)
        self._takes_mapping = _takes_mapping(tokenizer)
        self._backend = _bare_backend(tokenizer)

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> Rendered | NotRendered:
        """Render a conversation once, up to where the target begins to answer, and tokenise it.

        Messages and tools are in the form that `pipelines.sources` gives them.
        """
        text = self.render_text(messages, tools)
        return text if isinstance(text, NotRendered) else self.tokenise([text])[0]

    def render_text(self, messages: Sequence[Json], tools: Sequence[Json]) -> str | NotRendered:
        """The template's text, checked to hold everything that was said to the target."""
        if (token := self._special_token.search(dump_json([messages, tools]))) is not None:
            return NotRendered(
                "special_token_in_content", f"{token[0]!r} would become a control token"
            )
        try:
            text = self.apply(messages, tools)
        except TEMPLATE_ERRORS as error:
            return NotRendered("template_error", f"{type(error).__name__}: {error}")
        lost = _lost(messages, tools, text)
        return text if lost is None else NotRendered("content_lost", lost)

    def tokenise(self, texts: Sequence[str]) -> list[Rendered | NotRendered]:
        """Tokenise rendered texts together; the template has already written every special token.

        The ids are decoded again and compared with the text.
        """
        if not texts:
            return []
        batch, decoded = self._there_and_back(list(texts))
        return [
            _checked(self.tokenizer, text, ids, back)
            for text, ids, back in zip(texts, batch, decoded, strict=True)
        ]

    def _there_and_back(self, texts: list[str]) -> tuple[list[list[int]], list[str]]:
        backend = self._backend
        if backend is not None and _is_unset(backend):
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            batch = [one.ids for one in encodings]
            if (known := self._token_bytes) is not None and all(map(known.spell, texts, batch)):
                return batch, texts
            return batch, backend.decode_batch(batch, skip_special_tokens=False)
        batch = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        decoded = self.tokenizer.batch_decode(
            batch, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return [list(ids) for ids in batch], decoded

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return None if self._backend is None else token_bytes(self._backend)

    def apply(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The bare text of the template, unchecked; raises what the template raises."""
        if self._profile.tools == "system_message":
            conversation, declarations = _with_tools_in_words(messages, tools), None
        else:
            # Some templates iterate over a call's arguments, others paste them as a JSON string.
            as_is = dict if self._takes_mapping else _arguments_as_string
            conversation, declarations = [as_is(one) for one in messages], list(tools) or None
        text: str = self.tokenizer.apply_chat_template(
            conversation,
            tools=declarations,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._profile.template_arguments,
        )
        return text


def text_config(target_config: Json) -> Json:
    """The language model's part of a configuration; multimodal targets nest it."""
    config = target_config
    if "vocab_size" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    missing = {"vocab_size", "num_hidden_layers", "max_position_embeddings"} - set(config)
    if missing:
        raise PreflightFailed(
            f"the target's config.json has no {', '.join(sorted(missing))}",
            expected="a causal language model's configuration",
            change="check that target.path is the language model's own folder",
        )
    return config


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Control tokens by their text: what the template may write and a message may not."""
    found = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    found.update(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return found


# Rendering

# What a template can raise: its own refusals, and Python's errors on shapes it did not foresee.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
)


def _with_tools_in_words(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """For a template without a tools branch: declarations in the system message, calls as text."""
    conversation = [_call_in_words(message) for message in messages]
    if not tools:
        return conversation
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = f"{TOOLS_INSTRUCTION}\n<tools>\n{schemas}\n</tools>"
    if conversation[0]["role"] == "system":
        first = {**conversation[0], "content": f"{conversation[0]['content']}\n\n{words}"}
        return [first, *conversation[1:]]
    return [{"role": "system", "content": words}, *conversation]


def _call_in_words(message: Json) -> Json:
    if "tool_calls" not in message:
        return dict(message)
    calls = "\n".join(
        "<tool_call>\n"
        + json.dumps(
            {
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            },
            ensure_ascii=False,
        )
        + "\n</tool_call>"
        for call in message["tool_calls"]
    )
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{calls}".lstrip("\n")}


def _takes_mapping(tokenizer: Tokenizer) -> bool:
    try:
        text = tokenizer.apply_chat_template(_probe_call(), tokenize=False)
    except TEMPLATE_ERRORS:
        return False
    return "'eyas_probe'" not in text  # Python's own quotes: the mapping was pasted, not written


def _probe_call() -> list[Json]:
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "probe_hawks", "arguments": {"eyas_probe": True}},
    }
    return [
        {"role": "user", "content": PROBE},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "voles", "tool_call_id": "call_0", "name": "probe_hawks"},
    ]


def _arguments_as_string(message: Json) -> Json:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _lost(messages: Sequence[Json], tools: Sequence[Json], text: str) -> str | None:
    """What the template left out. A past answer's own text is its business (it drops thinking)."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and not _is_in(message["content"].strip(), text):
            return f"the template left out message {index} ({message['role']})"
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                return f"the template left out the call of {call['function']['name']!r}"
    for tool in tools:
        if tool["function"]["name"] not in text:
            return f"the template left out the tool {tool['function']['name']!r}"
    return None


def _is_in(content: str, text: str) -> bool:
    # Some templates write what a tool answered as a JSON string.
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """What finds any of them in JSON, longest first."""
    as_json = sorted((dump_json(one)[1:-1] for one in tokens if one), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, as_json)) or r"(?!)")


# What of a tokenizer's Python stands between a call and its backend.
_BETWEEN = ("__call__", "_encode_plus", "batch_decode", "decode", "_decode")


def _bare_backend(tokenizer: Tokenizer) -> Any | None:
    """The `tokenizers.Tokenizer` of one whose Python only passes on; it gives the same ids, and
    offsets and masks are not made. None for any other."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or tokenizer.split_special_tokens
        or hasattr(kind, "_switch_to_input_mode")
        or any(getattr(kind, one) is not getattr(PreTrainedTokenizerFast, one) for one in _BETWEEN)
    ):
        return None
    return tokenizer.backend_tokenizer


def _is_unset(backend: Any) -> bool:
    """Whether nothing is cut, filled up or taken for text; tokenizer.json can say so."""
    return (
        backend.truncation is None and backend.padding is None and not backend.encode_special_tokens
    )


def _checked(tokenizer: Tokenizer, text: str, ids: list[int], back: str) -> Rendered | NotRendered:
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        return NotRendered("double_bos", f"the prompt begins with {tokenizer.bos_token!r} twice")
    if back != text:
        at = next(
            (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b),
            min(len(text), len(back)),
        )
        return NotRendered(
            "round_trip",
            f"at character {at} the ids decode to {back[at : at + 20]!r}, "
            f"the text has {text[at : at + 20]!r}",
        )
    return Rendered(text, ids)
