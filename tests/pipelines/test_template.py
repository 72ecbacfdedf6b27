"""The template: nothing said is lost, no ids but its tokenizer's, a wrong profile is refused."""

import json
import shutil
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import PreflightFailed
from pipelines.profile_checks import check_profile
from pipelines.recipe import ChannelMarkers, Target, TargetProfile, ToolMarkers
from pipelines.sources.messages import parse_row
from pipelines.sources.row import SourceRow
from pipelines.sources.tools import normalise_tools
from pipelines.target import prepare_quickstart_target
from pipelines.template import (
    TOOLS_INSTRUCTION,
    ChatTemplate,
    NotRendered,
    Rendered,
    load_tokenizer,
    read_target_config,
    special_tokens,
)
from tests.support.chat_styles import TARGET_STYLES, as_target

ASK = {"role": "user", "content": "What do hawks eat?"}
TOOLS = normalise_tools([{"name": "look_up", "description": "Look up a bird."}])
CALLED = [
    ASK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "look_up", "arguments": {"bird": "hawk"}}}
        ],
    },
    {"role": "tool", "content": "voles\nand hares"},
]

# A template with a tools branch and thinking, in the shape that reasoning targets have.
WITH_TOOLS = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}[{{ call.function.name }}: ARGUMENTS]{% endfor %}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}"
    "{% endif %}"
)
ITERATES = WITH_TOOLS.replace(
    "ARGUMENTS",
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}",
)
PASTES = WITH_TOOLS.replace("ARGUMENTS", "{{ call.function.arguments }}")
CONCATENATES = WITH_TOOLS.replace("ARGUMENTS", "{{ 'of ' + call.function.arguments }}")
WRITES_JSON = WITH_TOOLS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
TAKES_BOTH = WITH_TOOLS.replace(
    "ARGUMENTS",
    "{{ call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson }}",
)


def profile(**changes):
    values = {
        "tools": "system_message",
        "think_open_id": None,
        "think_close_id": None,
        "tool_markers": None,
        "channels": None,
        "template_arguments": {},
        "stop_token_ids": (2,),
        "history_reasoning": "kept",
        "reserved_ids": (0,),
        "aux_layer_ids": (1, 2, 3),
    }
    return TargetProfile(**{**values, **changes})


def target(folder):
    return Target(path=str(folder), profile=profile(), trust_remote_code=False)


@pytest.fixture
def tokenizer(tiny_target):
    return load_tokenizer(target(tiny_target))


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer(target(prepare_quickstart_target()))


# Golden ids


GOLDEN_TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi é🦅<|im_end|>\n<|im_start|>assistant\n"
)
GOLDEN_IDS = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
    "1 4093 198 26843 26411 10813 116 223 2 198 1 520 9531 198"
)


@pytest.mark.smollm
def test_smollm_golden_ids_of_a_plain_question(smollm):
    rendered = ChatTemplate(smollm, profile()).render([{"role": "user", "content": "Hi é🦅"}], ())
    assert rendered.text == GOLDEN_TEXT
    assert rendered.prompt_ids == [int(one) for one in GOLDEN_IDS.split()]


