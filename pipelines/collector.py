"""Python's search for dead cycles, in a process whose heap is large and hardly changes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# The usual (700, 10, 10) went through all young objects every two rows, and through the several
# hundred thousand of Ray and the tokenizer again and again: a quarter of a worker's CPU.
_THRESHOLDS = (20_000, 20, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Leave what is there now out of every search, and search seldom. For the whole process."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
