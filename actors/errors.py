"""How one request can end without a completion, told apart by the two facts a retry needs."""

from typing import ClassVar


class RequestFault(Exception):
    """One request ended without a completion. `fault` is the name stored with a failed row."""

    retry_helps: ClassVar[bool]
    blames_server: ClassVar[bool]

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail

    def __reduce__(self) -> tuple:
        return (type(self), (self.fault, self.detail))


class Unreachable(RequestFault):
    """Refused, reset, cut short, or silent past the deadline."""

    retry_helps, blames_server = True, True


class Overloaded(RequestFault):
    """The server is healthy and full (503, 429), or took the request back (abort).

    `retry_after_seconds` is how long the server asked to be left alone, if it said so.
    """

    retry_helps, blames_server = True, False

    def __init__(
        self, fault: str, detail: str, *, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(fault, detail)
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_full(self) -> bool:
        """Whether the server said that it has too much to do. An abort says nothing about that."""
        return self.fault in ("http_429", "http_503")

    def __reduce__(self) -> tuple:
        return (_rebuild_overloaded, (self.fault, self.detail, self.retry_after_seconds))


class Refused(RequestFault):
    """The server understood and said no (400, prompt too long). Asking again changes nothing."""

    retry_helps, blames_server = False, False


class Unserved(Refused):
    """The server refuses whatever it is asked: no key (401, 403), or no such route (404).

    Says nothing about the row, so another server is asked; when all of them say it, the run is
    hopeless.
    """

    retry_helps, blames_server = True, True


class BadReply(RequestFault):
    """A 200 that breaks the contract: a missing count, a foreign rid, a NaN, ids out of range."""

    retry_helps, blames_server = True, True


class ServerFailed(Exception):
    """A server process did not start, or died more often than its configuration allows."""


class ServerUnfit(Exception):
    """A running server is not what the run needs. Says what was seen, expected, and to change."""

    def __init__(self, seen: str, *, expected: str, change: str) -> None:
        super().__init__(f"{seen}\n  expected: {expected}\n  change:   {change}")
        self.seen = seen
        self.expected = expected
        self.change = change

    def __reduce__(self) -> tuple:  # keyword-only arguments do not survive the default pickling
        return (_rebuild_unfit, (self.seen, self.expected, self.change))


def _rebuild_overloaded(fault: str, detail: str, retry_after_seconds: float | None) -> Overloaded:
    return Overloaded(fault, detail, retry_after_seconds=retry_after_seconds)


def _rebuild_unfit(seen: str, expected: str, change: str) -> ServerUnfit:
    return ServerUnfit(seen, expected=expected, change=change)