@pytest.mark.smollm
def test_smollm_golden_text_of_tools_and_a_finished_call(smollm):
    rendered = ChatTemplate(smollm, profile()).render(CALLED, TOOLS)
    schema = (
        '{"name": "look_up", "description": "Look up a bird.", '
        '"parameters": {"type": "object", "properties": {}, "required": []}}'
    )
    call = '<tool_call>\n{"name": "look_up", "arguments": {"bird": "hawk"}}\n</tool_call>'
    assert rendered.text == (
        f"<|im_start|>system\n{TOOLS_INSTRUCTION}\n<tools>\n{schema}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWhat do hawks eat?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n"
        "<|im_start|>tool\nvoles\nand hares<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered.prompt_ids.count(1) == 5
    assert smollm.decode(rendered.prompt_ids) == rendered.text


@pytest.mark.smollm
def test_the_quick_starts_profile_holds_for_its_target(smollm):
    config = read_target_config(prepare_quickstart_target())
    check_profile(smollm, profile(aux_layer_ids=(1, 14, 26)), config)
    with pytest.raises(PreflightFailed, match="the target has 30 layers"):
        check_profile(smollm, profile(aux_layer_ids=(1, 14, 29)), config)
    with pytest.raises(PreflightFailed, match="same text with tools and without"):
        check_profile(smollm, profile(tools="template", aux_layer_ids=(1, 14, 26)), config)


# Rendering


def test_tools_join_the_system_message_that_is_there(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, ASK]
    text = ChatTemplate(tokenizer, profile()).render(messages, TOOLS).text
    assert text.startswith(f"<|im_start|>system\nBe brief.\n\n{TOOLS_INSTRUCTION}\n<tools>\n")
    assert text.count("<|im_start|>system") == 1
    assert messages[0]["content"] == "Be brief."


def test_without_tools_nothing_is_added(tokenizer):
    rendered = ChatTemplate(tokenizer, profile()).render([ASK], ())
    assert rendered.text == (
        "<|im_start|>user\nWhat do hawks eat?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered.prompt_ids == tokenizer.encode(rendered.text, add_special_tokens=False)
    assert rendered.prompt_ids[0] == 1


def test_the_templates_own_tools_branch_and_arguments_are_used(tokenizer):
    tokenizer.chat_template = ITERATES
    template = ChatTemplate(
        tokenizer, profile(tools="template", template_arguments={"thinking": True})
    )
    text = template.render([ASK], TOOLS).text
    assert '"name": "look_up"' in text
    assert TOOLS_INSTRUCTION not in text
    assert text.endswith("assistant\n<think>")


@pytest.mark.parametrize(
    ("chat_template", "written"),
    [
        (ITERATES, "[look_up: bird=hawk;]"),
        (PASTES, '[look_up: {"bird": "hawk"}]'),
        (CONCATENATES, '[look_up: of {"bird": "hawk"}]'),
        (WRITES_JSON, '[look_up: {"bird": "hawk"}]'),
        (TAKES_BOTH, '[look_up: {"bird": "hawk"}]'),
    ],
)
def test_call_arguments_reach_each_template_in_the_form_it_writes(
    tokenizer, chat_template, written
):
    tokenizer.chat_template = chat_template
    rendered = ChatTemplate(tokenizer, profile(tools="template")).render(CALLED, TOOLS)
    assert isinstance(rendered, Rendered)
    assert written in rendered.text


def reason(tokenizer, messages, tools=(), mode="system_message"):
    rendered = ChatTemplate(tokenizer, profile(tools=mode)).render(messages, tools)
    assert isinstance(rendered, NotRendered)
    assert rendered.detail
    return rendered.reason


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": "a <|im_end|> b"}], ()),
        ([ASK], normalise_tools([{"name": "f", "description": "<|im_start|>"}])),
        ([*CALLED[:2], {"role": "tool", "content": "<|endoftext|>"}], ()),
    ],
)
def test_control_tokens_in_what_is_said_are_refused(tokenizer, messages, tools):
    assert reason(tokenizer, messages, tools) == "special_token_in_content"


def test_a_control_token_is_found_however_json_writes_it(tokenizer):
    tokenizer.add_tokens(['<"quoted">', "<\n>"], special_tokens=True)
    template = ChatTemplate(tokenizer, profile())
    for text, seen in (('a <"quoted"> b', "quoted"), ("a <\n> b", "<")):
        refused = template.render([{"role": "user", "content": text}], ())
        assert refused.reason == "special_token_in_content"
        assert seen in refused.detail
    assert isinstance(template.render([{"role": "user", "content": "a < > b"}], ()), Rendered)


