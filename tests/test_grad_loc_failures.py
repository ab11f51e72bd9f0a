"""A rank that fails in a search ends it on all ranks, with an error in the report; training goes on, nothing hangs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from stabilizer.callbacks.incident_reports import IncidentReports
from stabilizer.localize import rebuilding, searching, suspects
from stabilizer.localize.incident import Incident
from tests import reference
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, Seen, Unit, batches, grad_loc, loss_of_tokens, run
from tests.models import make_transformer
from tests.reference_localize import gradient_without

BAD = ((1, 1, 1, 3),)
WARMUP = 12
EARLY: dict[str, Any] = {
    "warmup_steps": WARMUP,
    "rule": {"name": "robust_log", "warmup_steps": WARMUP},
    "cooldown_steps": 0,
}
#: Where rank 1 fails; the search that follows finds the token.
PLACES = ("survey", "loss", "forward", "gathering", "backward", "last_backward", "memory", "generator", "rebuild")
each_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.covers(strategy=name)) for name in ("ddp", "fsdp1", "fsdp2")]
)


class PlantedError(RuntimeError):
    """What a rank fails with."""


class Trap:
    """Fails at a place of one step's search on one rank; never in what the loop itself runs.

    Args:
        places: Step -> where.
        is_armed: Whether this rank is the one.
    """

    def __init__(self, places: dict[int, str], *, is_armed: bool) -> None:
        self._places, self._is_armed = places, is_armed
        self.place: str | None = None
        self._num_calls = 0

    def arm(self, step: int, model: nn.Module) -> None:
        """Gradients are complete: whatever runs until the next step is a search."""
        self.place, self._num_calls = self._places.get(step) if self._is_armed else None, 0

    def batches(self, plan: Plan, rank: int) -> Iterator[list[Any]]:
        for rows in batches(plan, rank):
            self.place = None
            yield rows

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        loss = loss_of_tokens(model, batch)
        self._num_calls += 1
        if self.place == "loss":
            raise PlantedError("loss")
        # Under FSDP1 each of the two passes of the search has a forward of its own.
        if self.place == "rebuild" and self._num_calls == (4 if isinstance(model, FullyShardedDataParallel) else 3):
            raise PlantedError("rebuild")
        return loss

    def model(self) -> nn.Module:
        """A model of four blocks that fails inside of the third (in the first, for the end of a backward pass)."""
        model = make_transformer(num_layers=4)
        model.layers[2].feed_forward.register_forward_hook(self._in_block)
        model.layers[0].feed_forward.register_forward_hook(functools.partial(self._in_block, last=True))
        return model

    def _in_block(self, module: nn.Module, inputs: Any, output: Tensor, *, last: bool = False) -> None:
        if self.place == "forward" and not last:
            raise PlantedError("forward")
        if self.place == "memory" and not last:
            raise torch.OutOfMemoryError("memory")
        if self.place == ("last_backward" if last else "backward") and output.requires_grad:
            output.register_hook(self._in_backward)

    def _in_backward(self, gradient: Tensor) -> None:
        raise PlantedError("backward")

    @contextlib.contextmanager
    def set(self, strategy: str) -> Iterator[None]:
        """In our own code and in torch's."""
        owners: list[tuple[Any, str, str]] = [
            (suspects.LocalNorms, "norms", "survey"),
            (searching, "search", "generator"),
            (rebuilding.Averager, "__init__", "gathering"),
        ]
        if strategy == "fsdp1":
            owners[-1] = (FlatParamHandle, "_alloc_padded_unsharded_flat_param", "gathering")
        if strategy == "fsdp2":
            owners[-1] = (_fsdp_param_group, "foreach_all_gather", "gathering")
        with contextlib.ExitStack() as stack:
            # They are drawn elsewhere, and take longer than all the rest.
            stack.enter_context(mock.patch.object(IncidentReports, "_draw"))
            for owner, name, place in owners:
                stack.enter_context(mock.patch.object(owner, name, self._failing(getattr(owner, name), place)))
            yield

    def _failing(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        num_calls = 0

        @functools.wraps(function)
        def fails_or_does(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls = num_calls + 1 if self.place == place else 0
            # Of the units of a forward pass not the first, which waits for nobody yet.
            if num_calls == (3 if place == "gathering" and "Averager" not in function.__qualname__ else 1):
                raise PlantedError(place)
            return function(*args, **kwargs)

        return fails_or_does


def make_plan(strategy: str) -> tuple[Plan, dict[int, str]]:
    """Every other step is faulty: rank 1 fails somewhere in each but the last."""
    places = {WARMUP + 2 * number: place for number, place in enumerate(PLACES)}
    steps = [*places, WARMUP + 2 * len(PLACES)]
    faults = tuple(Fault(step, BAD) for step in steps)
    return Plan(strategy, steps=steps[-1] + 1, faults=faults, micro_batches=2, rows=2, length=8), places


def fail(rank: int, world_size: int, strategy: str, folder: str) -> dict[str, Any]:
    """Train with searches that fail, and without any."""
    plan, places = make_plan(strategy)
    steps = [fault.step for fault in plan.faults]
    trap = Trap(places, is_armed=rank == 1)
    callback = grad_loc(folder, **EARLY, on_found="drop_tokens")
    seen, wanted = Seen(steps), Seen(steps)
    with trap.set(strategy):
        run(
            plan,
            [callback],
            rank=rank,
            make_model=trap.model,
            make_batches=trap.batches,
            loss_fn=trap.loss,
            on_step=trap.arm,
            seen=seen,
        )
    run(plan, [], rank=rank, make_model=functools.partial(make_transformer, num_layers=4), seen=wanted)
    return {"incidents": [one.to_json() for one in callback.incidents], "seen": seen, "wanted": wanted}


@each_strategy
@pytest.mark.covers(feature="token localisation", host="plain")
def test_a_rank_that_fails_ends_the_search_on_all(strategy: str, tmp_path: Path) -> None:
    plan, places = make_plan(strategy)
    results = run_distributed(fail, strategy, str(tmp_path), world_size=2, timeout=120)
    for found in results:
        incidents = {one.step: one for one in map(Incident.from_json, found["incidents"])}
        assert sorted(incidents) == [fault.step for fault in plan.faults]
        for step, place in places.items():
            kind = "OutOfMemoryError" if place == "memory" else "PlantedError"
            assert incidents[step].error == f"rank 1: {kind}: {place.removeprefix('last_')}", place
            # What was known by then is told.
            is_known = place == "rebuild" or (place == "gathering" and strategy == "ddp")
            assert (len(incidents[step].tokens), incidents[step].action) == (int(is_known), "report"), place
            # As if nobody had searched: bit for bit.
            for name, gradient in found["wanted"].gradients[step].items():
                assert torch.equal(found["seen"].gradients[step][name], gradient), (place, name)
            for name, parameter in found["wanted"].after[step].items():
                assert torch.equal(found["seen"].after[step][name], parameter), (place, name)
        step = plan.faults[-1].step
        last = incidents[step]
        assert [(one.rank, one.micro_batch, one.row, one.position) for one in last.tokens] == list(BAD)
        assert (last.error, last.action) == (None, "drop_tokens")
        wanted = gradient_without(
            plan,
            step,
            found["seen"].parameters[step],
            make_model=functools.partial(make_transformer, num_layers=4),
            num_ranks=2,
            without=BAD,
        )
        given = found["seen"].gradients[step]
        error = sum(float((given[name].double() - gradient).square().sum()) for name, gradient in wanted.items())
        assert error**0.5 < 1e-6 * reference.total_norm(wanted)


class BadTokenizer:
    """Knows no token."""

    def decode(self, ids: list[int]) -> str:
        raise PlantedError(f"no text for {ids}")


def fail_to_tell(rank: int, world_size: int, folder: str) -> list[str]:
    """A search that succeeds, and nothing to say it with: no text, and a file where the folder should be."""
    plan = Plan("ddp", steps=WARMUP + 3, faults=(Fault(WARMUP, BAD),), micro_batches=2, rows=2, length=8)
    callback = grad_loc(folder, **EARLY, tokenizer=BadTokenizer())
    make_model = functools.partial(make_transformer, num_layers=1)
    run(plan, [callback], rank=rank, make_model=make_model)
    return [one.to_json() for one in callback.incidents]


@pytest.mark.covers(feature="token localisation", host="plain", strategy="ddp")
def test_what_cannot_be_told_is_no_failure_of_the_search(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    results = run_distributed(fail_to_tell, str(blocked / "incidents"), world_size=2, timeout=60)
    for found in results:
        (incident,) = map(Incident.from_json, found)
        assert [(one.rank, one.micro_batch, one.row, one.position, one.text) for one in incident.tokens] == [
            (*BAD[0], None)
        ]
        assert (incident.error, incident.is_complete) == (None, True)
    assert blocked.read_text() == ""


def train_unevenly(rank: int, world_size: int, bad: tuple[Unit, ...], folder: str) -> dict[str, Any]:
    """Rank 0 has three micro-batches in a step, rank 1 two."""
    plan = Plan("ddp", steps=WARMUP + 1, faults=(Fault(WARMUP, bad),), micro_batches=3, rows=2, length=8)
    callback, seen = grad_loc(folder, **EARLY, on_found="drop_tokens"), Seen([WARMUP])
    make_model = functools.partial(make_transformer, num_layers=1)

    def fewer(plan: Plan, rank: int) -> Iterator[list[Any]]:
        for rows in batches(plan, rank):
            yield rows[: 3 - rank]

    run(plan, [callback], rank=rank, make_model=make_model, make_batches=fewer, seen=seen)
    return {"incidents": [one.to_json() for one in callback.incidents], "seen": seen}


@pytest.mark.parametrize("bad", [((0, 2, 1, 3),), ((0, 1, 0, 5), (1, 1, 1, 6))])
@pytest.mark.covers(feature="token localisation", host="plain", strategy="ddp")
def test_a_rank_with_fewer_micro_batches_takes_part(bad: tuple[Unit, ...], tmp_path: Path) -> None:
    results = run_distributed(train_unevenly, bad, str(tmp_path), world_size=2, timeout=60)
    plan = Plan("ddp", steps=WARMUP + 1, faults=(Fault(WARMUP, bad),), micro_batches=3, rows=2, length=8)
    missing = {(1, 2, row, position) for row in range(plan.rows) for position in range(plan.length)}
    for found in results:
        (incident,) = map(Incident.from_json, found["incidents"])
        assert sorted((one.rank, one.micro_batch, one.row, one.position) for one in incident.tokens) == sorted(bad)
        assert (incident.error, incident.is_complete, incident.action) == (None, True, "drop_tokens")
        make_model = functools.partial(make_transformer, num_layers=1)
        wanted = gradient_without(
            plan,
            WARMUP,
            found["seen"].parameters[WARMUP],
            make_model=make_model,
            num_ranks=2,
            without={*bad, *missing},
        )
        given = found["seen"].gradients[WARMUP]
        error = sum(float((given[name].double() - gradient).square().sum()) for name, gradient in wanted.items())
        assert error**0.5 < 1e-6 * reference.total_norm(wanted)
