"""Ranks of a tensor-parallel group search together: one bad token is found once, wherever the logits are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from stabilizer.callbacks import attach
from stabilizer.localize.incident import Incident
from tests import reference
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, batches, grad_loc
from tests.models import VOCABULARY, make_transformer
from tests.reference_localize import gradient_without
from tests.sharding import full, mesh_1d, mesh_2d, sequence_parallel, shard_fsdp2, tensor_parallel

WARMUP = 12
BAD = ((0, 1, 1, 6),)
make_model = functools.partial(make_transformer, num_layers=2)


def split_head(model: nn.Module, *, mesh: Any, as_dtensor: bool) -> nn.Module:
    """Plain tensor parallelism, with the vocabulary split over the ranks."""
    tensor_parallel(model, mesh=mesh)
    parallelize_module(
        model, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=not as_dtensor)}
    )
    return model


LAYOUTS: dict[str, Callable[..., nn.Module]] = {
    "tp": tensor_parallel,
    "vocabulary": functools.partial(split_head, as_dtensor=True),
    "local_vocabulary": functools.partial(split_head, as_dtensor=False),
    "sequence": sequence_parallel,
}


def loss_of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean over the tokens of a micro-batch, each weighted; in three."""
    tokens, targets, weights = batch
    logits = model(tokens)
    if logits.shape[-1] < VOCABULARY:  # this rank's part of it, in a plain tensor
        logits = DTensor.from_local(logits, model.lm_head.weight.device_mesh, [Shard(-1)])
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return (losses * weights).mean() / 2


class PlantedError(RuntimeError):
    """What a rank fails with."""