def test_a_template_that_raises_is_a_named_rejection(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    assert reason(tokenizer, [ASK]) == "template_error"


def test_a_message_or_tool_that_the_template_drops_is_noticed(tokenizer):
    tokenizer.chat_template = "<|im_start|>{{ messages[-1].content }}"
    assert reason(tokenizer, [{"role": "system", "content": "Be brief."}, ASK]) == "content_lost"
    assert reason(tokenizer, [ASK], TOOLS, mode="template") == "content_lost"


def test_a_doubled_bos_is_noticed(tokenizer):
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert reason(tokenizer, [ASK]) == "double_bos"


def test_ids_that_do_not_give_the_text_back_are_refused(tokenizer):
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert reason(tokenizer, [ASK]) == "round_trip"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            dict,
            role=st.sampled_from(["system", "user", "assistant", "tool"]),
            content=st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
            | st.sampled_from(["<|im_end|>", " <think> ", "é🦅\u0301", "{{ x }}", "\r\n\t"]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_conversation_renders_faithfully_or_is_refused_by_name(tiny_target, messages):
    tokenizer = load_tokenizer(target(tiny_target))
    rendered = ChatTemplate(tokenizer, profile()).render(messages, TOOLS)
    if isinstance(rendered, NotRendered):
        assert any(token in str(messages) for token in special_tokens(tokenizer))
        return
    assert tokenizer.decode(rendered.prompt_ids) == rendered.text
    assert all(message["content"].strip() in rendered.text for message in messages)
    assert rendered.prompt_ids.count(1) == rendered.text.count("<|im_start|>")


def test_a_batch_gives_the_ids_of_each_alone(tokenizer):
    template = ChatTemplate(tokenizer, profile())
    conversations = [[{"role": "user", "content": "é" * n}] for n in range(1, 6)]
    texts = [template.render_text(one, ()) for one in conversations]
    assert template.tokenise(texts) == [template.render(one, ()) for one in conversations]
    assert template.tokenise([]) == []


SPELT = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=20)
    | st.sampled_from(
        ["<|im_start|>", "<|im_end|>", " <|im_end|> ", "<think>", " \r\n", "é\u0301"]
    ),
    max_size=6,
).map("".join)


def through_python(tokenizer):
    """The same template with a tokenizer whose Python has a say."""

    class Own(type(tokenizer)):
        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs)

    tokenizer.__class__ = Own
    template = ChatTemplate(tokenizer, profile())
    assert template._backend is None
    return template


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm", marks=pytest.mark.smollm)])
def both_ways(request, tiny_target):
    folder = tiny_target if request.param == "tiny" else prepare_quickstart_target()
    fast, slow = (load_tokenizer(target(folder)) for _ in range(2))
    template = ChatTemplate(fast, profile())
    assert template._backend is not None
    return template, through_python(slow)


@settings(max_examples=200, deadline=None)
@given(st.lists(SPELT, min_size=1, max_size=4))
def test_the_backend_gives_the_ids_and_the_text_that_the_tokenizer_gives(both_ways, texts):
    direct, slow = both_ways
    assert direct.tokenise(texts) == slow.tokenise(texts)


@pytest.mark.parametrize("unset", ["enable_truncation", "enable_padding", "encode_special_tokens"])
def test_a_backend_that_cuts_or_fills_up_is_not_asked_directly(tokenizer, unset):
    template = ChatTemplate(tokenizer, profile())
    texts = [template.render_text([{"role": "user", "content": "a" * n}], ()) for n in (3, 30)]
    expected = template.tokenise(texts)
    backend = tokenizer.backend_tokenizer
    if unset == "encode_special_tokens":
        backend.encode_special_tokens = True
    else:
        getattr(backend, unset)(**({"max_length": 4} if "trunc" in unset else {"length": 99}))
    assert len(backend.encode(texts[0], add_special_tokens=False).ids) != len(
        expected[0].prompt_ids
    )
    assert template.tokenise(texts) == expected


# Every kind of conversation in every kind of target

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12) | (
    st.sampled_from(["</think>", "<think>", "<tool_call>", "<|im_end|>", "<｜User｜>", "{{ x }}"])
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["bird", "where", "名"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
        lambda one: st.lists(one, max_size=2),
    ),
    max_size=2,
)


def called(some, words, results):
    calls = [{"function": {"name": f"f{i % 2}", "arguments": one}} for i, one in enumerate(some)]
    answers = [{"role": "tool", "content": one} for one in results[: len(calls)]]
    return [{"role": "assistant", "content": words, "tool_calls": calls}, *answers]


GROUPS = st.one_of(
    WORDS.map(lambda one: [{"role": "system", "content": one}]),
    WORDS.map(lambda one: [{"role": "user", "content": one}]),
    st.builds(
        lambda one, why: [{"role": "assistant", "content": one, "reasoning_content": why}],
        WORDS,
        WORDS | st.none(),
    ),
    st.builds(
        called,
        st.lists(ARGUMENTS, min_size=1, max_size=3),
        WORDS | st.none(),
        st.lists(WORDS, min_size=3, max_size=3),
    ),
)
CONVERSATIONS = st.lists(GROUPS, max_size=5).map(
    lambda groups: [*(one for group in groups for one in group), ASK]
)


