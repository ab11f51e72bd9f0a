"""The loss of a step: weighted over micro-batches and ranks, never averaged over what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stabilizer.batches import count
from stabilizer.losses import LossReduction, StepLoss
from stabilizer.reduction import Reducer
from stabilizer.tally import LossTally
from tests.counting import count_host_reads, fake_cuda
from tests.launcher import run_distributed

IGNORED = -100


def _labels(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("batch", "kind", "expected"),
    [
        ({"input_ids": torch.ones(2, 5), "labels": _labels([IGNORED, 1, 2], [3, 4, IGNORED])}, "auto", 4),
        ({"input_ids": torch.ones(2, 5), "labels": _labels([IGNORED, 1, 2], [3, 4, IGNORED])}, "samples", 2),
        ({"pixels": torch.ones(3, 8), "labels": torch.tensor([0, 1, 2])}, "auto", 3),
        ({"input_ids": torch.ones(2, 5), "attention_mask": _labels([1, 1, 0], [1, 0, 0])}, "tokens", 3),
        ([torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4)], "tokens", 28),
        ([torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4)], "auto", 4),
        (torch.zeros(6), "samples", 6),
        ((torch.zeros(()), [torch.zeros(5, 1)]), "auto", 5),
    ],
)
def test_tokens_and_samples_are_counted(batch: Any, kind: str, expected: int) -> None:
    assert int(count(batch, kind)) == expected


@pytest.mark.parametrize(
    ("batch", "kind"), [([], "auto"), ({"x": torch.zeros(())}, "samples"), (torch.zeros(3), "tokens")]
)
def test_nothing_to_count_is_an_error_that_says_what_there_is(batch: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"weight=.{kind}.: the batch"):
        count(batch, kind)


def _reduce(tally: LossTally, *, with_extremes: bool = True, reduction: LossReduction | None = None) -> list[StepLoss]:
    reduction = LossReduction(tally.weights) if reduction is None else reduction
    device = torch.device("cpu")
    sums = Reducer(device).sum(reduction.pack(tally.take(0), device=device, with_extremes=with_extremes))
    return reduction.unpack(sums, with_extremes=with_extremes)


def _micro_batches(rank: int) -> list[tuple[float, int, int]]:
    """Loss, samples and tokens of each of a rank's micro-batches."""
    generator = np.random.default_rng(rank)
    num = 2 + rank
    return [
        (float(loss), int(samples), int(samples) * int(tokens))
        for loss, samples, tokens in zip(
            generator.normal(4, 1, num), generator.integers(1, 9, num), generator.integers(1, 50, num), strict=True
        )
    ]


