"""The hook inside the server: this run's rows only, joined in order, and never an exception."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors import capture_hook
from actors.capture_file import CaptureFault, StatesFile, rid_of, take
from actors.capture_hook import CaptureHook, Settings, factory, parts_of
from actors.launch_capture import hook_home, place_hook

NONCE, LAYERS, WIDTH = "run1", (1, 2, 3), 8
MODULE = torch.nn.Identity()


def rid(name: str, tokens: int) -> str:
    return rid_of(NONCE, name, tokens)


def prompt(name: str, tokens: int) -> SimpleNamespace:
    """Ids and states of one prompt: every value says whose, which row and which layer it is."""
    mark = sum(map(ord, name)) % 50
    rows = torch.arange(tokens, dtype=torch.float32)[:, None] + 100 * mark
    return SimpleNamespace(
        rid=rid(name, tokens),
        tokens=tokens,
        ids=torch.arange(tokens) + 1000 * mark,
        aux=[(rows + layer / 8).repeat(1, WIDTH) for layer in LAYERS],
        last=(rows + 0.5).repeat(1, WIDTH),
    )


def batch_of(*parts, is_extend=True, padding=0, packed=False, rids=None):
    """The arguments of one forward: of each part a prompt, its first row and the row after it."""
    names = [one.rid for one, _, _ in parts] if rids is None else rids
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: is_extend),
        rids=names,
        extend_seq_lens_cpu=[stop - first for _, first, stop in parts],
        extend_prefix_lens_cpu=[first for _, first, _ in parts],
    )

    def joined(pick):
        rows = torch.cat([pick(one)[first:stop] for one, first, stop in parts])
        return torch.cat([rows, rows.new_full((padding, *rows.shape[1:]), float("nan"))])

    ids = torch.cat([one.ids[first:stop] for one, first, stop in parts])
    ids = torch.cat([ids, ids.new_zeros(padding)])
    aux = [joined(lambda one, layer=layer: one.aux[layer]) for layer in range(len(LAYERS))]
    aux = torch.cat(aux, -1) if packed else aux
    return (ids, joined(lambda one: one.last), "lm_head", batch, aux)


@pytest.fixture
def hook(tmp_path):
    made = CaptureHook(settings(tmp_path))
    yield made
    made.close()


def settings(folder: Path, **changes) -> Settings:
    values = {"folder": str(folder), "nonce": NONCE, "aux_layer_ids": LAYERS, "room_seconds": 0.0}
    return Settings(**{"max_bytes_in_flight": 1 << 20, **values, **changes})


def feed(hook: CaptureHook, *batches) -> None:
    """Everything has been written when this returns."""
    for args in batches:
        assert hook(MODULE, args, None) is None
    hook.close()
    hook._thread = threading.Thread(target=hook._write_all, daemon=True)
    hook._thread.start()


def taken(folder: Path, one):
    return take(
        folder,
        one.rid,
        expected_ids=one.ids.tolist(),
        aux_width=3 * WIDTH,
        width=WIDTH,
        aux_layer_ids=LAYERS,
    )


def fault_of(folder: Path, one) -> str:
    with pytest.raises(CaptureFault) as caught:
        taken(folder, one)
    return caught.value.name


def assert_whole(folder: Path, *prompts) -> None:
    for one in prompts:
        seen = taken(folder, one)
        assert torch.equal(seen.aux, torch.cat(one.aux, -1).bfloat16())
        assert torch.equal(seen.last, one.last.bfloat16())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_of_several_prompts_is_split_by_their_rids(hook, tmp_path, packed):
    prompts = [prompt("a", 5), prompt("b", 1), prompt("c", 9)]
    feed(hook, batch_of(*((one, 0, one.tokens) for one in prompts), packed=packed))
    assert_whole(tmp_path, *prompts)


def test_parts_of_a_prompt_are_joined_over_batches_that_hold_others_too(hook, tmp_path):
    long, short, late = prompt("long", 40), prompt("short", 7), prompt("late", 20)
    feed(
        hook,
        batch_of((short, 0, 7), (long, 0, 9)),
        batch_of((long, 9, 25)),
        batch_of((long, 25, 40), (late, 0, 1)),
        batch_of((late, 1, 20)),
    )
    assert_whole(tmp_path, long, short, late)


def test_a_file_appears_with_the_last_row_and_not_before(hook, tmp_path):
    one = prompt("a", 12)
    feed(hook, batch_of((one, 0, 6)))
    assert fault_of(tmp_path, one) == "missing"
    feed(hook, batch_of((one, 6, 12)))
    assert_whole(tmp_path, one)


def test_padding_behind_the_rows_is_nobodys(hook, tmp_path):
    one = prompt("a", 5)
    feed(hook, batch_of((one, 0, 5), padding=11))
    assert_whole(tmp_path, one)


def test_a_prompt_that_the_server_reads_anew_begins_anew(hook, tmp_path):
    one = prompt("a", 12)
    feed(hook, batch_of((one, 0, 6)), batch_of((one, 0, 8)), batch_of((one, 8, 12)))
    assert_whole(tmp_path, one)


@pytest.mark.parametrize("firsts", [[(4, 12)], [(0, 4), (6, 12)], [(0, 4), (2, 12)]])
def test_rows_that_are_missing_before_a_part_are_a_fault_of_its_own_name(hook, tmp_path, firsts):
    """A prefix from a cache, or a part that was lost."""
    one = prompt("a", 12)
    feed(hook, *(batch_of((one, *rows)) for rows in firsts))
    assert fault_of(tmp_path, one) == "part"
    assert list(tmp_path.iterdir()) == []


def test_more_rows_than_the_rid_says_are_a_fault(hook, tmp_path):
    one = prompt("a", 12)
    one.rid = rid("a", 11)
    feed(hook, batch_of((one, 0, 12)))
    assert fault_of(tmp_path, one) == "rows"


@pytest.mark.parametrize(
    "name",
    [
        "HEALTH_CHECK_1",
        "0" * 32,
        "run2-a-5",
        "run1-a",
        "run1-a-x",
        "run1",
        "xrun1-a-5",
    ],
)
def test_warm_ups_and_requests_of_others_leave_nothing(hook, tmp_path, name):
    foreign, own = prompt("f", 5), prompt("a", 6)
    foreign.rid = name
    feed(hook, batch_of((foreign, 0, 5), (own, 0, 6)))
    assert_whole(tmp_path, own)


def test_decoding_batches_and_those_of_the_servers_own_are_ignored(hook, tmp_path):
    one = prompt("a", 5)
    decoding = (torch.tensor([1]), torch.zeros(1, WIDTH), "lm_head")
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        rids=[one.rid],
        extend_seq_lens_cpu=None,
        extend_prefix_lens_cpu=None,
    )
    feed(hook, (*decoding, batch, None))
    own = batch_of((one, 0, 5))
    own[3].rids = None
    feed(hook, own)
    assert list(tmp_path.iterdir()) == []


def lacking(name: str):
    args = batch_of((prompt("a", 5), 0, 5))
    delattr(args[3], name)
    return args


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (lacking("rids"), "unknown_server"),
        (lacking("extend_seq_lens_cpu"), "unknown_server"),
        (lacking("forward_mode"), "unknown_server"),
        (batch_of((prompt("a", 5), 0, 5))[:4], "unknown_server"),
        ((*batch_of((prompt("a", 5), 0, 5))[:4], None), "no_aux"),
        ((*batch_of((prompt("a", 5), 0, 5))[:4], [torch.zeros(5, WIDTH)] * 2), "layers"),
        ((*batch_of((prompt("a", 5), 0, 5))[:4], [torch.zeros(4, WIDTH)] * 3), "batch"),
        (batch_of((prompt("a", 5), 0, 5), rids=[rid("a", 5), rid("b", 5)]), "batch"),
    ],
)
def test_a_server_that_passes_something_else_is_named_to_whoever_waits(hook, tmp_path, args, fault):
    with pytest.raises(CaptureFault, match=fault):
        parts_of(args, NONCE, len(LAYERS))
    feed(hook, args)
    assert fault_of(tmp_path, prompt("a", 5)) == fault
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_writer_reaches_the_reader_and_nobody_else(hook, tmp_path, monkeypatch):
    bad, good = prompt("bad", 5), prompt("good", 6)

    def refuse(self, first, *_):
        if first == 0 and "bad" in self._final.name:
            raise PermissionError("no")
        return write(self, first, *_)

    write = StatesFile.write
    monkeypatch.setattr(StatesFile, "write", refuse)
    feed(hook, batch_of((bad, 0, 5), (good, 0, 6)))
    assert fault_of(tmp_path, bad) == "not_written"
    assert_whole(tmp_path, good)


def test_of_several_faults_of_one_prompt_the_first_is_told(hook, tmp_path, monkeypatch):
    one = prompt("a", 12)
    with monkeypatch.context() as broken:
        broken.setattr(StatesFile, "write", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
        feed(hook, batch_of((one, 0, 4)))
    feed(hook, batch_of((one, 4, 8)), batch_of((one, 8, 12)))
    assert fault_of(tmp_path, one) == "not_written"
    feed(hook, batch_of((one, 0, 12)))
    assert_whole(tmp_path, one)


def test_a_folder_that_is_gone_is_survived(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    hook = CaptureHook(settings(folder))
    folder.rmdir()
    feed(hook, batch_of((prompt("a", 5), 0, 5)))
    folder.mkdir()
    one = prompt("b", 5)
    feed(hook, batch_of((one, 0, 5)))
    assert_whole(folder, one)
    hook.close()


def test_states_in_flight_are_bounded_and_the_server_waits(tmp_path, monkeypatch):
    held, gate, seen = threading.Event(), threading.Event(), []

    def slow(self, first, *rows):
        held.set()
        assert gate.wait(30)
        seen.append(hook._room._used)
        return write(self, first, *rows)

    write = StatesFile.write
    monkeypatch.setattr(StatesFile, "write", slow)
    prompts = [prompt(name, 10) for name in "abcd"]
    size = parts_of(batch_of((prompts[0], 0, 10)), NONCE, 3)[0].host_bytes
    assert size == 10 * (4 + 2 * 4 * WIDTH)
    hook = CaptureHook(settings(tmp_path, max_bytes_in_flight=2 * size))
    served = []

    def serve():
        for one in prompts:
            hook(MODULE, batch_of((one, 0, 10)), None)
            served.append(one.rid)

    server = threading.Thread(target=serve)
    server.start()
    assert held.wait(30)
    server.join(0.2)
    assert server.is_alive(), "the third prompt did not wait"
    assert len(served) == 2
    gate.set()
    server.join(30)
    hook.close()
    assert max(seen) <= 2 * size
    assert_whole(tmp_path, *prompts)


def test_one_part_larger_than_the_bound_travels_alone(tmp_path):
    hook = CaptureHook(settings(tmp_path, max_bytes_in_flight=1))
    prompts = [prompt("a", 10), prompt("b", 10)]
    feed(hook, batch_of((prompts[0], 0, 10), (prompts[1], 0, 10)))
    assert_whole(tmp_path, *prompts)
    hook.close()


def test_of_many_prompts_that_were_cut_off_the_oldest_are_forgotten(hook, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_hook, "_UNFINISHED", 3)
    cut = [prompt(f"cut{n}", 9) for n in range(5)]
    feed(hook, *(batch_of((one, 0, 4)) for one in cut))
    assert len(list(tmp_path.iterdir())) == 3
    feed(hook, batch_of((cut[4], 4, 9)), batch_of((cut[0], 4, 9)))
    assert taken(tmp_path, cut[4]).rid == cut[4].rid
    assert fault_of(tmp_path, cut[0]) == "part"


def test_half_files_of_a_server_that_is_gone_are_swept_and_those_of_another_stay(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.strip()
    (tmp_path / f".part-{gone}-x.safetensors").write_bytes(b"x")
    (tmp_path / ".part-1-x.safetensors").write_bytes(b"x")
    (tmp_path / "whole.safetensors").write_bytes(b"x")
    CaptureHook(settings(tmp_path)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".part-1-x.safetensors",
        "whole.safetensors",
    ]


@pytest.mark.parametrize(("rank", "hooks"), [(0, True), (1, False)])
def test_only_the_first_rank_hands_over(tmp_path, monkeypatch, rank, hooks):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    config = vars(settings(tmp_path))
    made = factory(config)
    assert isinstance(made, CaptureHook) == hooks
    if made is not None:
        made.close()


def test_a_setting_that_the_hook_does_not_know_keeps_the_server_from_starting(tmp_path):
    with pytest.raises(TypeError, match="unheard_of"):
        factory({**vars(settings(tmp_path)), "unheard_of": 1})


def test_the_hook_needs_nothing_of_ours_but_the_two_files(tmp_path):
    """In an interpreter that has torch and safetensors, and nothing else that Eyas needs."""
    place_hook(tmp_path)
    absent = ("aiohttp", "pydantic", "ray", "orjson", "transformers", "pyarrow")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        f"sys.path.insert(0, {str(hook_home(tmp_path))!r})\n"
        "from actors.capture_hook import factory\n"
        "ours = sorted(n for n in sys.modules if n.split('.')[0] in ('actors', 'pipelines'))\n"
        "assert ours == ['actors', 'actors.capture_file', 'actors.capture_hook'], ours\n"
        f"import actors; assert actors.__file__.startswith({str(tmp_path)!r}), actors.__file__\n"
    )
    subprocess.run([sys.executable, "-I", "-c", program], check=True, cwd=tmp_path)