@pytest.fixture(scope="module", params=["system_message", *TARGET_STYLES])
def any_target(request, tiny_target):
    tokenizer = load_tokenizer(target(tiny_target))
    if request.param == "system_message":
        return ChatTemplate(tokenizer, profile())
    tokenizer = as_target(tokenizer, TARGET_STYLES[request.param])
    return ChatTemplate(tokenizer, profile(tools="template"))


@settings(max_examples=100, deadline=None)
@given(CONVERSATIONS, st.sampled_from([None, [{"name": "f0"}, {"name": "f1"}]]))
def test_any_checked_conversation_renders_faithfully_or_is_refused_by_name(
    any_target, messages, tools
):
    row = parse_row({"messages": messages, "tools": tools}, file="x", line=1)
    if not isinstance(row, SourceRow):
        return
    rendered = any_target.render(row.messages, row.tools)
    if isinstance(rendered, NotRendered):
        assert rendered.reason in ("special_token_in_content", "content_lost")
        return
    assert any_target.tokenizer.decode(rendered.prompt_ids) == rendered.text
    assert rendered.prompt_ids == any_target.tokenizer.encode(
        rendered.text, add_special_tokens=False
    )
    for message in row.messages:
        assert message["role"] == "assistant" or message["content"].strip() in rendered.text


# Preflight


def hermes(opening, closing):
    return ToolMarkers(
        format="hermes",
        section_open_id=None,
        section_close_id=None,
        call_open_id=opening,
        call_close_id=closing,
        arguments_id=None,
    )


@pytest.fixture
def config(tiny_target):
    return read_target_config(tiny_target)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"stop_token_ids": (2, 9999)}, "stop_token_ids holds 9999, outside the vocabulary"),
        ({"stop_token_ids": (2, 40)}, "stop_token_ids holds 40, the ordinary token"),
        ({"stop_token_ids": (1,)}, "the template ends an answer with 2"),
        ({"reserved_ids": (-1,)}, "reserved_ids holds -1, outside the vocabulary"),
        ({"reserved_ids": (2,)}, "reserved_ids holds 2, which stop_token_ids names too"),
        ({"think_open_id": 40, "think_close_id": 40}, "think_close_id holds 40, which think_open"),
        ({"think_open_id": 120, "think_close_id": 121}, "think_open_id holds 120, which decodes"),
        ({"aux_layer_ids": (1, 2, 5)}, "the target has 6 layers"),
        ({"aux_layer_ids": (2, 1)}, "aux_layer_ids holds"),
        ({"aux_layer_ids": ()}, "aux_layer_ids holds"),
        ({"tools": "template"}, "same text with tools and without"),
        ({"template_arguments": {"tokenize": True}}, "template_arguments holds 'tokenize'"),
    ],
)
def test_a_profile_that_does_not_fit_its_target_is_refused(tokenizer, config, changes, seen):
    with pytest.raises(PreflightFailed) as failure:
        check_profile(tokenizer, profile(**changes), config)
    assert seen in failure.value.seen
    assert failure.value.expected
    assert failure.value.change


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"reserved_ids": ((0, 1), (250, 999))}, "reserved_ids holds 259, outside the vocabulary"),
        ({"tool_markers": hermes(40, 41)}, "tool_markers.call_open_id holds 40, the ordinary"),
        ({"tool_markers": hermes(1, 2)}, "tool_markers.call_close_id holds 2, which stop_token"),
        ({"tool_markers": hermes(1, 5000)}, "tool_markers.call_close_id holds 5000, outside"),
        ({"think_open_id": 40, "think_close_id": 41}, "think_open_id holds 40, the ordinary"),
        (
            {
                "channels": ChannelMarkers(
                    start_id=1, channel_id=1, constrain_id=41, message_id=42, end_id=43
                )
            },
            "channels.channel_id holds 1, which channels.start_id names too",
        ),
    ],
)
def test_markers_that_the_tokenizer_does_not_have_are_refused(tokenizer, config, changes, seen):
    with pytest.raises(PreflightFailed) as failure:
        check_profile(tokenizer, profile(**changes), config)
    assert seen in failure.value.seen


