"""Planted bad tokens on several ranks: exactly they are found, and what is left of the step is what it should be."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.localize.incident import Incident
from stabilizer.names import layer_names
from tests import reference
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, Seen, Unit, grad_loc, run, written
from tests.models import make_transformer
from tests.reference_localize import gradient_without

STRATEGIES = {"ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4}
strategies_with_a_long_one = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[pytest.mark.covers(strategy=name), *([pytest.mark.slow] if name == "hsdp" else [])])
        for name in STRATEGIES
    ],
)
#: Small, so that a test takes seconds.
make_model = functools.partial(make_transformer, num_layers=2)


def scattered(num: int, *, seed: int, ranks: tuple[int, ...], micro_batches: tuple[int, ...]) -> tuple[Unit, ...]:
    """Tokens anywhere in these micro-batches of these ranks, at least one in each."""
    places = [(rank, micro_batch) for rank in ranks for micro_batch in micro_batches]
    generator = torch.Generator().manual_seed(seed)
    units: set[Unit] = set()
    while len(units) < num:
        place = places[len(units) % len(places)]
        row, position = (int(torch.randint(size, (), generator=generator)) for size in (4, 16))
        units.add((*place, row, position))
    return tuple(sorted(units))


def faults_of(world_size: int) -> tuple[Fault, ...]:
    """One, two, five and fifty bad tokens, and one that is little over what sets off a search."""
    last, middle = world_size - 1, world_size // 2
    return (
        Fault(22, ((last, 2, 1, 7),)),
        Fault(24, ((0, 1, 3, 15), (middle, 3, 0, 0)), 1e6),
        Fault(26, scattered(5, seed=1, ranks=(0, last), micro_batches=(0, 2)), 2000.0),
        Fault(28, scattered(50, seed=2, ranks=(0, middle), micro_batches=(0, 1, 3)), 1000.0),
        Fault(30, ((middle, 0, 2, 3),), 200.0 * world_size),
    )


def search(rank: int, world_size: int, plan: Plan, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train with GradLoc, and keep what the optimizer was given in the faulty steps."""
    seen = Seen([fault.step for fault in plan.faults])
    callback = grad_loc(folder, cooldown_steps=0, **options)
    run(plan, [callback], rank=rank, make_model=make_model, seen=seen)
    # Each rank has its own clock.
    incidents = [dataclasses.replace(one, seconds=0.0).to_json() for one in callback.incidents]
    return {"incidents": incidents, "seen": seen}


def incidents_of(found: dict[str, Any]) -> dict[int, Incident]:
    return {one.step: one for one in map(Incident.from_json, found["incidents"])}


def norm_of(incident: Incident, gradients: dict[str, Tensor]) -> float:
    """What the incident's norm is of: the whole, or a layer."""
    name = incident.threshold_of.split(" ")[0]
    if name == "total":
        return reference.total_norm(gradients)
    return reference.layer_norms(gradients, dict(zip(gradients, layer_names(list(gradients)), strict=True)).get)[name]


def units_of(incident: Incident) -> list[Unit]:
    return sorted((one.rank, one.micro_batch, one.row, one.position) for one in incident.tokens)  # type: ignore[misc]


@strategies_with_a_long_one
@pytest.mark.parametrize("syncs", [False, True])
@pytest.mark.covers(feature="token localisation", host="plain")
def test_exactly_the_bad_tokens(strategy: str, syncs: bool, tmp_path: Path) -> None:
    world_size = STRATEGIES[strategy]
    plan = Plan(strategy, steps=32, faults=faults_of(world_size), syncs=syncs)
    results = run_distributed(search, plan, str(tmp_path), {}, world_size=world_size, timeout=120)
    assert all(found["incidents"] == results[0]["incidents"] for found in results)
    incidents, seen = incidents_of(results[0]), results[0]["seen"]
    assert sorted(incidents) == [fault.step for fault in plan.faults]
    for fault in plan.faults:
        incident = incidents[fault.step]
        num_searched = len({unit[1] for unit in fault.bad})
        assert units_of(incident) == sorted(fault.bad), fault
        assert (incident.type, incident.reproducible, incident.is_complete, incident.error) == ("D", True, True, None)
        assert incident.num_passes <= 3 * num_searched, fault
        assert incident.num_forwards <= (incident.num_passes if strategy == "fsdp1" else num_searched), fault
        assert {(one.rank, one.micro_batch) for one in incident.micro_batches if one.is_suspect} == {
            unit[:2] for unit in fault.bad
        }
        # Of the whole step, in one process: with and without these tokens' terms.
        parts = {"plan": plan, "step": fault.step, "parameters": seen.parameters[fault.step]}
        whole, rest = (
            norm_of(incident, gradient_without(**parts, make_model=make_model, num_ranks=world_size, without=units))
            for units in ((), fault.bad)
        )
        assert incident.observed_norm == pytest.approx(whole, rel=1e-4)
        assert incident.counterfactual_norm == pytest.approx(rest, rel=1e-3), fault
    small = incidents[30]
    assert 3 < small.observed_norm / small.threshold < 6
    assert {step: len(one["tokens"]) for step, one in written(tmp_path).items()} == {
        fault.step: len(fault.bad) for fault in plan.faults
    }


@strategies_with_a_long_one
@pytest.mark.parametrize("syncs", [False, True])
@pytest.mark.covers(feature="token localisation", host="plain")
def test_the_step_goes_on_without_the_bad_tokens(strategy: str, syncs: bool, tmp_path: Path) -> None:
    world_size = STRATEGIES[strategy]
    plan = Plan(strategy, steps=28, faults=faults_of(world_size)[:3], syncs=syncs)
    results = run_distributed(
        search, plan, str(tmp_path), {"on_found": "drop_tokens"}, world_size=world_size, timeout=120
    )
    incidents, seen = incidents_of(results[0]), results[0]["seen"]
    for fault in plan.faults:
        incident = incidents[fault.step]
        num_searched = len({unit[1] for unit in fault.bad})
        assert (units_of(incident), incident.action) == (sorted(fault.bad), "drop_tokens")
        assert incident.num_passes <= 3 * num_searched
        assert incident.num_rebuild_passes == plan.micro_batches
        # The same arithmetic in one process; then what it stands for, with the rounding of a whole step.
        parts = {"plan": plan, "step": fault.step, "parameters": seen.parameters[fault.step]}
        wanted, exact = (
            gradient_without(**parts, make_model=make_model, num_ranks=world_size, without=fault.bad, dtype=dtype)
            for dtype in (torch.float32, torch.float64)
        )
        for found in results:
            given = found["seen"].gradients[fault.step]
            assert given.keys() == wanted.keys()
            assert {name for name in wanted if not error(given[name], wanted[name]) < 1e-6} == set()
            assert error(flat(given), flat(exact)) < 1e-6


def error(given: Tensor, wanted: Tensor) -> float:
    return float((given.double() - wanted.double()).norm() / wanted.double().norm())


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
