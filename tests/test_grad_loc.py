"""GradLocCallback in one process: planted bad tokens, what is said of them, and what is done."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback
from stabilizer.localize.incident import Incident
from tests import reference
from tests.localize_loops import Fault, Plan, Seen, Unit, batches, grad_loc, run, written
from tests.models import make_transformer
from tests.reference_localize import gradient_without

#: Small, so that a test takes seconds.
make_model = functools.partial(make_transformer, num_layers=2)
OWN_RULE = {"name": "robust_log", "warmup_steps": 20}
MANY = tuple(
    (0, micro_batch, number % 4, (5 * number + micro_batch) % 16) for micro_batch in (0, 3) for number in range(25)
)
FAULTS = (
    Fault(22, ((0, 2, 1, 7),)),
    Fault(24, ((0, 0, 3, 15), (0, 3, 0, 0)), 1e6),
    Fault(26, ((0, 1, 0, 3), (0, 1, 2, 9), (0, 1, 2, 10), (0, 3, 1, 0), (0, 3, 3, 15)), 2000.0),
    Fault(28, tuple(sorted(set(MANY))), 500.0),
    Fault(30, ((0, 3, 2, 3),), 400.0),
)
pytestmark = [pytest.mark.covers(strategy="single", host="plain", feature="token localisation")]


def units_of(incident: Incident) -> list[Unit]:
    return sorted((one.rank, one.micro_batch, one.row, one.position) for one in incident.tokens)  # type: ignore[misc]


def train(folder: Path, plan: Plan, *others: Any, **options: Any) -> tuple[list[Incident], Seen, Any]:
    """The incidents of a run, what the optimizer saw in its faulty steps, and the callback."""
    seen = Seen([fault.step for fault in plan.faults])
    callback = grad_loc(folder, **{"cooldown_steps": 0, **options})
    run(plan, [callback, *others], make_model=make_model, seen=seen)
    return callback.incidents, seen, callback


def without(plan: Plan, seen: Seen, fault: Fault, units: Any, **options: Any) -> dict[str, Tensor]:
    return gradient_without(
        plan, fault.step, seen.parameters[fault.step], make_model=make_model, without=units, **options
    )


def error(given: Tensor | None, wanted: Tensor) -> float:
    assert given is not None
    return float((given.double() - wanted.double()).norm() / wanted.double().norm())


def test_exactly_the_bad_tokens(tmp_path: Path) -> None:
    plan = Plan(steps=32, faults=FAULTS)
    incidents, seen, _ = train(tmp_path, plan)
    assert [one.step for one in incidents] == [fault.step for fault in FAULTS]
    for incident, fault in zip(incidents, FAULTS, strict=True):
        num_searched = len({unit[1] for unit in fault.bad})
        assert units_of(incident) == sorted(fault.bad), fault
        assert (incident.type, incident.reproducible, incident.is_complete, incident.error) == ("D", True, True, None)
        assert (incident.num_forwards, incident.num_rebuild_passes) == (num_searched, 0)
        assert 2 * num_searched <= incident.num_passes <= 3 * num_searched
        assert incident.threshold_of == "total (robust_log)"
        whole, rest = (reference.total_norm(without(plan, seen, fault, units)) for units in ((), fault.bad))
        assert incident.observed_norm == pytest.approx(whole, rel=1e-4)
        assert incident.counterfactual_norm == pytest.approx(rest, rel=1e-3), fault
        shares: dict[int, float] = {}
        for one in incident.tokens:
            shares[one.micro_batch] = shares.get(one.micro_batch, 0.0) + one.share
            assert one.grad_norm > 0
        assert all(0.9 < share <= 1 + 1e-6 for share in shares.values())
    assert 3 < incidents[-1].observed_norm / incidents[-1].threshold < 6


def test_what_arrives_at_a_token_is_its_own_gradient(tmp_path: Path) -> None:
    """Of the logits of one token: softmax minus target, times its weight over the number of tokens."""
    plan = Plan(steps=24, faults=FAULTS[:1])
    incidents, seen, _ = train(tmp_path, plan)
    model = make_model().double()
    model.load_state_dict({name: value.double() for name, value in seen.parameters[22].items()})
    tokens, targets, weights = list(batches(plan, 0))[22][2]
    chance = model(tokens)[1, 7].detach().softmax(-1)
    chance[targets[1, 7]] -= 1
    found = incidents[0].tokens[0]
    assert found.grad_norm == pytest.approx(float(chance.norm() * weights[1, 7] / (4 * 4 * 16)), rel=1e-5)


def test_the_json_of_an_incident(tmp_path: Path) -> None:
    plan = Plan(steps=25, faults=FAULTS[:2])
    incidents, _, _ = train(tmp_path, plan)
    found = written(tmp_path)
    assert sorted(found) == [22, 24]
    for incident in incidents:
        told = found[incident.step]
        assert told["schema"] == 1
        assert told["type"] == "D"
        assert told["observed_norm"] == pytest.approx(incident.observed_norm)
        assert told["num_passes"] == incident.num_passes
        assert told["reproducible"] is True
        assert {layer["name"] for layer in told["layers"]} == {
            "embed_tokens",
            "layers.0",
            "layers.1",
            "norm",
            "lm_head",
        }
        keys = {"rank", "micro_batch", "row", "position", "token_id", "text", "grad_norm", "share"}
        assert all(keys | {"log_ratio", "advantage"} <= set(token) for token in told["tokens"])
        assert [token["text"] for token in told["tokens"]] == [None] * len(told["tokens"])
    assert [(token["row"], token["position"]) for token in found[22]["tokens"]] == [(1, 7)]


@pytest.mark.parametrize("others", ["alone", "beside clips"])
def test_the_step_goes_on_without_the_bad_tokens(others: str, tmp_path: Path) -> None:
    plan = Plan(steps=28, faults=FAULTS[:3])
    beside = (LayerClipCallback(mode="observe"), GradNormCallback()) if others == "beside clips" else ()
    incidents, seen, _ = train(tmp_path, plan, *beside, on_found="drop_tokens")
    assert [one.step for one in incidents] == [fault.step for fault in plan.faults]
    for incident, fault in zip(incidents, plan.faults, strict=True):
        num_searched = len({unit[1] for unit in fault.bad})
        assert units_of(incident) == sorted(fault.bad)
        assert incident.action == "drop_tokens"
        assert incident.num_passes <= 3 * num_searched
        assert incident.num_rebuild_passes == plan.micro_batches
        wanted = without(plan, seen, fault, fault.bad, dtype=torch.float32)
        given = seen.gradients[fault.step]
        assert given.keys() == wanted.keys()
        assert {name for name, gradient in wanted.items() if not error(given[name], gradient) < 1e-6} == set()


def test_clips_see_the_norm_without_the_bad_tokens(tmp_path: Path) -> None:
    """A fixed cap below the norm that is left: what the optimizer gets has that norm, and the direction of the rest."""
    plan = Plan(steps=24, faults=FAULTS[:1])
    clip = AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 0.1})
    incidents, seen, _ = train(tmp_path, plan, clip, on_found="drop_tokens", rule=OWN_RULE)
    assert [(one.step, one.action) for one in incidents] == [(22, "drop_tokens")]
    wanted = without(plan, seen, FAULTS[0], FAULTS[0].bad, dtype=torch.float32)
    norm = reference.total_norm(wanted)
    assert norm > 0.2
    for name, gradient in wanted.items():
        assert error(seen.gradients[22][name], gradient * (0.1 / norm)) < 1e-5, name


def test_a_step_that_is_skipped(tmp_path: Path) -> None:
    plan = Plan(steps=26, faults=FAULTS[:2])
    incidents, seen, _ = train(tmp_path, plan, on_found="skip_step")
    assert [(one.step, one.action, one.num_rebuild_passes) for one in incidents] == [
        (22, "skip_step", 0),
        (24, "skip_step", 0),
    ]
    for step in (22, 24):
        assert all(torch.equal(value, seen.after[step][name]) for name, value in seen.parameters[step].items())


def test_a_report_changes_nothing(tmp_path: Path) -> None:
    plan = Plan(steps=32, faults=FAULTS)
    incidents, seen, _ = train(tmp_path, plan)
    assert len(incidents) == len(FAULTS)
    bare = Seen([fault.step for fault in FAULTS])
    run(plan, [], make_model=make_model, seen=bare)
    for kind in ("parameters", "gradients", "after"):
        mine, other = getattr(seen, kind), getattr(bare, kind)
        for step in bare.steps:
            assert all(torch.equal(value, other[step][name]) for name, value in mine[step].items()), (kind, step)


def test_a_budget_that_ends_is_said(tmp_path: Path) -> None:
    """Two micro-batches take four passes at least."""
    plan = Plan(steps=25, faults=FAULTS[1:2])
    incidents, _, _ = train(tmp_path, plan, max_probes=2)
    (incident,) = incidents
    assert not incident.is_complete
    assert incident.num_passes == 2
    assert set(units_of(incident)) < set(FAULTS[1].bad)


@pytest.mark.alone
@pytest.mark.slow
def test_long_rows_and_what_it_costs(tmp_path: Path) -> None:
    """4 micro-batches of 4 x 512 tokens: the passes do not grow, and the search takes less than a step."""
    faults = (
        *tuple(Fault(step, ((0, 2, 1, 300 + step),), 100000.0) for step in (22, 24, 26)),
        Fault(28, tuple(sorted({(0, number % 2, number % 4, 37 * number % 512) for number in range(50)})), 10000.0),
    )
    plan = Plan(steps=30, length=512, faults=faults)
    times = [time.perf_counter()]
    callback = grad_loc(tmp_path, cooldown_steps=0)
    run(
        plan,
        [callback],
        make_model=functools.partial(make_transformer, num_layers=2, dim=32),
        on_step=lambda step, model: times.append(time.perf_counter()),
    )
    assert [units_of(one) for one in callback.incidents] == [sorted(fault.bad) for fault in faults]
    assert [(one.num_passes, one.num_forwards) for one in callback.incidents[:3]] == [(2, 1)] * 3
    assert callback.incidents[3].num_passes <= 6
    usual = statistics.median(after - before for before, after in itertools.pairwise(times[2:21]))
    assert min(one.seconds for one in callback.incidents[:3]) <= 0.75 * usual
