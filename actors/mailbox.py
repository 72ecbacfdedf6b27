"""Where workers drop word of what they did, and learn whether to go on. Never a body."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class _Box:
    """Items in order of arrival, and whether the tap is open. Lives in an actor of its own."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._is_open = True

    def put(self, items: Sequence[Any]) -> bool:
        self._items += items
        return self._is_open

    def take(self) -> list[Any]:
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        self._is_open = False


@dataclass(frozen=True)
class Outbox:
    """The workers' end. Travels to any process of the cluster."""

    actor: Any

    def put(self, items: Sequence[Any]) -> bool:
        """Hand over a few small values; return whether to go on. Blocks until they have arrived."""
        import ray

        go_on: bool = ray.get(self.actor.put.remote(list(items)))
        return go_on

    def is_open(self) -> bool:
        """Whether to go on."""
        return self.put([])


class Mailbox:
    """The driver's end, on its own node. Needs an initialised Ray; `end` it on every path."""

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        box = ray.remote(_Box).options(num_cpus=0, scheduling_strategy=here)
        self._actor: Any = box.remote()
        self.outbox = Outbox(self._actor)

    def take(self) -> list[Any]:
        """What has arrived since the last call."""
        import ray

        items: list[Any] = ray.get(self._actor.take.remote())
        return items

    def close(self) -> None:
        """Tell the workers to ask no more."""
        import ray

        ray.get(self._actor.close.remote())

    def end(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._actor)
