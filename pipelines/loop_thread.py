"""An event loop in a thread of its own, for workers that Ray calls from threads of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from the start until `stop`; a process that ends does not wait for it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin a coroutine on the loop. Any thread but the loop's own may wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop to its end."""
        return self.submit(work).result()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function soon."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """End the loop after what it is doing."""
        self.call(self._loop.stop)
