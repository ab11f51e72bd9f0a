"""Skip lists: what is left out, files that say so, and files that nobody should believe."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from stabilizer.errors import StabilizerWarning
from stabilizer.recovery import SampleWatch, SkipEntry, SkipList, read_skip_list, write_skip_list
from tests.recovery_reference import dropped
from tests.recovery_runs import BATCH, Guard, Line, fit

ENTRY: dict[str, Any] = {
    "first_step": 30,
    "last_step": 35,
    "epoch": 0,
    "first_batch": 30,
    "last_batch": 35,
    "num_ranks": 1,
    "sample_ids": [[1, 2]],
    "reason": "NaN",
}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_left_out_is_what_the_entries_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(12):
        first, last = sorted(int(batch) for batch in rng.integers(0, 60, 2))
        found.append({"epoch": int(rng.integers(0, 3)), "first_batch": first, "last_batch": min(last, first + 9)})
    skips = SkipList(SkipEntry(0, 1, **one) for one in found)
    expected = dropped(found, num_epochs=4, num_batches=70)
    assert [(e, b) for e in range(4) for b in range(70) if skips.has(e, b)] == expected
    assert skips.num_batches == len(expected)


def test_samples_are_left_out_in_later_epochs_only() -> None:
    entries = [SkipEntry(0, 1, epoch=1, first_batch=0, last_batch=1, sample_ids=((3, 4), (5,))), SkipEntry(7, 8)]
    skips = SkipList(entries)
    assert [sorted(skips.samples(epoch)) for epoch in range(4)] == [[], [], [3, 4, 5], [3, 4, 5]]
    # Of a run with another number of ranks the micro-batches are other ones.
    assert skips.has(1, 0)
    skips.renumber(2)
    assert not skips.has(1, 0)
    assert sorted(skips.samples(2)) == [3, 4, 5]


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    entries = [
        SkipEntry(3, 9, epoch=0, first_batch=6, last_batch=19, num_ranks=2, sample_ids=((1, 2), (3,)), reason="NaN"),
        SkipEntry(12, 13, num_ranks=2),
    ]
    file = tmp_path / "new" / "skip_list.json"
    write_skip_list(file, entries)
    write_skip_list(file, entries)
    assert read_skip_list(file) == entries
    assert [path.name for path in file.parent.iterdir()] == ["skip_list.json"]
    assert read_skip_list(tmp_path / "none.json") == []


def with_entry(**changes: Any) -> str:
    return json.dumps({"version": 1, "entries": [{**ENTRY, **changes}]})


HOSTILE = {
    "empty": ("", "it is no JSON"),
    "truncated": (with_entry()[:60], "it is no JSON"),
    "no text": (b"\xff\xfe\x00\x01", "it is no text"),
    "pickle": (b"\x80\x04\x95cos\nsystem\n", "it is no text"),
    "list": ("[]", "it holds a list: expected an object"),
    "version": ('{"version": 2, "entries": []}', "version=2: expected 1"),
    "bool version": ('{"version": true, "entries": []}', "version=True: expected 1"),
    "no entries": ('{"version": 1}', "entries=None: expected a list"),
    "entry": ('{"version": 1, "entries": [7]}', r"entries\[0\]=7: expected an object"),
    "float": (with_entry(first_step=1.5), r"entries\[0\].first_step=1.5: expected a whole number"),
    "bool": (with_entry(first_step=True), r"entries\[0\].first_step=True: expected a whole number"),
    "text": (with_entry(last_batch="../../etc/passwd"), r"entries\[0\].last_batch='\.\./.*expected a whole number"),
    "negative": (with_entry(first_batch=-5), r"first_batch=-5: expected a whole number from -1"),
    "huge": (with_entry(last_batch=10**30), "last_batch=1000.*: expected a whole number"),
    "endless digits": ('{"version": 1, "entries": [' + "9" * 5000 + "]}", "it is no JSON"),
    "backwards": (with_entry(last_step=3), r"entries\[0\]: last_step=3 comes before first_step=30"),
    "half a place": (with_entry(epoch=-1), "epoch is missing where others"),
    "NaN": ('{"version": 1, "entries": [{"first_step": NaN}]}', "it is no JSON .NaN is no number"),
    "deep": ("[" * 100_000, "it is nested too deeply"),
    "ranks": (with_entry(num_ranks=0), "num_ranks=0: expected a whole number from 1"),
    "samples": (with_entry(sample_ids=[[1, "a"]]), r"sample_ids\[0\]='a': expected a whole number"),
    "flat samples": (with_entry(sample_ids=[1, 2]), "sample_ids=.*: expected a list of numbers for each rank"),
    "reason": (with_entry(reason={"a": 1}), "reason=.*: expected text"),
    "a million": ('{"version": 1, "entries": [' + ",".join(["{}"] * 10**6) + "]}", "it has 1000000 entries"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_error(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    file = tmp_path / "skip_list.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=message) as raised:
        read_skip_list(file)
    assert str(file) in str(raised.value)
    assert "mend it, or delete it" in str(raised.value)
    assert len(str(raised.value)) < 800
    assert time.monotonic() - begin < 5


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "skip_list.json"
    with file.open("wb") as sparse:
        sparse.truncate(10**10)
    with pytest.raises(ValueError, match="it has 10000000000 bytes"):
        read_skip_list(file)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "skip_list.json"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(ValueError, match="it is no file"):
        read_skip_list(path)


def test_a_run_with_a_hostile_list_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text(with_entry(last_batch="all"))
    with pytest.raises(ValueError, match=r"list\.json: entries.*last_batch='all'"):
        fit(Guard(skip_list=file), tmp_path, data=Line(BATCH * 4))
    file.write_text(with_entry(last_batch=10**9))
    with pytest.raises(ValueError, match=r"999999971 micro-batches would be left out, more than max_skips=10000"):
        fit(Guard(skip_list=file), tmp_path, data=Line(BATCH * 4))


def test_a_list_that_a_person_wrote_is_honoured(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    entry = {"first_step": 2, "last_step": 3, "epoch": 0, "first_batch": 2, "last_batch": 3, "num_ranks": 1}
    others = {**entry, "first_batch": 5, "last_batch": 6, "num_ranks": 4}
    file.write_text(json.dumps({"version": 1, "entries": [entry, entry, others]}))
    with pytest.warns(StabilizerWarning, match="entries of runs with 4 ranks, and there are 1"):
        run = fit(Guard(skip_list=file), tmp_path, data=Line(BATCH * 8))
    assert [batch for _, batch, _ in run.seen] == [0, 1, 4, 5, 6, 7]


def test_a_sampler_that_is_watched_stays_what_it_was() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), batch_size=4, drop_last=False)
    kind = type(sampler)
    watch = SampleWatch(epoch=lambda: 0, listed=lambda epoch: frozenset())
    undo = watch.watch(sampler)
    assert undo is not None
    assert watch.watch(sampler) is None  # once is enough
    loader = DataLoader(range(10), batch_sampler=sampler)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert isinstance(sampler, BatchSampler)
    assert (type(sampler).__name__, len(sampler), sampler.batch_size) == ("BatchSampler", 3, 4)
    assert watch.samples(0, 1, 5) == (4, 5, 6, 7, 8, 9)
    undo()
    assert type(sampler) is kind
    assert vars(sampler).keys() == {"sampler", "batch_size", "drop_last"}
    assert watch.watch(None) is None
    assert watch.watch([[1, 2]]) is None


def test_listed_samples_are_replaced_within_their_batch() -> None:
    watch = SampleWatch(epoch=lambda: 1, listed=lambda epoch: frozenset({0, 5, 6, 8, 9}))
    batches = [[0, 1, 2], [3, 4, 5, 6], [8, 9], ["text", 8]]
    assert list(watch.follow(batches)) == [[1, 1, 2], [3, 4, 3, 4], [3, 4], ["text", 8]]
    assert watch.num_replaced == 5
    # Where there is nothing else, it stays.
    assert list(watch.follow([[8, 9]])) == [[8, 9]]


def test_the_memory_of_samples_is_bounded() -> None:
    watch = SampleWatch(epoch=lambda: 0, listed=lambda epoch: frozenset())
    for _ in watch.follow([list(range(1000))] * 400):
        pass
    assert len(watch.samples(0, 0, 400)) <= 2**18
    assert len(watch.samples(0, 390, 399)) == 10_000
