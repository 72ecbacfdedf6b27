"""Which script a text is written in, from its first letters: no model, no time."""

import re
from collections import Counter

_READ = 400  # characters
_FEW = 20  # letters tell nothing
_SCRIPTS = (  # compiled when a text is not plain ASCII, and kept by `re`
    r"(?P<Latin>[A-Za-zÀ-ɏ])|(?P<Cyrillic>[Ѐ-ӿ])|(?P<Han>[㐀-䶿一-鿿])|(?P<Kana>[぀-ヿ])"
    r"|(?P<Hangul>[가-힣ᄀ-ᇿ])|(?P<Arabic>[؀-ۿ])|(?P<Devanagari>[ऀ-ॿ])|(?P<Greek>[Ͱ-Ͽ])"
    r"|(?P<Hebrew>[֐-׿])|(?P<Thai>[฀-๿])"
)


def script_of(text: str) -> str:
    """The name of the script of most letters; "" where there are too few of any.

    Japanese is Kana, although most of its signs may be Han.
    """
    start = text[:_READ]
    if start.isascii():
        return "Latin" if len(start) >= 2 * _FEW else ""
    letters = Counter(one.lastgroup for one in re.finditer(_SCRIPTS, start))
    if letters["Kana"] * 5 > letters["Han"] and letters["Kana"] >= 4:
        return "Kana"
    name, count = letters.most_common(1)[0] if letters else (None, 0)
    is_dense = name in ("Han", "Hangul")  # a sign stands for a syllable
    return name if name is not None and count >= (_FEW // 3 if is_dense else _FEW) else ""
