"""Estimates of one step: against every draw from a small population, the paper's own form and a public package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from stabilizer.noise import Estimate, NoiseScale, PartWeights, noise_estimate, noise_estimate_equal, part_weights
from stabilizer.noise.estimates import Reduction
from tests.counting import fake_cuda
from tests.reference_noise import every_draw, population_truth, two_mini_batches

Array = npt.NDArray[np.float64]
DATA = Path(__file__).parent / "data"
#: Two members, and three, in two dimensions.
TWO = np.array([[1.0, -0.5], [3.0, 2.0]])
THREE = np.array([[2.0, 1.0], [-1.0, 0.5], [1.0, 3.0]])


def recorded(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def _mean_over_draws(
    population: Array, sizes: list[int], *, made_with: Reduction, told: Reduction, kappa: float
) -> tuple[float, float]:
    """Expectation of both estimates, where the loss is reduced in one way and another is told."""
    small, big = [], []
    for draw in every_draw(population, sizes):
        parts = [kappa * (part.mean(0) if made_with == "mean" else part.sum(0)) for part in draw]
        small.append(sum((part**2).sum() for part in parts))
        big.append((sum(parts, np.zeros(2)) ** 2).sum())
    weights = part_weights(torch.tensor(sizes), reduction=told)
    found = noise_estimate(torch.tensor(np.array(small)), torch.tensor(np.array(big)), **weights._asdict())
    return found.grad_sq.mean().item(), found.trace.mean().item()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("population", "sizes"),
    [(TWO, [1, 8]), (TWO, [2, 2, 2]), (TWO, [1, 2, 4, 3]), (THREE, [1, 4]), (THREE, [2, 1, 3])],
    ids=["1-8", "2-2-2", "1-2-4-3", "three 1-4", "three 2-1-3"],
)
@pytest.mark.parametrize("scale", ["step", 1.0, 3.7])
def test_unbiased_over_every_draw_from_a_population(
    population: Array, sizes: list[int], reduction: Reduction, scale: Any
) -> None:
    weight = len(sizes) if reduction == "mean" else sum(sizes)
    kappa = 1 / weight if scale == "step" else scale
    found = _mean_over_draws(population, sizes, made_with=reduction, told=reduction, kappa=kappa)
    # A step whose expected gradient is G itself has |G|^2 and tr(Sigma); any other has them times its factor squared.
    expected = [value * (kappa * weight) ** 2 for value in population_truth(population)]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("made_with", "told"), [("mean", "sum"), ("sum", "mean")])
def test_the_wrong_weighting_is_wrong(made_with: Reduction, told: Reduction) -> None:
    sizes = [1, 2, 4, 3]
    truth = population_truth(TWO)
    kappa = 1 / (len(sizes) if made_with == "mean" else sum(sizes))
    right = _mean_over_draws(TWO, sizes, made_with=made_with, told=made_with, kappa=kappa)
    wrong = _mean_over_draws(TWO, sizes, made_with=made_with, told=told, kappa=kappa)
    scale = truth.trace / truth.grad_sq
    assert right[1] / right[0] == pytest.approx(scale, rel=1e-12)
    assert abs(wrong[1] / wrong[0] / scale - 1) > 0.1


def test_equal_parts_as_in_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    sq_small, sq_big = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    found = noise_estimate_equal(sq_small, sq_big, b_small=6, b_big=30)
    # McCandlish et al. (2018), appendix A.1, equations A.2 and A.3.
    torch.testing.assert_close(found.grad_sq, (30 * sq_big - 6 * sq_small) / (30 - 6))
    torch.testing.assert_close(found.trace, (sq_small - sq_big) / (1 / 6 - 1 / 30))
    # Parts of one size are equal in either weighting; the sum's own gradient is so many samples times as large.
    for reduction, factor in (("mean", 5.0), ("sum", 30.0)):
        weights = part_weights(torch.full((5,), 6), reduction=reduction)  # type: ignore[arg-type]
        small, big = sq_small * 5, sq_big * 25
        same = noise_estimate(small * (factor / 5) ** 2, big * (factor / 5) ** 2, **weights._asdict())
        torch.testing.assert_close(same.grad_sq, found.grad_sq * factor**2)
        torch.testing.assert_close(same.trace, found.trace * factor**2)


@pytest.mark.parametrize("beta", [0.995, 0.9])
def test_a_public_implementation_step_for_step(beta: float) -> None:
    data = recorded("gns")
    running = NoiseScale(decay=beta, device="cpu")
    trace = data["runs"][f"beta_{beta}"]["trace"]
    assert len(trace) == len(data["sq_norm_small"]) == 60
    for sq_small, sq_big, expected in zip(data["sq_norm_small"], data["sq_norm_big"], trace, strict=True):
        norms = (torch.tensor(value, dtype=torch.float64) for value in (sq_small, sq_big))
        estimate = noise_estimate_equal(*norms, b_small=data["B_small"], b_big=data["B_big"])
        assert estimate.grad_sq.item() == pytest.approx(expected["est_sq_norm"], rel=1e-6)
        assert estimate.trace.item() == pytest.approx(expected["est_var"], rel=1e-6)
        running.update(estimate, valid=torch.tensor(True))
        reading = running.compute()
        assert reading.grad_sq.item() == pytest.approx(expected["debiased_sq_norm"], rel=1e-6)
        assert reading.trace.item() == pytest.approx(expected["debiased_var"], rel=1e-6)
        assert reading.noise_scale.item() == pytest.approx(expected["gns"], rel=1e-6)


def _blog(difference: Array, total: Array, batch: int) -> float:
    """B |g1 - g2|^2 / (2 |g1 + g2|^2), a ratio of means to be fair to it."""
    return float(batch * difference.mean() / (2 * total.mean()))


def test_the_formula_of_two_mini_batches_that_goes_around_is_wrong_and_ours_is_right() -> None:
    rows = recorded("gns_two_minibatch_simulation")["rows"]
    rng = np.random.default_rng(0)
    pairs = [two_mini_batches(row["B_true"], batch=row["B"], dims=137, runs=2500, rng=rng) for row in rows]
    difference, total = np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])
    blog = [_blog(d, t, row["B"]) for d, t, row in zip(difference, total, rows, strict=True)]
    # Ours, all settings at once: the step is the mean of both mini-batches.
    small, big = torch.from_numpy((difference + total) / 8), torch.from_numpy(total / 4)
    running = NoiseScale(shape=(len(rows),), decay=1 - 1e-6, device="cpu")
    sizes = torch.tensor([row["B"] for row in rows])
    for step in range(2500):
        estimate = noise_estimate_equal(small[:, step] * 2, big[:, step], b_small=1, b_big=2)
        running.update(Estimate(estimate.grad_sq, estimate.trace * sizes), valid=torch.tensor(True))
    reading = running.compute()

    for index, row in enumerate(rows):
        true, batch = row["B_true"], row["B"]
        # The formula, here as recorded and as it must be: N / (4 + 2 N / B).
        assert blog[index] == pytest.approx(row["blog_ratio_of_means"], rel=0.03)
        assert blog[index] == pytest.approx(true / (4 + 2 * true / batch), rel=0.03)
        assert blog[index] < 0.26 * true
        assert blog[index] < 0.51 * batch
        if reading.reliable[index]:
            ours, error = reading.noise_scale[index].item(), reading.stderr[index].item()
            assert abs(ours - true) < 4 * error
            assert abs(ours - row["correct_ratio_of_means"]) < 4 * error
            assert error < 0.4 * true
    # Four times too small where the batch is large, half of the batch where the noise is.
    assert blog[12] == pytest.approx(rows[12]["B_true"] / 4, rel=0.03)
    assert blog[5] == pytest.approx(rows[5]["B"] / 2, rel=0.03)
    # Everything but 256 times as much noise as samples.
    assert reading.reliable.tolist() == [row["B_true"] <= 64 * row["B"] for row in rows]


# What there is nothing to say about.


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [[], [0, 0], [7], [0, 1_234_567, 0], [4097]], ids=str)
def test_fewer_than_two_parts_are_not_available(sizes: list[int], reduction: Reduction) -> None:
    weights = part_weights(torch.tensor(sizes), reduction=reduction)
    norms = torch.tensor([1.0, 2.0])
    for cast in (torch.float64, torch.float32):
        estimate = noise_estimate(norms, norms, **{k: v.to(cast) for k, v in weights._asdict().items()})
        assert [value.isnan().all().item() for value in estimate] == [True, True]
    plain: dict[str, float] = {name: value.item() for name, value in weights._asdict().items()}
    assert noise_estimate(norms, norms, **plain).grad_sq.isnan().all()


def test_two_norms_of_one_size_are_not_available() -> None:
    estimate = noise_estimate_equal(torch.tensor(1.0), torch.tensor(1.0), b_small=8, b_big=8)
    assert estimate.grad_sq.isnan()
    assert estimate.trace.isnan()


def test_numbers_and_tensors_and_sums_over_ranks_are_the_same() -> None:
    sizes = [3, 1, 8, 5]
    whole = part_weights(torch.tensor(sizes), reduction="sum")
    ranks = [part_weights(torch.tensor(some), reduction="sum") for some in (sizes[:1], sizes[1:])]
    summed = PartWeights(*(one + other for one, other in zip(*ranks, strict=True)))
    assert [value.item() for value in summed] == pytest.approx([value.item() for value in whole], rel=1e-15)
    small, big = torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0])
    as_tensors = noise_estimate(small, big, **whole._asdict())
    plain: dict[str, float] = {name: value.item() for name, value in whole._asdict().items()}
    assert torch.equal(torch.stack(as_tensors), torch.stack(noise_estimate(small, big, **plain)))
    assert as_tensors.grad_sq.dtype == torch.float64


def test_a_part_without_samples_does_not_count() -> None:
    for reduction in ("mean", "sum"):
        some = part_weights(torch.tensor([3, 5]), reduction=reduction)
        more = part_weights(torch.tensor([3, 0, 5]), reduction=reduction)
        assert [value.item() for value in some] == [value.item() for value in more]
    assert some.batch.item() == 8
    assert part_weights(torch.tensor([2, 6]), reduction="mean").batch.item() == pytest.approx(6.0)


def test_arguments() -> None:
    one = torch.ones(())
    for sizes in ({"b_small": 0, "b_big": 8}, {"b_small": 9, "b_big": 8}, {"b_small": -1, "b_big": 8}):
        with pytest.raises(ValueError, match="expected 0 < b_small <= b_big"):
            noise_estimate_equal(one, one, **sizes)
    with pytest.raises(ValueError, match="reduction='none': expected 'mean' or 'sum'"):
        part_weights(torch.ones(2), reduction="none")  # type: ignore[arg-type]


def test_the_host_does_not_wait() -> None:
    with fake_cuda():
        norms: Tensor = torch.ones(3, device="cuda")
        weights = part_weights(torch.ones(4, device="cuda", dtype=torch.int64), reduction="mean")
        for options in (weights._asdict(), dict.fromkeys(PartWeights._fields, 2.0)):
            assert noise_estimate(norms, norms, **options).trace.device.type == "cuda"
        assert noise_estimate_equal(norms, norms, b_small=1, b_big=2).grad_sq.device.type == "cuda"
        assert weights.batch.device.type == "cuda"
