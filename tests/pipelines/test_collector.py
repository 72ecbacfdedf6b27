"""What is there is left alone, what comes and dies in a cycle still goes, and all is as before."""

import gc
import weakref

from pipelines.collector import rare_collections


class Cycle:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_that_come_later_are_still_found():
    with rare_collections():
        assert gc.get_freeze_count() > 0
        dead = weakref.ref(Cycle())
        gc.collect()
        assert dead() is None


def test_enough_young_objects_are_searched_by_themselves():
    with rare_collections():
        dead = weakref.ref(Cycle())
        alive = [[] for _ in range(2 * gc.get_threshold()[0])]
        assert dead() is None
        assert alive


def test_the_process_is_as_before_also_after_an_error():
    before = gc.get_threshold()
    try:
        with rare_collections():
            assert gc.get_threshold() != before
            raise KeyError
    except KeyError:
        pass
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
