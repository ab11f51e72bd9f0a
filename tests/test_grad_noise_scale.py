"""The noise scale of a small GPT against that of its single samples, under every strategy."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, GradLocCallback, GradNoiseScaleCallback
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.noise_truth import NUM_SAMPLES, data_set, make_model, sample_loss, true_noise
from tests.part_loops import train
from tests.spread import CASES
from tests.stateful import differences

STEPS = 250


def covers(strategy: str) -> pytest.MarkDecorator:
    """Marks what the README's table of tested strategies is made of."""
    return pytest.mark.covers(feature="noise scale", host="plain", strategy=strategy)


def draw(rank: int, step: int, sizes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """This rank's micro-batches of a step, with replacement."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(data_set()[torch.randint(0, NUM_SAMPLES, (size,), generator=generator)],) for size in sizes]


def mean_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A mean over the micro-batch."""
    return sample_loss(model, batch[0]).mean()


def sum_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A sum, divided by a number that has nothing to do with the micro-batch."""
    return sample_loss(model, batch[0]).sum() / 10


LOSSES = {"mean": mean_loss, "sum": sum_loss}


def run(
    callback: Any,
    *others: Any,
    rank: int = 0,
    strategy: str = "single",
    sizes: tuple[int, ...] = (2, 2, 2, 2),
    steps: int = STEPS,
    loss: str = "mean",
    spoil: Any = None,
    **options: Any,
) -> Any:
    """Train without moving; the callback."""
    from tests.localize_loops import wrap

    def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        value = LOSSES[loss](model, batch)
        return value if spoil is None else spoil(value)

    model = wrap(make_model(), strategy)
    train(
        model,
        [callback, *others],
        steps=steps,
        micro_batches=lambda step: draw(rank, step, sizes),
        loss_fn=loss_fn,
        **options,
    )
    return callback


class Keeper(GradNoiseScaleCallback):
    """Reads at the end of a run, when the numbers are still there."""

    found: dict[str, float]

    def on_run_end(self, context: Any) -> None:
        """Read."""
        self.found = self.reading()


def keeper(**options: Any) -> Keeper:
    """A callback that knows early."""
    return Keeper(**{"min_samples": 50, **options})


def _spread(rank: int, world_size: int, strategy: str, sizes: tuple[int, ...], loss: str, **options: Any) -> Any:
    return run(keeper(per_layer=True, **options), rank=rank, strategy=strategy, sizes=sizes, loss=loss).found


def is_true(found: dict[str, float], *, errors: float = 3.0) -> bool:
    """Whether a reading is the truth within its own error, which is small."""
    truth = true_noise()
    assert found["reliable"] == 1
    assert found["stderr"] < 0.3 * truth["noise_scale"]
    return abs(found["noise_scale"] - truth["noise_scale"]) < errors * found["stderr"]


@pytest.mark.parametrize(
    ("strategy", "sizes", "loss"),
    [
        pytest.param("single", (2, 2, 2, 2), "mean", marks=covers("single")),
        ("single", (1, 4, 2, 6), "mean"),
        ("single", (1, 4, 2, 6), "sum"),
        pytest.param("ddp", (4,), "mean", marks=covers("ddp")),
        ("ddp", (1, 5), "sum"),
        pytest.param("fsdp1", (2, 2), "mean", marks=covers("fsdp1")),
        pytest.param("fsdp2", (4,), "mean", marks=covers("fsdp2")),
        ("fsdp2", (1, 5), "sum"),
        pytest.param("hsdp", (2, 2), "mean", marks=[covers("hsdp"), pytest.mark.slow]),
    ],
)
def test_it_is_that_of_single_samples(strategy: str, sizes: tuple[int, ...], loss: str) -> None:
    if strategy == "single":
        found = [_spread(0, 1, strategy, sizes, loss)]
    else:
        world_size = CASES[strategy].world_size
        found = run_distributed(_spread, strategy, sizes, loss, world_size=world_size, timeout=120)
    assert all(differences(one, found[0]) == [] for one in found)
    assert is_true(found[0])
    layers = true_noise()["layers"]
    assert {name.removeprefix("layer/") for name in found[0] if name.startswith("layer/")} == set(layers)
    for name, value in layers.items():
        assert found[0][f"layer/{name}"] == pytest.approx(value, rel=0.6)


def test_sums_taken_for_means_are_wrong_and_are_told_apart_by_themselves() -> None:
    sizes = (1, 8, 1, 8)
    wrong = run(keeper(loss_reduction="mean"), sizes=sizes, loss="sum").found
    right = run(keeper(loss_reduction="sum"), sizes=sizes, loss="sum").found
    assert not is_true(wrong)
    assert is_true(right)
    by_itself = run(keeper(), sizes=sizes, loss="sum").found
    assert by_itself["noise_scale"] == pytest.approx(right["noise_scale"], rel=1e-6)


def test_the_numbers_are_those_of_the_gradient_in_use() -> None:
    found, truth = run(keeper()).found, true_noise()
    # The loop propagates four means without dividing them: gradients are four times as large.
    assert found["grad_sq"] / 16 == pytest.approx(truth["grad_sq"], rel=0.3)
    assert found["trace"] / 16 == pytest.approx(truth["trace"], rel=0.1)
    assert found["batch"] == 8
    assert found["ratio_to_batch"] == pytest.approx(found["noise_scale"] / 8)


def test_clips_and_searches_beside_it_change_nothing(tmp_path: Path) -> None:
    alone = run(keeper(), steps=60).found
    clip = AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 1e-3})
    beside = run(keeper(), clip, GradLocCallback(dump_dir=str(tmp_path)), steps=60).found
    assert differences(alone, beside) == []


def test_steps_that_are_not_finite_are_left_out() -> None:
    calls = 0

    def spoil(value: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return value * torch.nan if calls % 40 == 0 else value

    with pytest.warns(StabilizerWarning):
        spoiled = run(keeper(), AdaptiveClipThreshold(), spoil=spoil, steps=200).found
    assert spoiled["num_steps"] == 200 - 20
    assert is_true(spoiled, errors=4)


def test_one_micro_batch_on_one_process_is_told_to_be_nothing() -> None:
    written: dict[str, float] = {}
    with pytest.warns(StabilizerWarning, match="accumulate gradients over at least 2 micro-batches"):
        found = run(keeper(), sizes=(4,), steps=60, log=lambda values, step: written.update(values)).found
    assert math.isnan(found["noise_scale"])
    assert found["num_steps"] == found["reliable"] == 0
    assert written == {}


@pytest.mark.parametrize("source", ["local", "micro_batch"])
def test_a_source_that_is_not_there_is_named(source: Any) -> None:
    sizes = (2, 2) if source == "local" else (4,)
    with pytest.warns(StabilizerWarning, match=f'source="{source}"|accumulate gradients'):
        found = run(keeper(source=source), sizes=sizes, steps=60).found
    assert math.isnan(found["noise_scale"])


def test_sizes_that_nobody_tells_are_counted_as_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stabilizer"):
        found = run(keeper(), tells_loss=False).found
    assert found["batch"] == 4
    assert 2 * found["noise_scale"] == pytest.approx(true_noise()["noise_scale"], rel=0.5)
    assert "micro-batches, whose sizes nobody tells" in caplog.text


def test_the_log_names_the_source_and_advises_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stabilizer"):
        run(keeper(), sizes=(1, 1, 1, 1))
    told = [record.getMessage() for record in caplog.records if record.name == "stabilizer"]
    assert len([line for line in told if "4 micro-batches a step on one rank" in line]) == 1
    assert len([line for line in told if "a larger batch would pay" in line]) == 1
    assert len(told) == 2
