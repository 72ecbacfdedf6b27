"""Outcomes on their way to disk: order, trust, and what happens when the disk takes no more."""

import asyncio

import pytest

from actors.pool import Completed, Failed
from actors.protocol import Completion, Finish
from pipelines import ledger
from pipelines.errors import StorageFailed
from pipelines.ledger import Answered, Ledger
from tests.support.response_rows import row

GOOD, CHANGED = "http://good", "http://changed"


class Writer:
    """Keeps rows in memory, and fails as often as it is told."""

    def __init__(self, failures=0, fault=None):
        self.waiting, self.written, self.failures = [], [], failures
        self.fault = fault or StorageFailed("the disk is full", expected="room", change="room")

    def add(self, row):
        self.waiting.append(row["sample_id"])

    def flush(self):
        if self.failures:
            self.failures -= 1
            raise self.fault
        self.written += self.waiting
        self.waiting = []


def answered(name, server=GOOD, ended=1.0):
    reply = Completion(name, (5, 2), "", Finish("stop", 2, None), 1, 2, 0, "v", None, None)
    outcome = Completed(reply, None, server, 1, 0, 0)
    return Answered({"sample_id": name}, 1, 1, {}, outcome, ended)


def failed(name):
    return Answered({"sample_id": name}, 1, 1, {}, Failed("refused", "", "", 1, 0, 0), 1.0)


def make(one):
    if one.prompt["sample_id"] == "bug":
        raise ZeroDivisionError
    return {**row(1), "sample_id": one.prompt["sample_id"]}


def work(use, writer, *, confirm=None):
    """Run `use(ledger)` in a loop; return what it returns and the reported ids."""
    reported = []

    async def trust(url, since):
        del since
        return url != CHANGED

    async def run():
        book = Ledger(
            make,
            {"set": writer},
            confirm=confirm or trust,
            report=lambda reports: reported.extend(one.sample_id for one in reports),
        )
        async with book:
            return await use(book)

    return asyncio.run(run()), reported


def test_a_row_comes_back_when_it_is_written_and_reported():
    writer = Writer()

    async def use(book):
        row = await book.keep(answered("set-1"))
        return row["sample_id"], list(writer.written)

    result, reported = work(use, writer)
    assert result == ("set-1", ["set-1"])
    assert reported == ["set-1"]


def test_rows_of_a_server_that_is_another_one_now_are_not_written():
    writer, asked = Writer(), []

    async def confirm(url, since):
        asked.append((url, since))
        return url != CHANGED

    async def use(book):
        kept = [
            asyncio.create_task(book.keep(one))
            for one in (
                answered("set-1", CHANGED, 3.0),
                answered("set-2", CHANGED, 7.0),
                answered("set-3"),
                failed("set-4"),
            )
        ]
        await asyncio.sleep(0)
        await book.flush()
        return [row and row["sample_id"] for row in await asyncio.gather(*kept)]

    result, reported = work(use, writer, confirm=confirm)
    assert result == [None, None, "set-3", "set-4"]
    assert sorted(writer.written) == sorted(reported) == ["set-3", "set-4"]
    assert (CHANGED, 7.0) in asked  # by its latest row
    assert len(asked) == 2  # nobody vouches for a row without a reply


def test_a_row_is_written_though_nobody_waits_for_it_any_more():
    writer = Writer()

    async def use(book):
        waiting = asyncio.create_task(book.keep(answered("set-1")))
        await asyncio.sleep(0)
        waiting.cancel()
        await book.flush()

    work(use, writer)
    assert writer.written == ["set-1"]


def test_a_row_that_cannot_be_made_fails_alone():
    async def use(book):
        bug = asyncio.create_task(book.keep(answered("bug")))
        good = asyncio.create_task(book.keep(answered("set-1")))
        return await asyncio.gather(bug, good, return_exceptions=True)

    (bug, good), _ = work(use, Writer())
    assert isinstance(bug, ZeroDivisionError)
    assert good["sample_id"] == "set-1"


def test_a_disk_that_recovers_costs_nothing(monkeypatch):
    monkeypatch.setattr(ledger, "_FLUSH_SECONDS", 0.01)
    writer = Writer(failures=2)

    async def use(book):
        return (await book.keep(answered("set-1")))["sample_id"]

    assert work(use, writer)[0] == "set-1"
    assert writer.written == ["set-1"]


def test_a_store_that_is_away_for_a_while_is_waited_for(monkeypatch):
    monkeypatch.setattr(ledger, "_FLUSH_SECONDS", 0.001)
    writer = Writer(failures=20, fault=ConnectionResetError("the store is away"))

    async def use(book):
        return (await book.keep(answered("set-1")))["sample_id"]

    assert work(use, writer)[0] == "set-1"


def test_a_disk_that_does_not_recover_is_told_to_everybody(monkeypatch):
    monkeypatch.setattr(ledger, "_FLUSH_SECONDS", 0.01)
    writer = Writer(failures=100)

    async def use(book):
        with pytest.raises(StorageFailed, match="the disk is full"):
            await book.keep(answered("set-1"))
        with pytest.raises(StorageFailed, match="the disk is full"):
            await book.keep(answered("set-2"))
        return "told"

    assert work(use, writer) == ("told", [])
    assert writer.written == []
