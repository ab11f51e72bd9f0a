"""Field reports, area sharded-norm: fits under Lightning whose norms must not depend on the strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from stabilizer import gradient_norms
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback
from tests.event_files import read_run
from tests.field_reports.clip_tools import total_clip
from tests.field_reports.helpers import TOLERANCE, covers, fit, norm_logger, reference_run, remembered, train
from tests.launcher import run_distributed
from tests.lightning_models import BATCH_SIZE, expected_batches, make_module
from tests.lightning_variants import Plain
from tests.models import loss_of, make_mlp, mlp_batch, reference_gradients
from tests.reference import total_norm
from tests.sharding import full, mesh_1d
from tests.states import same


class PickyLogger(TensorBoardLogger):
    """Takes plain numbers only."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write, or raise on the first value that is no float."""
        wrong = {name: type(value) for name, value in metrics.items() if type(value) is not float}
        if wrong:
            raise TypeError(f"{wrong}")
        super().log_metrics(metrics, step)


def fit_with_picky_logger(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    callback = norm_logger(granularity="parameter", strict=True)
    logger = PickyLogger(folder, name="", version="run")
    fit(make_module("mlp"), folder, strategy="fsdp2", devices=world_size, callbacks=[callback], logger=logger)
    return remembered(callback)


@covers("fsdp2")
def test_B001_fsdp2_logs_the_whole_model_s_norm_on_every_rank(tmp_path: Path) -> None:
    results = run_distributed(fit_with_picky_logger, str(tmp_path))
    expected = reference_run(num_ranks=2, granularity="parameter")
    assert len(expected.layers[0]) == 4
    for result in results:
        assert result == results[0]
        assert result["totals"] == pytest.approx(expected.totals, rel=TOLERANCE)
        assert result["layers"] == {
            layer: pytest.approx(series, rel=TOLERANCE) for layer, series in expected.series().items()
        }
    run = read_run(tmp_path / "run")
    assert list(run.scalars["grad_norm/total"].values()) == pytest.approx(expected.totals, rel=TOLERANCE)
    for layer, series in expected.series().items():
        assert list(run.scalars[f"grad_norm/layer/{layer}"].values()) == pytest.approx(series, rel=TOLERANCE)


@covers("fsdp2")
def test_B035_infinity_norms_and_largest_values_with_an_empty_shard(tmp_path: Path) -> None:
    # `model.second.weight` has one row: rank 1 holds none of it, and nothing of the bias.
    options = {"norm_type": "inf", "max_abs_every_n_steps": 1, "granularity": "parameter"}
    results = run_distributed(train, str(tmp_path), "fsdp2", callback_options=options, timeout=60)
    expected = reference_run(num_ranks=2, granularity="parameter", norm_type=float("inf"))
    for result in results:
        assert result["totals"] == pytest.approx(expected.totals, rel=TOLERANCE)
        assert result["layers"]["model.second.weight"] == results[0]["layers"]["model.second.weight"]
    run = read_run(tmp_path / "run")
    for layer, series in expected.series().items():
        for tag in (f"grad_norm/layer/{layer}", f"grad_norm/max_abs/{layer}"):
            assert list(run.scalars[tag].values()) == pytest.approx(series, rel=TOLERANCE)


def largest_of_one_row(rank: int, world_size: int) -> tuple[int, float]:
    model = fully_shard(nn.Linear(8, 1, bias=False), mesh=mesh_1d())
    model(torch.tensor([[1.0, 2, 3, -4, 3, 2, 1, 0]])).sum().backward()
    return model.weight.grad.to_local().numel(), gradient_norms(model, norm_type="inf").total_norm.item()


@covers("fsdp2", "plain")
def test_B035_a_rank_without_elements_takes_part_in_the_maximum() -> None:
    assert run_distributed(largest_of_one_row, timeout=60) == [(8, 4.0), (0, 4.0)]


class Known(nn.Module):
    """The gradient of the sum of its output is (0.48, 0.64), whatever the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self) -> Tensor:
        """A number."""
        return (self.weight * torch.tensor([0.48, 0.64])).sum()


def known_norm_under_ddp(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    module = Plain(Known(), loss=lambda module, batch, number: module.model())
    callback = norm_logger()
    fit(module, folder, strategy="ddp", devices=world_size, callbacks=[callback], gradient_clip_val=1.0)
    return remembered(callback)


def known_norm_in_a_plain_loop(rank: int, world_size: int) -> tuple[float, bool]:
    model = nn.parallel.DistributedDataParallel(Known())
    model().backward()
    before = model.module.weight.grad.clone()
    total = gradient_norms(model).total_norm.item()
    return total, torch.equal(before, model.module.weight.grad)


@covers("ddp")
def test_B047_plain_ddp_norms_are_not_summed_over_ranks(tmp_path: Path) -> None:
    for result in run_distributed(known_norm_under_ddp, str(tmp_path)):
        assert result["totals"] == pytest.approx([0.8] * 3)
    scalars = read_run(tmp_path / "run").scalars
    assert list(scalars["grad_norm/total_after"].values()) == pytest.approx([0.8] * 3), "nothing was to be clipped"
    for total, is_unchanged in run_distributed(known_norm_in_a_plain_loop):
        assert total == pytest.approx(0.8)
        assert is_unchanged


@covers("ddp")
@covers("fsdp1")
@covers("fsdp2")
@covers("single")
@pytest.mark.parametrize("limit", [math.inf, 1.5])
def test_B063_every_strategy_gives_one_series_and_one_model(limit: float, tmp_path: Path) -> None:
    expected = reference_run(num_steps=20, num_ranks=2, total_limit=limit)
    clips = [total_clip(limit)] if limit < math.inf else []
    assert bool(clips) == (min(expected.totals) < limit < max(expected.totals))
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        options = {"max_steps": 20, "module_options": {"length": 120}, "beside": clips}
        for result in run_distributed(train, str(tmp_path / strategy), strategy, **options):
            assert result["totals"] == pytest.approx(expected.totals, rel=1e-4), strategy
            for layer, series in expected.series().items():
                assert result["layers"][layer] == pytest.approx(series, rel=1e-4), (strategy, layer)
            assert result["weights"].keys() == expected.weights.keys()
            for name, weight in expected.weights.items():
                torch.testing.assert_close(result["weights"][name].double(), weight, rtol=1e-4, atol=1e-5)
    [single] = run_distributed(train, str(tmp_path / "single"), "single", max_steps=20, beside=clips, world_size=1)
    assert single["totals"] == pytest.approx(reference_run(num_steps=20, total_limit=limit).totals, rel=1e-4)


def fit_clipped(rank: int, world_size: int, folder: str, clip: float, whose: str) -> dict[str, Any]:
    received: dict[str, Tensor] = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            # The gradients that the optimizer got are still there: they are zeroed before the next forward pass.
            named = pl_module.named_parameters()
            received.update({name: full(p.grad).clone() for name, p in named if name not in received})

    callback = norm_logger()
    options: dict[str, Any] = {"callbacks": [callback, Look()], "max_steps": 1}
    if whose == "lightning":
        options["gradient_clip_val"] = clip
    else:
        options["callbacks"].append(total_clip(clip))
    fit(make_module("mlp"), folder, strategy="fsdp2", devices=world_size, **options)
    return {**remembered(callback), "received": received}


@covers("fsdp2")
@pytest.mark.parametrize("whose", ["lightning", "ours"])
def test_B102_the_logged_norm_is_the_one_that_the_clip_uses(whose: str, tmp_path: Path) -> None:
    gradients = reference_gradients(make_mlp(), expected_batches("mlp", 0, num_ranks=2))
    raw = torch.cat([gradient.flatten() for gradient in gradients.values() if gradient is not None])
    clip = 0.1 * raw.norm().item()
    for result in run_distributed(fit_clipped, str(tmp_path), clip, whose):
        assert result["totals"] == pytest.approx([raw.norm().item()], rel=TOLERANCE)
        received = torch.cat([result["received"][f"model.{name}"].flatten() for name in gradients]).double()
        assert received.norm().item() == pytest.approx(clip, rel=1e-4)
        assert torch.cosine_similarity(received, raw, dim=0).item() == pytest.approx(1, abs=1e-9)
    after = read_run(tmp_path / "run").scalars["grad_norm/total_after"]
    assert after == pytest.approx({0: clip}, rel=1e-4)


def _following_clips() -> list[Any]:
    """Clips whose limits follow two steps of history, and so low that they clip."""
    rule = {"name": "quantile", "q": 0.1, "warmup_steps": 2}
    return [
        LayerClipCallback(rule=rule, every_n_steps=1, strict=True),
        AdaptiveClipThreshold(rule=rule, warmup_cap=None, strict=True),
    ]


def fit_in_two_parts(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    whole, first, second = (norm_logger(granularity="parameter") for _ in range(3))
    clips = [_following_clips() for _ in range(3)]
    common: dict[str, Any] = {"strategy": "fsdp2", "devices": world_size}

    def module() -> Any:
        # Three steps an epoch: Lightning starts an epoch's data over when it resumes in the middle of one.
        return make_module("mlp", length=3 * BATCH_SIZE * world_size)

    fit(module(), folder, version="whole", callbacks=[whole, *clips[0]], max_steps=6, **common)
    trainer = fit(module(), folder, version="first", callbacks=[first, *clips[1]], max_steps=3, **common)
    trainer.save_checkpoint(f"{folder}/step3.ckpt")
    options = {"max_steps": 6, "ckpt_path": f"{folder}/step3.ckpt", **common}
    fit(module(), folder, version="second", callbacks=[second, *clips[2]], **options)
    states = [[clip.state_dict() for clip in both] for both in (clips[0], clips[2])]
    return {
        "whole": remembered(whole),
        "resumed": remembered(second),
        "are_same_clips": same(*states),
    }


@covers("fsdp2")
def test_B107_norms_are_the_same_on_all_ranks_before_and_after_a_resume(tmp_path: Path) -> None:
    results = run_distributed(fit_in_two_parts, str(tmp_path), timeout=90)
    for result in results:
        assert result == results[0]
        assert result["whole"]["steps"] == [0, 1, 2, 3, 4, 5]
        assert result["resumed"] == result["whole"]
        assert result["are_same_clips"], "limits differ after the resume"
    runs = {name: read_run(tmp_path / name).ours() for name in ("whole", "second")}
    assert runs["second"].keys() == runs["whole"].keys()
    for tag, points in runs["second"].items():
        assert points == {step: runs["whole"][tag][step] for step in (3, 4, 5)}, tag
    limits, after = (read_run(tmp_path / name).scalars for name in ("whole", "second"))
    clips = [tag for tag in after if tag.startswith("clip/")]
    for tag in clips:
        assert after[tag] == {step: value for step, value in limits[tag].items() if step >= 3}, tag
    assert len(clips) == 3 + 1 + 3 * 2
    assert min(min(after[tag].values()) for tag in clips if "coefficient" in tag) < 1, "nothing was clipped"


# torch reads the annotations of a hook itself and refuses those that are strings.
def sum_hook(state, bucket):  # type: ignore[no-untyped-def]
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def norms_under_two_averages(rank: int, world_size: int) -> list[float]:
    totals = []
    for is_averaged_by_ddp in (True, False):
        model = nn.parallel.DistributedDataParallel(make_mlp())
        if not is_averaged_by_ddp:
            model.register_comm_hook(None, sum_hook)
        loss = loss_of(model, mlp_batch(rank))
        (loss if is_averaged_by_ddp else loss / world_size).backward()
        totals.append(gradient_norms(model).total_norm.item())
    return totals


@covers("ddp", "plain")
def test_B131_norms_are_those_of_the_gradient_that_the_optimizer_gets() -> None:
    expected = total_norm(reference_gradients(make_mlp(), [mlp_batch(0), mlp_batch(1)]))
    for totals in run_distributed(norms_under_two_averages):
        assert totals == pytest.approx([expected] * 2, rel=TOLERANCE)
