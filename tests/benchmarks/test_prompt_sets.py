"""The made-up sets of the prepare benchmark: each in its form, usable but for what is broken."""

from collections import Counter

from benchmarks import prompt_sets
from benchmarks.prompt_sets import KINDS, Writer, write_sets
from pipelines.sources.files import columns_of, find_files, read_chunks, rows_of
from pipelines.sources.formats import recognise
from pipelines.sources.messages import parse_row
from pipelines.sources.row import SourceRow


def test_every_set_is_recognised_and_only_broken_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_sets, "BROKEN_EVERY", 6)
    assert sum(write_sets(tmp_path / "sets", 50).values()) == 50
    formats, outcomes = set(), Counter()
    for kind in KINDS:
        files = find_files(str(tmp_path / "sets" / kind.file))
        reader = recognise(columns_of(files[0]), file=kind.file)
        formats.add(reader.name)
        for chunk in read_chunks(files, chunk_bytes=1 << 20):
            for line, value in rows_of(chunk):
                row = parse_row(value, reader, file=kind.file, line=line)
                outcomes[isinstance(row, SourceRow)] += 1
    assert len(formats) == len(KINDS)
    assert outcomes == {True: 42, False: 8}


def test_texts_are_the_same_for_a_seed_and_long_as_asked():
    assert Writer(1).text(500) == Writer(1).text(500) != Writer(2).text(500)
    writer = Writer(3)
    lengths = sorted(len(writer.text(800)) for _ in range(401))
    assert 600 < lengths[200] < 1200
