"""Field reports, area precision-amp: half precision, numbers near the end of a range, and mixed dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

from stabilizer import gradient_norms
from stabilizer.callbacks import attach
from tests import reference
from tests.clip_loops import HandLoop
from tests.field_reports.clip_tools import Left, clip_now, layer_clip, total_clip
from tests.field_reports.helpers import TOLERANCE, covers, norm_logger
from tests.launcher import run_distributed
from tests.models import loss_of, make_transformer, token_batch
from tests.sharding import mesh_1d, shard_fsdp2


@pytest.mark.parametrize(
    ("dtype", "value", "norm"), [(torch.float16, 300.0, 94868.33), (torch.float32, 1e19, 1e19 * 100_000**0.5)]
)
@pytest.mark.parametrize("clip", [layer_clip, total_clip])
def test_B021_finite_gradients_have_a_finite_norm_and_are_clipped(
    clip: Any, dtype: torch.dtype, value: float, norm: float
) -> None:
    with HandLoop(norm_logger(strict=True), clip(1.0), dtype=dtype, a=100_000) as loop:
        received = loop.step(a=torch.full((1, 100_000), value, dtype=dtype))["a"]
    assert loop.points["grad_norm/total", 0] == pytest.approx(norm, rel=1e-3)
    assert received.dtype == dtype
    assert received.double().norm().item() == pytest.approx(1.0, rel=2e-3)
    assert bool((received == received[0, 0]).all())


def half_precision_shards(rank: int, world_size: int) -> Left:
    model = shard_fsdp2(make_transformer(dtype=torch.bfloat16))
    (loss_of(model, token_batch(rank)) * 300).backward()
    return clip_now(model, norm_logger(strict=True), total_clip(1e9))


@covers("fsdp2", "plain")
def test_B073_partial_norms_are_not_rounded_before_they_are_summed() -> None:
    first, second = run_distributed(half_precision_shards)
    assert {gradient.dtype for gradient in first.gradients.values()} == {torch.bfloat16}
    expected = reference.total_norm(first.gradients)
    assert expected > 512, "bf16 would have steps of 4 here"
    assert abs(expected - float(torch.tensor(expected).bfloat16())) > 10 * TOLERANCE * expected
    assert first["grad_norm/total"] == pytest.approx(expected, rel=TOLERANCE)
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


def _fifty() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3 + number, 7, generator=generator) * 1.3**number / 100).to(torch.bfloat16) for number in range(50)
    ]


def fifty_on_two_ranks(rank: int, world_size: int) -> float:
    model = nn.ParameterList()
    for gradient in _fifty():
        model.append(nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh_1d(), [Shard(0)])))
        model[-1].grad = distribute_tensor(gradient, mesh_1d(), [Shard(0)])
    return gradient_norms(model).total_norm.item()


def test_B082_the_norm_does_not_depend_on_how_parameters_are_grouped() -> None:
    expected = reference.total_norm({str(number): gradient for number, gradient in enumerate(_fifty())})
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in _fifty()])
    for parameter, gradient in zip(model, _fifty(), strict=True):
        parameter.grad = gradient
    totals = run_distributed(fifty_on_two_ranks)
    for granularity in ("parameter", {r"\d?[0-4]": "low", r"\d?[5-9]": "high"}, {r"(\d?)\d": r"tens\1"}):
        found = gradient_norms(model, granularity=granularity)
        totals += [found.total_norm.item(), found.norms.double().norm().item()]
    parameters = list(model)
    for groups in (parameters,), [parameters[number::5] for number in range(5)]:
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.0)
        totals.append(clip_now(model, total_clip(1e9), optimizer=optimizer)["grad_norm/total"])
    assert totals == pytest.approx([expected] * len(totals), rel=1e-6)


class Mixed(nn.Module):
    """A tower in bf16 and a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.head = nn.Linear(6, 5, dtype=torch.bfloat16), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        return self.head(self.tower(x.to(torch.bfloat16)).float()).square().sum()


def mixed_dtypes(rank: int, world_size: int, strategy: str, limit: float) -> dict[str, Any]:
    model: nn.Module = Mixed()
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif strategy == "fsdp1":
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
        model.tower = FullyShardedDataParallel(model.tower, **options)
        model.head = FullyShardedDataParallel(model.head, **options)
        model = FullyShardedDataParallel(model, **options)
    model(torch.linspace(-1, 2, 12).view(2, 6) + rank).backward()
    totals = [_total(model, strategy)]
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), {}
    log = lambda values, step: seen.update(values)  # noqa: E731
    callbacks = [norm_logger(strict=True), total_clip(limit)]
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=log) as handle:
        handle.measure()
        totals.append(_total(model, strategy))
        optimizer.step()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None and p.grad.numel()}
    return {"totals": totals, "logged": seen.get("grad_norm/total"), "dtypes": sorted(map(str, dtypes))}


def _total(model: nn.Module, strategy: str) -> float:
    """In float64, from what every rank holds."""
    local = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    square = torch.stack(local).sum()
    if strategy != "single":
        dist.all_reduce(square)
    return float(square / (2 if strategy == "ddp" else 1)) ** 0.5


@covers("single", "plain")
@covers("ddp", "plain")
@covers("fsdp1", "plain")
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1"])
def test_B104_gradients_of_several_dtypes(strategy: str) -> None:
    results = run_distributed(mixed_dtypes, strategy, 0.5, world_size=1 if strategy == "single" else 2)
    for result in results:
        before, after = result["totals"]
        assert before > 1
        # bf16 has three digits.
        assert after == pytest.approx(0.5, rel=4e-3)
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert results[0]["logged"] == pytest.approx(results[0]["totals"][0], rel=TOLERANCE)
