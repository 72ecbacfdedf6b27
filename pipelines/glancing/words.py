"""How sizes, shares and people's texts are put on a screen."""

from collections.abc import Mapping

from pipelines.glancing.report import SetGlance


def byte_size(count: float) -> str:
    """Bytes as a person says them: 512 B, 4.2 GB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def number(value: float) -> str:
    """A whole number in full, another one in four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def share(count: int, total: int) -> str:
    """Per cent, where only all is 100% and only nothing is 0%."""
    if not total:
        return "-"
    exact = count / total
    if 0 < exact < 0.01:
        return "<1%"
    return ">99%" if 0.99 < exact < 1 else f"{exact:.0%}"


def mix(counts: Mapping[str, int], total: int) -> str:
    """Counts by name, with their shares."""
    return ", ".join(f"{name} {count:,} ({share(count, total)})" for name, count in counts.items())


def rows_text(one: SetGlance) -> str:
    """How many rows, and whether that is counted or estimated."""
    if one.rows is None:
        return "-" if one.tensors else "unknown"
    return f"{one.rows:,}" if one.rows_exact else f"about {one.rows:,}"


def one_line(text: str) -> str:
    """Somebody's text on one line."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """No control character of somebody's data reaches the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
