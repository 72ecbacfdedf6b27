"""safetensors: names, shapes and a sample of the values, from the file's own header."""

import json
from dataclasses import dataclass
from typing import IO

import numpy as np

from pipelines.glancing.places import opened
from pipelines.glancing.reading import Reading, short
from pipelines.glancing.report import TensorGlance

_VALUES = 1 << 20  # of each tensor are looked at
_PIECES = 16  # spread over it: a bad shard of a tensor is contiguous
_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("<f8", 8),
    "F32": ("<f4", 4),
    "F16": ("<f2", 2),
    "BF16": ("<u2", 2),
    "I64": ("<i8", 8),
    "I32": ("<i4", 4),
    "I16": ("<i2", 2),
    "I8": ("<i1", 1),
    "U8": ("<u1", 1),
    "BOOL": ("<u1", 1),
}


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes behind the header
    stop: int

    def is_sound(self) -> bool:
        """Its bytes are as many as its shape needs, where the dtype is known."""
        width = _DTYPES[self.dtype][1] if self.dtype in _DTYPES else None
        needed = None if width is None else width * int(np.prod(self.shape, dtype=object))
        return 0 <= self.start <= self.stop and needed in (None, self.stop - self.start)


def look_at_tensors(reading: Reading) -> tuple[TensorGlance, ...]:
    """All tensors of a file. What is wrong with it becomes a finding of the reading."""
    with opened(reading.place) as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, reading.size - 8):
            reading.find("bad_header", f"it says that it has {length:,} bytes of {reading.size:,}")
            return ()
        try:
            entries = _entries(handle.read(length))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reading.find("bad_header", short(error))
            return ()
        wrong = [one.name for one in entries if not one.is_sound()]
        if wrong:
            reading.find("bad_header", f"shape and bytes of {', '.join(wrong[:4])} do not agree")
            return ()
        end = 8 + length + max((one.stop for one in entries), default=0)
        if end > reading.size:
            reading.find("cut_short", f"{reading.size:,} bytes, the header promises {end:,}")
            return ()
        looked = [(one, *_values(handle, one, 8 + length)) for one in entries]
    broken = [f"{one.name} ({said})" for one, said, is_broken in looked if is_broken]
    if broken:
        reading.find("not_finite", ", ".join(broken[:4]))
    return tuple(TensorGlance(one.name, one.dtype, one.shape, said) for one, said, _ in looked)


def _entries(header: bytes) -> list[_Entry]:
    described = json.loads(header)
    described.pop("__metadata__", None)
    entries = []
    for name, one in described.items():
        start, stop = one["data_offsets"]
        shape = tuple(map(int, one["shape"]))
        entries.append(_Entry(name, str(one["dtype"]), shape, int(start), int(stop)))
    return entries


def _values(handle: IO[bytes], one: _Entry, base: int) -> tuple[str, bool]:
    """The range of a sample of the values, and whether one of them is not finite."""
    if one.dtype not in _DTYPES or one.start == one.stop:
        return "", False
    code, width = _DTYPES[one.dtype]
    count = (one.stop - one.start) // width
    piece = min(count, _VALUES // _PIECES)
    starts = range(0, count, max(piece, -(-count // _PIECES)))
    parts = []
    for start in starts:
        handle.seek(base + one.start + start * width)
        parts.append(np.frombuffer(handle.read(min(piece, count - start) * width), code))
    sample = np.concatenate(parts)
    if one.dtype == "BF16":
        sample = (sample.astype(np.uint32) << 16).view(np.float32)
    if one.dtype == "BOOL":
        return f"{sample.mean():.0%} true", False
    bad = int((~np.isfinite(sample)).sum()) if sample.dtype.kind == "f" else 0
    if bad:
        return f"{bad:,} of {len(sample):,} values are NaN or infinite", True
    if not sample.any():
        return "all zero", False
    return f"{sample.min():.4g} to {sample.max():.4g}", False
