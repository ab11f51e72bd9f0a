"""While all is well: sensors that tell nothing new rest, and wake when they are needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, GradLocCallback, attach
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, batches, grad_loc, run

#: One micro-batch a step in one process.
PLAN = Plan(steps=40, faulty=36, bad=((0, 0, 1, 7),), micro_batches=1)


def num_hooks(model: nn.Module) -> int:
    return sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


def train(folder: Path, plan: Plan = PLAN, **options: Any) -> tuple[GradLocCallback, list[int]]:
    """Train, and count the hooks on parameters at every step."""
    callback, hooks = grad_loc(folder), []
    after, beside = options.pop("on_step", lambda step, model: None), options.pop("beside", [])

    def on_step(step: int, model: nn.Module) -> None:
        hooks.append(num_hooks(model))
        after(step, model)

    run(plan, [callback, *beside], on_step=on_step, **options)
    return callback, hooks


def found(callback: GradLocCallback) -> list[tuple[Any, ...]]:
    return [
        (one.step, one.reproducible, [(token.micro_batch, token.row, token.position) for token in one.tokens])
        for one in callback.incidents
    ]


def test_sensors_of_one_process_and_one_micro_batch_rest_and_the_token_is_found(tmp_path: Path) -> None:
    callback, hooks = train(tmp_path)
    assert hooks[1] > 0, "they are needed to know that they are not"
    assert hooks[12:] == [0] * len(hooks[12:]), "after the search too"
    assert found(callback) == [(36, True, [(0, 1, 7)])]
    (incident,) = callback.incidents
    assert incident.num_passes <= 3
    (micro_batch,) = incident.micro_batches
    assert micro_batch.norm == pytest.approx(incident.observed_norm, rel=1e-4)
    assert micro_batch.baseline == pytest.approx(sorted(norms_of(tmp_path))[17], rel=0.2)


def norms_of(folder: Path) -> list[float]:
    """Total norms of the healthy steps, as the optimizer is given them."""
    norms: list[float] = []

    def note(step: int, model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    run(dataclasses.replace(PLAN, steps=PLAN.faulty), [], on_step=note)
    return norms


def test_several_micro_batches_keep_them_awake(tmp_path: Path) -> None:
    _, hooks = train(tmp_path, dataclasses.replace(PLAN, micro_batches=2, steps=20, faulty=-1))
    assert min(hooks[1:]) > 0


def test_several_ranks_keep_them_awake(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, strategy="ddp", steps=16, faulty=-1)
    for hooks in run_distributed(_count, plan, str(tmp_path), world_size=2, timeout=60):
        assert min(hooks[1:]) > 0


def _count(rank: int, world_size: int, plan: Plan, folder: str) -> list[int]:
    return train(Path(folder), plan, rank=rank)[1]


def test_a_second_micro_batch_wakes_them(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, faults=(Fault(26, ((0, 1, 1, 7),)),), steps=30)

    def rows(plan: Plan, rank: int) -> Any:
        for step, both in enumerate(batches(dataclasses.replace(plan, micro_batches=2), rank)):
            yield both if step >= 20 else both[:1]

    callback, hooks = train(tmp_path, plan, make_batches=rows)
    assert hooks[12:20] == [0] * 8
    # The hooks come with the second forward: this step is not known by micro-batch, the next one is.
    assert min(hooks[20:]) > 0
    assert [(step, tokens) for step, _, tokens in found(callback)] == [(26, [(1, 1, 7)])]


@pytest.mark.parametrize("limit", [0.01, 1e3])
def test_gradients_clipped_before_they_are_measured_keep_them_awake(tmp_path: Path, limit: float) -> None:
    def clip(step: int, model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)

    _, hooks = train(tmp_path, dataclasses.replace(PLAN, steps=16, faulty=-1), on_step=clip)
    # A limit that is never reached multiplies by one: the same values, changed in place at every step alike.
    assert (hooks[12:] == [0] * 4) is (limit == 1e3)


def test_whoever_changes_gradients_now_and_then_wakes_them(tmp_path: Path) -> None:
    def clip(step: int, model: nn.Module) -> None:
        if step == 20:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

    _, hooks = train(tmp_path, dataclasses.replace(PLAN, steps=24, faulty=-1), on_step=clip)
    assert hooks[12:21] == [0] * 9
    assert min(hooks[21:]) > 0


def test_gradients_that_are_zeroed_in_place_keep_them_awake(tmp_path: Path) -> None:
    class Zeroing(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    _, hooks = train(tmp_path, dataclasses.replace(PLAN, steps=16, faulty=-1), make_optimizer=Zeroing)
    assert min(hooks[1:]) > 0, "the count of their changes tells nothing there"


@pytest.mark.filterwarnings("ignore:step 3.*not finite:stabilizer.errors.StabilizerWarning")
def test_a_gradient_that_is_not_finite_decides_nothing(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, faults=(Fault(3, ((0, 0, 1, 7),), float("nan")),), steps=20)
    _, hooks = train(tmp_path, plan, beside=[AdaptiveClipThreshold(warmup_cap=None)])  # which leaves that step out
    assert hooks[14:] == [0] * 6


def test_two_optimizers_keep_them_awake(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x).tanh())  # type: ignore[no-any-return]

    both, hooks = Both(), []
    with attach(
        None,
        model=both,
        optimizer=optimizers,
        callbacks=[grad_loc(tmp_path, tap="parts.1")],
        log=lambda values, step: None,
    ):
        for _ in range(16):
            both(torch.randn(3, 4)).square().mean().backward()
            hooks.append([num_hooks(part) for part in model])
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert all(min(of_parts) > 0 for of_parts in hooks[1:])
