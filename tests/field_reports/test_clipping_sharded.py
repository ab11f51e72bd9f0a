"""Field reports, areas clipping and sharded-norm: clips over ranks, whatever holds the gradients."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stabilizer import gradient_norms
from stabilizer.callbacks import AdaptiveClipThreshold, StabilizerCallback, StepContext, attach
from tests import reference
from tests.clip_reference import clip, worst_error
from tests.counting import count_collectives
from tests.field_reports.clip_tools import clip_now, layer_clip, total_clip
from tests.field_reports.helpers import TOLERANCE, covers, reference_run, train
from tests.field_reports.test_sharded_layouts import EXPERTS_TOTAL, Experts
from tests.launcher import run_distributed
from tests.lightning_models import expected_batches, make_trainer
from tests.lightning_variants import Plain
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients, token_batch
from tests.sharding import mesh_1d, shard_fsdp1, shard_fsdp2
from tests.tiny_loops import no_log


def _clipped(gradients: dict[str, Tensor | None], share: float) -> tuple[float, dict[str, Tensor | None]]:
    """A limit that is this share of the norm, and what it leaves."""
    limit = share * reference.total_norm(gradients)
    return limit, clip(gradients, lambda name: "all", layer_limits={}, total_limit=limit).gradients


def _both_ranks(num_data_ranks: int = 2) -> dict[str, Tensor | None]:
    return reference_gradients(make_mlp(), [mlp_batch(rank) for rank in range(num_data_ranks)])


@covers("fsdp1")
@covers("fsdp2")
@covers("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_B014_a_clip_by_norm_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    limit = 1.0
    expected = reference_run(num_ranks=2, total_limit=limit)
    assert min(expected.totals) > 1.2 * limit
    for result in run_distributed(train, str(tmp_path), strategy, beside=[total_clip(limit)]):
        assert result["warnings"] == []
        assert result["totals"] == pytest.approx(expected.totals, rel=TOLERANCE)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(result["weights"][name].double(), weight, rtol=1e-5, atol=1e-6)


def wrapped_by_hand(rank: int, world_size: int, limit: float) -> tuple[float, float, float]:
    model = shard_fsdp1(make_mlp())
    loss_of(model, mlp_batch(rank)).backward()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), {}
    log = lambda values, step: seen.update(values)  # noqa: E731
    with attach(None, model=model, optimizer=optimizer, callbacks=[total_clip(limit)], log=log) as handle:
        handle.measure()
        total = gradient_norms(model).total_norm.item()
        optimizer.step()
    return total, seen.get("grad_norm/total", 0.0), seen.get("grad_norm/total_after", 0.0)


@covers("fsdp1", "plain")
def test_B014_a_clip_by_norm_under_fsdp1_wrapped_by_hand() -> None:
    gradients = _both_ranks()
    limit, _ = _clipped(gradients, 0.1)
    (first, before, after), (second, *_) = run_distributed(wrapped_by_hand, limit)
    assert [first, second, after] == pytest.approx([limit] * 3, rel=TOLERANCE)
    assert before == pytest.approx(reference.total_norm(gradients), rel=TOLERANCE)


class Limits(StabilizerCallback):
    """Notes the limit that is in force after every step."""

    def __init__(self, clip: AdaptiveClipThreshold) -> None:
        super().__init__(strict=True)
        self.clip, self.limits, self.counts = clip, [], []

    def on_step_end(self, context: StepContext) -> None:
        """Look."""
        [rule] = self.clip.state_dict()["extra"]["clips"]["0"]["thresholds"]["rules"]
        self.counts += rule["state"]["num_accepted"].tolist()
        self.limits.append(self.clip.thresholds()["total"])


def warm_up(rank: int, world_size: int) -> tuple[list[int], list[float]]:
    rule = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 5}
    clip = AdaptiveClipThreshold(rule=rule, warmup_cap=None, strict=True)
    limits = Limits(clip)
    module = Plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 7, "callbacks": [limits, clip]}
    make_trainer("ddp", devices=world_size, **options).fit(module)
    return limits.counts, limits.limits


@covers("ddp")
def test_B046_the_warm_up_counts_optimizer_steps_whatever_ranks_and_micro_batches() -> None:
    # Four steps are an epoch: the data begin anew.
    steps = [expected_batches("transformer", step % 4, num_ranks=2, num_micro_batches=4) for step in range(5)]
    totals = [reference.total_norm(reference_gradients(make_transformer(), batches)) for batches in steps]
    results = run_distributed(warm_up)
    assert results[0] == results[1]
    counts, limits = results[0]
    assert counts == list(range(1, 8))
    # A limit from the fifth step on: three times the (geometric) mean of the whole model's norms.
    assert [math.isinf(limit) for limit in limits] == [True] * 4 + [False] * 3
    assert limits[4] == pytest.approx(3 * statistics.geometric_mean(totals), rel=TOLERANCE)


def sharded_and_plain(rank: int, world_size: int, limit: float) -> Any:
    model = nn.Module()
    model.net, model.router = shard_fsdp2(make_mlp()), nn.Parameter(torch.zeros(7))
    loss_of(model.net, mlp_batch(rank)).backward()
    model.router.grad = torch.arange(7.0)
    return clip_now(model, total_clip(limit))


@covers("fsdp2", "plain")
def test_B003_sharded_and_plain_parameters_get_one_coefficient() -> None:
    gradients = {**{f"net.{name}": g for name, g in _both_ranks().items()}, "router": torch.arange(7.0)}
    limit, expected = _clipped(gradients, 0.1)
    for left in run_distributed(sharded_and_plain, limit):
        assert worst_error(left.gradients, expected) < TOLERANCE


def replicated_shards(rank: int, world_size: int, shape: tuple[int, int], limit: float) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = shard_fsdp2(make_mlp(), mesh=mesh)
    loss_of(model, mlp_batch(0)).backward()
    return clip_now(model, total_clip(limit))


@covers("hsdp", "plain")
def test_B018_the_number_of_replicas_does_not_matter_to_the_clip() -> None:
    limit, expected = _clipped(_both_ranks(1), 0.5)
    for shape in ((2, 1), (2, 2)):
        for left in run_distributed(replicated_shards, shape, limit, world_size=math.prod(shape)):
            assert worst_error(left.gradients, expected) < TOLERANCE, shape


def collectives_of_a_clip(rank: int, world_size: int, limit: float) -> tuple[dict[str, int], float, float]:
    model = shard_fsdp2(make_transformer())
    loss_of(model, token_batch(rank)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clips = [layer_clip(0.8), total_clip(limit)]
    share = 0.0
    with attach(None, model=model, optimizer=optimizer, callbacks=clips, log=no_log) as handle:
        handle.measure()
        model.zero_grad()
        loss_of(model, token_batch(rank)).backward()
        num_bytes = sum(p.grad.to_local().numel() * 4 for p in model.parameters())
        with count_collectives() as calls:
            handle.measure()
        share = sum(call.num_bytes for call in calls.calls) / num_bytes
        total = gradient_norms(model).total_norm.item()
    return dict(calls.names), share, total


@covers("fsdp2", "plain")
def test_B060_a_clip_gathers_no_gradient_and_does_clip() -> None:
    for calls, share, total in run_distributed(collectives_of_a_clip, 0.5):
        # One for the norms, one for what all ranks decide together.
        assert calls.keys() == {"c10d.allreduce_.default"}
        assert calls["c10d.allreduce_.default"] <= 2
        assert share < 1 / 50
        assert total == pytest.approx(0.5, rel=TOLERANCE)


def sharded_experts(rank: int, world_size: int, limit: float) -> Any:
    model = Experts(rank)
    fully_shard(model, mesh=mesh_1d(), ignored_params=set(model.experts.parameters()))
    model(rank).backward()
    return clip_now(model, total_clip(limit), groups={r"^experts\.": dist.group.WORLD})


def test_B064_experts_and_dense_weights_get_one_coefficient() -> None:
    coefficient = 0.25
    for rank, left in enumerate(run_distributed(sharded_experts, coefficient * EXPERTS_TOTAL)):
        dense, expert = left.gradients.values()
        assert dense.tolist() == pytest.approx([coefficient * number for number in (1, 2, 3, 4)], rel=TOLERANCE)
        assert expert.tolist() == pytest.approx([coefficient * (10 if rank else 1)] * 3, rel=TOLERANCE)


def two_meshes(rank: int, world_size: int) -> Any:
    model = nn.ParameterList()
    for shape, placements in (((2,), [Shard(0)]), ((1, 2), [Replicate(), Shard(0)]), ((1, 2), [Shard(0), Replicate()])):
        mesh = init_device_mesh("cpu", shape)
        model.append(nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, placements)))
        model[-1].grad = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, placements)
    return clip_now(model, total_clip(1.0))


def test_B067_parameters_on_different_meshes_get_one_coefficient() -> None:
    expected = torch.arange(6.0).view(3, 2) / math.sqrt(3 * 55)
    for left in run_distributed(two_meshes):
        assert len(left.gradients) == 3
        for gradient in left.gradients.values():
            torch.testing.assert_close(gradient, expected)


def sharded_and_unsharded_units(rank: int, world_size: int, limit: float) -> float:
    model, options = make_mlp(), {"device_id": torch.device("cpu"), "use_orig_params": True}
    model.first = FullyShardedDataParallel(model.first, sharding_strategy=ShardingStrategy.FULL_SHARD, **options)
    model.second = FullyShardedDataParallel(model.second, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    whole = FullyShardedDataParallel(model, **options)
    loss_of(whole, mlp_batch(rank)).backward()
    bare = clip_now(whole, total_clip(limit)).gradients["second.bias"]
    return bare.item()


@covers("fsdp1", "plain")
def test_B111_unsharded_units_get_the_coefficient_of_all() -> None:
    limit, expected = _clipped(_both_ranks(), 0.3)
    assert (
        run_distributed(sharded_and_unsharded_units, limit)
        == [pytest.approx(expected["second.bias"].item(), rel=TOLERANCE)] * 2
    )


def clip_many(rank: int, world_size: int, counts: tuple[int, int]) -> dict[int, tuple[float, dict[str, int]]]:
    """Seconds of this thread for a step in which every parameter is clipped by itself, and its collectives."""
    mesh, found = mesh_1d(), {}
    for count in counts:
        model = nn.ParameterList()
        for number in range(count):
            parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)], src_data_rank=None))
            parameter.grad = distribute_tensor(torch.full((2,), 2.0 + number), mesh, [Shard(0)], src_data_rank=None)
            model.append(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        clips, times = [layer_clip(1.0, granularity="parameter"), total_clip(1.0)], []
        with attach(None, model=model, optimizer=optimizer, callbacks=clips, log=no_log) as handle:
            for _ in range(6):
                start = time.thread_time()
                handle.measure()
                times.append(time.thread_time() - start)
            with count_collectives() as calls:
                handle.measure()
        found[count] = min(times), dict(calls.names)
    return found


def test_B109_the_time_of_a_clip_grows_no_faster_than_the_number_of_parameters() -> None:
    for found in run_distributed(clip_many, (200, 800)):
        (short, few), (long, many) = found.values()
        assert few == many
        assert few.keys() == {"c10d.allreduce_.default"}
        assert few["c10d.allreduce_.default"] <= 2
        assert long < 6 * short
