"""An incident of thousands of ranks: what is listed, what is summed up, and how long it gets."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import statistics
from pathlib import Path

import pytest

from stabilizer.localize.incident import CandidateGroup, Incident, MicroBatchReport
from stabilizer.localize.shortening import first_of, shortened
from stabilizer.localize.summary import summarize
from stabilizer.localize.suspects import Suspect, find_suspects, largest_sum
from stabilizer.localize.table import incident_text
from tests.incidents import make_incident, make_layers, make_token
from tests.localize_loops import Plan, grad_loc, run, written
from tests.models import make_transformer

NUM_RANKS, NUM_MICRO_BATCHES = 10_000, 8
BAD = {(7, 3): 30000.0, (9999, 7): math.nan}


def _norms() -> list[list[float]]:
    random.seed(0)
    norms = [[random.lognormvariate(0, 0.2) for _ in range(NUM_MICRO_BATCHES)] for _ in range(NUM_RANKS)]
    for (rank, micro_batch), norm in BAD.items():
        norms[rank][micro_batch] = norm
    return norms


def _reports(found: list[Suspect]) -> tuple[MicroBatchReport, ...]:
    names = [field.name for field in dataclasses.fields(MicroBatchReport)]
    return tuple(MicroBatchReport(**{name: getattr(one, name) for name in names}) for one in found)


def test_thousands_of_ranks_fit() -> None:
    norms = _norms()
    suspects = find_suspects(norms, [1.0] * NUM_RANKS, factor=3.0, fallback=1.0)
    whole = make_incident(
        micro_batches=_reports(suspects),
        other_micro_batches=None,
        tokens=tuple(make_token(rank=rank, context="x" * 100) for rank in range(NUM_RANKS)),
        candidates=tuple(
            CandidateGroup(rank=rank, micro_batch=0, num_units=99, units=tuple((row, 1000) for row in range(16)))
            for rank in range(NUM_RANKS)
        ),
        notes=tuple(f"rank {rank}: its own gradients are finite before the reduction" for rank in range(NUM_RANKS)),
        layers=tuple(make_layers(*range(1, 100))),
        error="; ".join(f"rank {rank}: PlantedError: no" for rank in range(NUM_RANKS)),
    )
    short = shortened(dataclasses.replace(whole, summary=summarize(dataclasses.replace(whole, error=None))))
    assert len(whole.to_json()) > 10_000_000
    assert len(short.to_json()) < 200_000
    assert Incident.from_json(short.to_json()) == short
    assert len(incident_text(short)) < 20_000
    assert f"{NUM_RANKS} tokens" in short.summary
    assert f"{NUM_RANKS - 100} more tokens are not listed" in short.notes
    assert f"{NUM_RANKS - 32} more candidates are not listed" in short.notes


def test_the_suspicious_and_the_largest_others_are_listed() -> None:
    norms = _norms()
    suspects = find_suspects(norms, [1.0] * NUM_RANKS, factor=3.0, fallback=1.0)
    short = shortened(make_incident(micro_batches=_reports(suspects), other_micro_batches=None))
    healthy = sorted(norm for row in norms for norm in row if norm < 100.0)
    listed = {(one.rank, one.micro_batch) for one in short.micro_batches if one.is_suspect}
    assert listed == set(BAD)
    others = [one for one in short.micro_batches if not one.is_suspect]
    assert sorted(one.norm for one in others) == healthy[-32:]
    for one in short.micro_batches:
        assert one.norm == norms[one.rank][one.micro_batch] or math.isnan(norms[one.rank][one.micro_batch])
    # In the order of the ranks, as where all are listed.
    places = [(one.rank, one.micro_batch) for one in short.micro_batches]
    assert places == sorted(places)
    rest = short.other_micro_batches
    assert rest is not None
    assert (rest.num, rest.num_suspects) == (NUM_RANKS * NUM_MICRO_BATCHES - len(BAD) - 32, 0)
    assert rest.num + len(short.micro_batches) == len(suspects)
    assert rest.largest_norm == healthy[-33]
    assert rest.median_norm == statistics.median(healthy[:-32])
    text = incident_text(short)
    assert f"{rest.num} others: median {rest.median_norm:.4g}, largest {rest.largest_norm:.4g}" in " ".join(
        text.split()
    )


@pytest.mark.parametrize("value", [50.0, math.nan, math.inf])
def test_everything_is_suspicious(value: float) -> None:
    found = tuple(
        MicroBatchReport(rank=rank, micro_batch=0, norm=value if rank % 2 else 60.0, is_suspect=True)
        for rank in range(1000)
    )
    short = shortened(make_incident(micro_batches=found, other_micro_batches=None))
    is_finite = math.isfinite(value)
    # What is not finite comes first.
    assert [one.rank for one in short.micro_batches] == list(range(0 if is_finite else 1, 256, 2))
    rest = short.other_micro_batches
    assert rest is not None
    assert (rest.num, rest.num_suspects) == (872, 872)
    assert repr(rest.largest_norm) == repr(60.0 if is_finite else value)
    assert rest.median_norm == (50.0 if is_finite else 60.0)
    assert "872 others, 872 of them suspicious" in " ".join(incident_text(short).split())
    assert Incident.from_json(short.to_json()).to_json() == short.to_json()
    json.loads(short.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_what_fits_is_left_as_it_is() -> None:
    local = tuple(MicroBatchReport(rank=rank, micro_batch=0, norm=1.0 + rank) for rank in range(32))
    suspects = tuple(MicroBatchReport(rank=rank, micro_batch=1, norm=99.0, is_suspect=True) for rank in range(128))
    whole = make_incident(
        micro_batches=(*local, *suspects),
        other_micro_batches=None,
        tokens=tuple(make_token(row=row) for row in range(100)),
        notes=tuple(map(str, range(24))),
    )
    assert shortened(whole) == whole
    assert "others" not in incident_text(whole)


def test_the_last_notes_are_kept() -> None:
    notes = [*(f"rank {number}" for number in range(1000)), "the tap", "not the same"]
    short = shortened(make_incident(notes=tuple(notes)))
    assert len(short.notes) == 25
    assert short.notes[:16] == tuple(notes[:16])
    assert short.notes[16] == "and 978 more"
    assert short.notes[-2:] == ("the tap", "not the same")
    assert len(first_of(["x" * 10**6], num=3)[0]) == 4000


def test_no_sum_is_longer_than_its_parts() -> None:
    """Vectors that all point one way reach the bound, and no others exceed it."""
    generator = random.Random(0)
    for is_same_way in (True, False):
        for is_averaged in (True, False):
            ranks, micro_batches, dim = 5, 3, 4
            one = [generator.gauss(0, 1) for _ in range(dim)]
            vectors = [
                [
                    [generator.random() * value for value in one]
                    if not is_same_way
                    else [(rank + number + 1) * value for value in one]
                    for number in range(micro_batches)
                ]
                for rank in range(ranks)
            ]
            total = [math.fsum(vector[i] for row in vectors for vector in row) for i in range(dim)]
            norm = math.hypot(*total) / (ranks if is_averaged else 1)
            local = [[math.hypot(*vector) for vector in row] for row in vectors]
            suspects = find_suspects(local, [1.0] * ranks, factor=3.0, fallback=1.0)
            bound = largest_sum(suspects, is_averaged=is_averaged)
            if is_same_way:
                assert bound == pytest.approx(norm, rel=1e-12)
            else:
                assert norm < bound
    assert largest_sum([], is_averaged=True) == math.inf


def test_a_run_writes_short_ones(tmp_path: Path) -> None:
    plan = Plan(steps=13, faulty=12, bad=((0, 17, 0, 3),), micro_batches=40, rows=1, length=8)
    callback = grad_loc(tmp_path, warmup_steps=10, rule={"name": "robust_log", "warmup_steps": 10})
    run(plan, [callback], make_model=functools.partial(make_transformer, num_layers=1))
    (incident,) = callback.incidents
    assert [(one.micro_batch, one.position) for one in incident.tokens] == [(17, 3)]
    assert [one.micro_batch for one in incident.micro_batches if one.is_suspect] == [17]
    assert len(incident.micro_batches) == 33
    rest = incident.other_micro_batches
    assert rest is not None
    assert rest.num == 7
    assert rest.largest_norm <= min(one.norm for one in incident.micro_batches)
    # The replay is told beside what had been observed of the same micro-batch.
    (worst,) = [one for one in incident.micro_batches if one.is_suspect]
    assert (incident.replayed_rank, incident.replayed_micro_batch, incident.local_norm) == (0, 17, worst.norm)
    assert incident.replayed_norm == pytest.approx(worst.norm, rel=1e-4)
    (told,) = written(tmp_path).values()
    assert told["other_micro_batches"]["num"] == 7
    assert told["local_norm"] == worst.norm