class Trap:
    """Fails in what is run again in the faulty step, in the middle of a block: others wait in its reductions.

    Args:
        place: "forward", "backward" or none.
    """

    def __init__(self, model: nn.Module, place: str | None) -> None:
        self.is_armed, self._place = False, place
        model.layers[1].attention.q.register_forward_hook(self._see)

    def _see(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.is_armed and self._place == "forward":
            raise PlantedError("forward")
        if self.is_armed and self._place == "backward":
            output.register_hook(self._see_gradient)

    def _see_gradient(self, gradient: Tensor) -> None:
        raise PlantedError("backward")


def train(
    rank: int, world_size: int, layout: str, num_data: int, bad: Any, folder: str, place: str | None = None
) -> dict[str, Any]:
    """Train, and keep what the optimizer was given in the faulty step."""
    torch.manual_seed(0)
    plan = make_plan(bad)
    mesh = mesh_1d(name="tensor") if num_data == 1 else mesh_2d(num_data, world_size // num_data)
    model = LAYOUTS[layout](make_model(), mesh=mesh if num_data == 1 else mesh["tensor"])
    if num_data > 1:
        shard_fsdp2(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rule = {"name": "robust_log", "warmup_steps": WARMUP}
    callback = grad_loc(folder, cooldown_steps=0, warmup_steps=WARMUP, rule=rule, on_found="drop_tokens")
    handle = attach(
        None,
        model=model,
        optimizer=optimizer,
        callbacks=[callback],
        loss_fn=loss_of_tokens,
        log=lambda values, step: None,
    )
    seen: dict[str, Any] = {}

    def note(*_: Any) -> None:
        if callback.incidents and not seen:
            keep()

    def keep() -> None:
        seen["parameters"] = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
        seen["gradients"] = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}

    optimizer.register_step_pre_hook(note)
    trap = Trap(model, place if rank == world_size - 1 else None)
    for rows in batches(plan, rank * num_data // world_size):
        trap.is_armed = False
        for batch in rows:
            handle.record_batch(batch)
            loss_of_tokens(model, batch).backward()
        trap.is_armed = True
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return {"incidents": [one.to_json() for one in callback.incidents], **seen}


def make_plan(bad: Any) -> Plan:
    return Plan(steps=WARMUP + 2, faults=(Fault(WARMUP, bad),), micro_batches=2, rows=2, length=8)


def arriving_norm(plan: Plan, unit: tuple[int, ...], parameters: dict[str, Tensor]) -> float:
    """Norm of what arrives at one token's logits, in one process."""
    rank, micro_batch, row, position = unit
    model = make_model()
    model.load_state_dict(parameters)
    tokens, targets, weights = list(batches(plan, rank))[WARMUP][micro_batch]
    logits = model(tokens).detach()
    logits.requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    (losses * weights).mean().div(2).backward()
    assert logits.grad is not None
    return float(logits.grad[row, position].norm())


CASES = [
    pytest.param(layout, num_data, marks=pytest.mark.covers(strategy=strategy))
    for layout, num_data, strategy in [
        ("tp", 1, "tp"),
        ("vocabulary", 1, "tp"),
        ("local_vocabulary", 1, "tp"),
        ("sequence", 1, "tp_sp"),
        ("tp", 2, "fsdp2_tp"),
        ("sequence", 2, "fsdp2_tp"),
    ]
]


@pytest.mark.parametrize(("layout", "num_data"), CASES)
@pytest.mark.covers(feature="token localisation", host="plain")
def test_the_bad_token_is_found_once(layout: str, num_data: int, tmp_path: Path) -> None:
    bad = BAD if num_data == 1 else ((1, 1, 1, 6), (0, 1, 0, 2))
    plan = make_plan(bad)
    results = run_distributed(train, layout, num_data, bad, str(tmp_path), world_size=2 * num_data, timeout=90)
    told = [dataclasses.replace(Incident.from_json(found["incidents"][0]), seconds=0.0) for found in results]
    assert told == told[:1] * len(told)
    assert {len(found["incidents"]) for found in results} == {1}
    incident = told[0]
    wanted = {(rank * 2, *rest) for rank, *rest in bad}  # the first rank of each group speaks
    assert {(one.rank, one.micro_batch, one.row, one.position) for one in incident.tokens} == wanted
    assert len(incident.tokens) == len(bad)
    assert (incident.error, incident.type, incident.reproducible) == (None, "D", True)
    assert incident.num_passes <= 2 + (plan.micro_batches if layout == "sequence" else 0)
    # Local norms are those of the data-parallel rank, as one process would see them.
    alone = functools.partial(
        gradient_without, plan, WARMUP, results[0]["parameters"], make_model=make_model, num_ranks=num_data
    )
    units = {
        (rank, number, row, position)
        for rank in range(num_data)
        for number in range(2)
        for row in range(plan.rows)
        for position in range(plan.length)
    }
    for one in incident.micro_batches:
        others = {unit for unit in units if unit[:2] != (one.rank // 2, one.micro_batch)}
        assert one.norm == pytest.approx(num_data * reference.total_norm(alone(without=others)), rel=1e-4)
    for one in incident.tokens:
        unit = next(
            unit for unit in bad if (unit[0] * 2, *unit[1:]) == (one.rank, one.micro_batch, one.row, one.position)
        )
        assert one.grad_norm == pytest.approx(arriving_norm(plan, unit, results[0]["parameters"]), rel=1e-4)
    rest = alone(without=bad)
    assert incident.counterfactual_norm == pytest.approx(reference.total_norm(rest), rel=1e-3)
    for found in results:
        error = sum(float((found["gradients"][name].double() - value).square().sum()) for name, value in rest.items())
        assert error**0.5 < 1e-6 * reference.total_norm(rest)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("num_data", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_the_search_on_all(place: str, num_data: int, tmp_path: Path) -> None:
    world_size = 2 * num_data
    results = run_distributed(train, "tp", num_data, BAD, str(tmp_path), place, world_size=world_size, timeout=90)
    wanted = gradient_without(
        make_plan(BAD), WARMUP, results[0]["parameters"], make_model=make_model, num_ranks=num_data
    )
    for found in results:
        (incident,) = map(Incident.from_json, found["incidents"])
        assert incident.error == f"rank {world_size - 1}: PlantedError: {place}"
        assert (incident.tokens, incident.action) == ((), "report")
        error = sum(float((found["gradients"][name].double() - value).square().sum()) for name, value in wanted.items())
        assert error**0.5 < 1e-6 * reference.total_norm(wanted)
