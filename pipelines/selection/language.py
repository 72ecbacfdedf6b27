"""Which natural language a prompt is written in, where that can be told."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier

UNKNOWN = "unknown"  # too short, or between two languages
CODE = "code"  # code, and too little prose to tell
UNTOLD = frozenset({UNKNOWN, CODE})  # no reason to leave a prompt out

_FENCED = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)", re.DOTALL)
_NOT_PROSE = re.compile(
    r"`[^`\n]*`|https?://\S+|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|<[^<>\n]*>", re.DOTALL
)
_CODE_MARKS = re.compile(r"[{}()\[\]<>=;_#*/\\|&^~@$+]")
_SYLLABLES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_LETTERS = 20  # fewer say nothing for certain
_PER_SYLLABLE = 3  # letters that a Chinese, Japanese or Korean character stands for
_CODE_SHARE = 0.15  # of the visible characters
_CONFIDENCE = 0.8  # of the model: below it, its short texts are often of another language
_READ = 1_000  # characters of prose: the rest of a long prompt costs time and tells no more


def language_of(text: str) -> str:
    """An ISO 639 code, or one of `UNTOLD`. Code, addresses and formulas are not read.

    Code that nothing marks is told by its punctuation only, so that some of it is `en`.
    The model is loaded at the first text that is long enough, in about a second.
    """
    unfenced = _FENCED.sub(" ", text)
    prose = _NOT_PROSE.sub(" ", unfenced)[:_READ]
    unsure = CODE if unfenced != text else UNKNOWN
    letters = sum(map(str.isalpha, prose))
    visible = len("".join(prose.split()))
    if letters + (_PER_SYLLABLE - 1) * len(_SYLLABLES.findall(prose)) < _LETTERS:
        return unsure
    if len(_CODE_MARKS.findall(prose)) > _CODE_SHARE * visible:
        return CODE
    language, confidence = _model().classify(prose)
    return language if confidence >= _CONFIDENCE else unsure


class LanguageProfile:
    """Counts the languages of those prompts whose language was looked at."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, languages: Iterable[str]) -> None:
        """Take in one language per prompt."""
        self._counts.update(languages)

    @property
    def count(self) -> int:
        """Prompts that were looked at: the shares are of these."""
        return self._counts.total()

    def shares(self, top: int | None = None) -> dict[str, float]:
        """The most frequent first, equal ones by name."""
        ranked = sorted(self._counts.items(), key=lambda one: (-one[1], one[0]))
        return {language: count / self.count for language, count in ranked[:top]}


@cache
def _model() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