def _weighted(rank: int, world_size: int) -> list[list[float]]:
    tally = LossTally(["samples", "tokens"])
    for loss, samples, tokens in _micro_batches(rank):
        labels = torch.full((samples, tokens // samples + 1), 7)
        labels[:, -1] = IGNORED
        tally.begin({"inputs": torch.zeros(samples, 2), "labels": labels})
        tally.add(torch.tensor(loss, dtype=torch.float64))
    rows = []
    for step in _reduce(tally):
        assert step.extremes is not None
        extremes = (step.extremes.minimum, step.extremes.maximum, step.extremes.max_rank)
        rows.append([float(value) for value in (step.mean, step.weight, step.num_seen, *extremes)])
    return rows


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_means_are_weighted_over_ranks_and_micro_batches(world_size: int) -> None:
    everything = [(rank, *row) for rank in range(world_size) for row in _micro_batches(rank)]
    ranks, losses, samples, tokens = (np.array(column) for column in zip(*everything, strict=True))
    results = run_distributed(_weighted, world_size=world_size)
    for result in results:
        for found, weights in zip(result, (samples, tokens), strict=True):
            mean, weight, num, low, high, owner = found
            assert mean == pytest.approx(np.average(losses, weights=weights), rel=1e-12)
            assert (weight, num) == (weights.sum(), len(losses))
            assert (low, high, owner) == (losses.min(), losses.max(), ranks[losses.argmax()])


def _with_a_nan(rank: int, world_size: int, bad: float) -> tuple[Any, ...]:
    tally, reduction = LossTally(["auto"]), LossReduction(["auto"])
    rows = []
    for step in range(4):
        for micro_batch in range(2):
            is_bad = (rank, step, micro_batch) == (1, 1, 0)
            tally.begin(torch.zeros(2))
            tally.add(torch.tensor(bad if is_bad else float(step)))
        [found] = _reduce(tally, with_extremes=step == 3, reduction=reduction)
        rows.append((float(found.mean), float(found.num_nonfinite)))
    assert found.extremes is not None
    return rows, found.extremes.num_nonfinite.tolist(), float(found.extremes.minimum), float(found.extremes.maximum)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_counted_and_its_step_has_no_mean(bad: float) -> None:
    for rows, by_rank, low, high in run_distributed(_with_a_nan, bad):
        assert np.isnan(rows[1][0])
        assert [num for _, num in rows] == [0, 1, 0, 0]
        assert [mean for mean, _ in rows[:1] + rows[2:]] == [0, 2, 3]
        assert by_rank == [0, 1], "the rank is known, though it happened some steps before"
        assert (low, high) == (0, 3), "extremes are of finite losses, since the last exchange"


def test_a_rank_without_a_loss_takes_part() -> None:
    tally = LossTally(["auto"])
    [found] = _reduce(tally)
    assert torch.isnan(found.mean)
    assert (float(found.num_seen), float(found.num_nonfinite)) == (0, 0)


def test_parts_of_a_micro_batch_are_added_and_a_second_optimizer_sees_the_same() -> None:
    tally = LossTally(["samples"])
    tally.begin(torch.zeros(4))
    tally.add(torch.tensor(1.0))
    tally.add(torch.tensor(0.5))
    first = tally.take(0)
    assert tally.take(1) is first
    assert tally.take(1) == [], "each optimizer once"
    tally.add(torch.tensor(8.0))  # of the same batch, for the next optimizer
    [piece] = tally.take(0)
    assert (float(piece.loss), piece.weights) == (8.0, (4,))


def test_what_the_user_tells_replaces_what_the_host_sees() -> None:
    tally = LossTally(["auto"])
    tally.add(torch.tensor(100.0))
    tally.tell({"loss": torch.tensor(2.0)}, weight=3)
    tally.add(torch.tensor(100.0))
    tally.tell(4.0, weight=torch.tensor(1))
    assert float(_reduce(tally)[0].mean) == 2.5


def test_a_scaled_loss_is_divided() -> None:
    tally = LossTally(["auto"])
    tally.begin(torch.zeros(1))
    tally.add(torch.tensor(3.0 * 2**16), scale=torch.tensor(2.0**16))
    tally.begin(torch.zeros(1))
    tally.add(torch.tensor(1.5), scale=0.5)
    assert float(_reduce(tally)[0].mean) == 3.0


def test_a_later_change_of_the_loss_does_not_matter() -> None:
    tally, loss = LossTally(["auto"]), torch.tensor(1.0)
    tally.begin(torch.zeros(1))
    tally.add(loss)
    loss.mul_(100)
    assert float(tally.take(0)[0].loss) == 1.0


def test_the_host_never_waits() -> None:
    with fake_cuda(), count_host_reads() as reads:
        tally, reduction = LossTally(["samples", "tokens"]), LossReduction(["samples", "tokens"])
        device = torch.device("cuda", 0)
        for _ in range(2):
            tally.begin({"labels": torch.zeros(2, 3, dtype=torch.int64, device=device)})
            tally.add(torch.zeros((), device=device), scale=torch.ones((), device=device))
        sums = reduction.pack(tally.take(0), device=device, with_extremes=True)
        reduction.unpack(sums, with_extremes=True)
    assert not reads
    assert reduction.failure is None