def test_markers_of_another_kind_are_warned_of(tokenizer, config, caplog):
    named = profile(think_open_id=1, think_close_id=0, reserved_ids=())
    check_profile(tokenizer, named, config)
    assert "think_open_id is 1, the token '<|im_start|>'" in caplog.text


def test_a_fitting_profile_passes(tokenizer, config):
    check_profile(tokenizer, profile(), config)
    tokenizer.chat_template = ITERATES
    check_profile(tokenizer, profile(tools="template"), config)


def test_a_tokenizer_larger_than_the_targets_vocabulary_is_refused(tokenizer, config):
    with pytest.raises(PreflightFailed, match="vocabulary ends at 99"):
        check_profile(tokenizer, profile(), {**config, "vocab_size": 100})


def test_a_nested_language_model_configuration_is_found(tokenizer, config):
    check_profile(tokenizer, profile(), {"model_type": "vision", "text_config": config})
    with pytest.raises(PreflightFailed, match="no max_position_embeddings"):
        check_profile(tokenizer, profile(), {"vocab_size": 1})


def test_a_template_with_a_doubled_bos_fails_the_preflight(tokenizer, config):
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(PreflightFailed, match="double_bos"):
        check_profile(tokenizer, profile(), config)


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", r"holds no \*.safetensors"),
    ],
)
def test_an_incomplete_target_folder_is_refused(tiny_target, tmp_path, removed, seen):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    (folder / removed).unlink()
    with pytest.raises(PreflightFailed, match=seen):
        read_target_config(folder)


def test_a_missing_target_folder_is_refused_and_nothing_is_downloaded(tmp_path):
    with pytest.raises(PreflightFailed, match="there is no target folder"):
        read_target_config(tmp_path / "nowhere")
    with pytest.raises(PreflightFailed, match="there is no target folder"):
        load_tokenizer(target(tmp_path / "nowhere"))


def test_a_folder_without_tokenizer_or_template_is_refused(tiny_target, tmp_path):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(PreflightFailed, match="has no chat template"):
        load_tokenizer(target(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PreflightFailed, match="holds no tokenizer"):
        load_tokenizer(target(folder))


def with_code(folder, config_name, named):
    """A target whose tokenizer is code that leaves a file where it runs."""
    path = folder / config_name
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": named}))
    (folder / "bird.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class BirdTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return folder


@pytest.mark.parametrize(
    "named",
    [
        {"AutoTokenizer": [None, "bird.BirdTokenizer"]},
        {"AutoTokenizer": ["bird.BirdTokenizer", None]},
        ["bird.BirdTokenizer", None],
    ],
)
def test_a_tokenizer_of_its_own_code_runs_only_if_the_recipe_says_so(
    tiny_target, tmp_path, monkeypatch, named
):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    with_code(folder, "tokenizer_config.json", named)
    with pytest.raises(PreflightFailed, match=r"bird\.BirdTokenizer") as failure:
        load_tokenizer(target(folder))
    assert "trust_remote_code: true" in failure.value.change
    assert not (folder / "ran").exists()

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(sys, "path", list(sys.path))
    trusted = target(folder).model_copy(update={"trust_remote_code": True})
    assert type(load_tokenizer(trusted)).__name__ == "BirdTokenizer"
    assert (folder / "ran").exists()


@pytest.mark.parametrize(
    ("config_name", "named"),
    [
        ("tokenizer_config.json", {"AutoProcessor": "bird.Bird"}),
        ("config.json", {"AutoModelForCausalLM": "bird.Bird", "AutoConfig": "bird.Bird"}),
    ],
)
def test_code_of_another_part_is_neither_needed_nor_run(tiny_target, tmp_path, config_name, named):
    folder = with_code(shutil.copytree(tiny_target, tmp_path / "target"), config_name, named)
    load_tokenizer(target(folder))
    assert not (folder / "ran").exists()


def test_a_broken_tokenizer_or_configuration_is_refused(tiny_target, tmp_path):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    (folder / "config.json").write_text("{")
    with pytest.raises(PreflightFailed, match="is not JSON"):
        read_target_config(folder)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(PreflightFailed, match="holds a list"):
        read_target_config(folder)
    (folder / "config.json").write_bytes((tiny_target / "config.json").read_bytes())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(PreflightFailed, match="does not load"):
        load_tokenizer(target(folder))
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(PreflightFailed, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(target(folder))
