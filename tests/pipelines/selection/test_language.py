"""Languages of real sentences; what is none, or too little, is not guessed."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipelines.selection.language import CODE, UNKNOWN, UNTOLD, LanguageProfile, language_of

SENTENCES = {
    "en": "Could you explain how a lighthouse works and why its lamp turns around all night?",
    "fr": "Pourriez-vous m'expliquer comment fonctionne un phare et pourquoi sa lampe tourne ?",
    "de": "Könntest du mir erklären, wie ein Leuchtturm funktioniert und warum er sich dreht?",
    "es": "¿Podrías explicarme cómo funciona un faro y por qué su lámpara gira toda la noche?",
    "it": "Potresti spiegarmi come funziona un faro e perché la sua lampada gira tutta la notte?",
    "pt": "Você poderia me explicar como funciona um farol e por que a sua luz gira à noite?",
    "nl": "Kun je mij uitleggen hoe een vuurtoren werkt en waarom het licht de hele nacht draait?",
    "pl": "Czy możesz mi wyjaśnić, jak działa latarnia morska i dlaczego jej lampa się obraca?",
    "ru": "Объясни, пожалуйста, как работает маяк и почему его лампа вращается всю ночь?",
    "zh": "请解释一下灯塔是怎么工作的，以及为什么它的灯整夜都在旋转，船只又是怎样利用它的？",
    "ja": "灯台はどのように動くのか、そしてなぜ明かりが一晩中回るのかを説明してください。",
    "ko": "등대가 어떻게 작동하는지, 그리고 왜 불빛이 밤새 도는지 설명해 주세요.",
    "ar": "هل يمكنك أن تشرح لي كيف تعمل المنارة ولماذا يدور مصباحها طوال الليل؟",
    "tr": "Bir deniz fenerinin nasıl çalıştığını ve lambasının neden döndüğünü açıklar mısın?",
    "vi": "Bạn có thể giải thích ngọn hải đăng hoạt động như thế nào và tại sao đèn của nó quay?",
}
PYTHON = "def f(xs):\n    return {k: v[0] for k, v in sorted(xs.items()) if (k, v) != (0, [])}\n"


@pytest.mark.parametrize("language", SENTENCES)
def test_a_sentence_is_told(language):
    assert language_of(SENTENCES[language]) == language


@pytest.mark.parametrize("language", ["en", "fr", "de", "ru", "ja"])
def test_code_addresses_and_formulas_do_not_change_the_language(language):
    text = f"{SENTENCES[language]}\n```python\n{PYTHON * 20}```\n"
    text += "https://example.org/a/very/long/path $\\frac{a}{b} \\cdot \\sum_i x_i$ `sorted(x)`"
    assert language_of(text) == language


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", UNKNOWN),
        ("Hi there!", UNKNOWN),
        ("2 + 2 = ?", UNKNOWN),
        ("7, 3, 1, 0, 0, 0, 12, 18, 19, 200, 1000, 4, 8, 16, 32: what is next?", UNKNOWN),
        ("$\\int_0^1 \\frac{\\alpha x}{\\beta + \\gamma} \\, \\mathrm{d}x$", UNKNOWN),
        (f"```python\n{PYTHON}```", CODE),
        (f"Fix this:\n```\n{PYTHON}", CODE),  # the fence never ends
        (PYTHON, CODE),
        ("https://example.org/one/two/three/four/five/six/seven", UNKNOWN),
        ("写诗", UNKNOWN),
    ],
)
def test_what_is_no_prose_is_not_guessed(text, expected):
    assert language_of(text) == expected
    assert expected in UNTOLD


def test_none_of_the_english_prompts_is_taken_for_another_language():
    found = Counter()
    for path in sorted(Path("recipes/prompts").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            asked = [m for m in json.loads(line)["messages"] if m["role"] in ("user", "tool")]
            found[language_of("\n".join(m["content"] for m in asked))] += 1
    assert set(found) == {"en", *UNTOLD}
    assert found["en"] > 0.9 * found.total()


def test_the_model_is_loaded_only_when_asked():
    program = (
        "import pipelines.selection.language as m\n"
        "m.language_of('short'); print(m._model.cache_info().currsize)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "0"


def test_shares_are_of_those_that_were_counted():
    profile = LanguageProfile()
    assert (profile.count, profile.shares()) == (0, {})
    profile.add(["en", "de", "en"])
    profile.add(["ar", "en", "de", "unknown", "ar"])
    assert profile.count == 8
    assert list(profile.shares().items()) == [
        ("en", 3 / 8),
        ("ar", 2 / 8),
        ("de", 2 / 8),
        ("unknown", 1 / 8),
    ]
    assert profile.shares(top=1) == {"en": 3 / 8}
