"""Raw statistics: against the oracle, added up over micro-batches and ranks, over extreme and missing values."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stabilizer import rollout
from stabilizer.rollout import MismatchStatistics, MismatchSums
from tests.counting import count_host_reads, fake_cuda
from tests.launcher import run_distributed
from tests.reference_rollout import mismatch, pairs

COUNTS = {"num_tokens", "num_sequences", "num_nonfinite"}


def _numbers(statistics: MismatchStatistics) -> dict[str, float]:
    return {name: value.item() for name, value in statistics.as_dict().items()}


def _batch(num_sequences: int = 6, num_tokens: int = 9, *, spread: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    train = -torch.rand(num_sequences, num_tokens) * 4
    other = (train + torch.randn_like(train) * spread).clamp(max=0)
    lengths = torch.randint(1, num_tokens + 1, (num_sequences,))
    lengths[0] = 0
    mask = torch.arange(num_tokens) < lengths[:, None]
    return train.masked_fill(~mask, math.nan), other.masked_fill(~mask, math.inf), mask


@pytest.mark.parametrize("spread", [1e-3, 0.05, 0.7, 4.0])
@pytest.mark.parametrize("bounds", [(0.5, 5.0), (0.9, 1.1), (1.0, 1.0)])
def test_all_statistics_are_those_of_the_oracle(spread: float, bounds: tuple[float, float]) -> None:
    train, other, mask = _batch(spread=spread)
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=mask, bounds=bounds))
    expected = mismatch(pairs(train, other, mask), bounds)
    assert list(found) == list(expected)
    # The oracle cancels in k3, chi-square and a deviation near 0; what is computed here does not.
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_a_difference_of_a_billionth_is_not_lost() -> None:
    """In the plain formulas of k3, chi-square and the deviation, numbers near 1 cancel."""
    train, mask = torch.zeros(4, 8, dtype=torch.float64), torch.ones(4, 8)
    other = torch.full_like(train, -1e-9)
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=mask))
    assert found["kl_k3"] == pytest.approx(0.5e-18, rel=1e-6, abs=0)
    assert found["chi_square"] == pytest.approx(math.expm1(2e-9), rel=1e-9, abs=0)
    other[:, ::2] = 1e-9
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=mask))
    assert found["std_ratio"] == pytest.approx(1e-9, rel=1e-6, abs=0)


def test_micro_batches_and_ranks_add_up_to_the_whole() -> None:
    train, other, mask = _batch(12)
    whole = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=mask))
    parts = [
        rollout.mismatch_sums(p, logp_rollout=q, mask=m)
        for p, q, m in zip(train.split(5), other.split(5), mask.split(5), strict=True)
    ]
    for order in (parts, parts[::-1], [MismatchSums.empty(), *parts]):
        assert _numbers(rollout.mismatch_statistics(functools.reduce(operator.add, order))) == pytest.approx(
            whole, rel=1e-12
        )
    # As collectives do it: one sum, one maximum.
    packed = MismatchSums(
        torch.stack([part.sums for part in parts]).sum(0), torch.stack([part.maxima for part in parts]).amax(0)
    )
    assert _numbers(rollout.mismatch_statistics(packed)) == pytest.approx(whole, rel=1e-12)


def _over_ranks(rank: int, world_size: int) -> dict[str, float]:
    torch.manual_seed(3)
    train, other, mask = (whole[rank::world_size] for whole in _batch(9))
    sums = rollout.mismatch_sums(train, logp_rollout=other, mask=mask)
    dist.all_reduce(sums.sums)
    dist.all_reduce(sums.maxima, op=dist.ReduceOp.MAX)
    return _numbers(rollout.mismatch_statistics(sums))


def test_two_ranks_read_what_one_process_reads() -> None:
    torch.manual_seed(3)
    train, other, mask = _batch(9)
    expected = mismatch(pairs(train, other, mask), (0.5, 5.0))
    for found in run_distributed(_over_ranks):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_sums_over_different_bounds_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"bounds=\(0.5, 5.0\) and \(0.5, 2.0\)"):
        MismatchSums.empty() + MismatchSums.empty(bounds=(0.5, 2.0))
    for bounds in ((0.0, 2.0), (1.5, 2.0), (0.5, 0.9), (0.5, math.inf), (math.nan, 2.0), (0.5,)):
        with pytest.raises(ValueError, match="expected two ratios with 1 between them"):
            MismatchSums.empty(bounds=bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(3, 4), (0, 4), (3, 0)])
def test_no_token_counts_as_none_and_all_else_is_undefined(size: tuple[int, int]) -> None:
    train = torch.full(size, math.nan)
    sums = rollout.mismatch_sums(train, logp_rollout=train, mask=torch.zeros(size))
    assert not sums.sums.any()
    assert sums.sums.isfinite().all()
    found = _numbers(rollout.mismatch_statistics(sums))
    assert {name for name, value in found.items() if value == 0} == COUNTS
    assert all(math.isnan(value) for name, value in found.items() if name not in COUNTS)
    # It does no harm to what it is added to.
    one = rollout.mismatch_sums(torch.zeros(1, 1), logp_rollout=torch.zeros(1, 1), mask=torch.ones(1, 1))
    assert torch.equal((one + sums).sums, one.sums)
    assert torch.equal((one + sums).maxima, one.maxima)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_log_probs_that_are_not_finite_are_counted_and_left_out(bad: float, side: int) -> None:
    train, other, mask = _batch()
    clean = mask.clone()
    clean[1, 0] = clean[2, 0] = False
    (train, other)[side][1:3, 0] = bad
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=mask))
    expected = mismatch(pairs(train, other, clean), (0.5, 5.0)) | {"num_nonfinite": 2}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_no_log_ratio_is_too_large() -> None:
    """Statistics saturate, log-ratios are reported as they are, and none is NaN."""
    train = torch.full((4, 25_000), -1.0)
    other = train.clone()
    train[0, 0], other[1, 1], train[2, 2], other[3, 3] = -3e38, -3e38, -1e4, -1e4
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=torch.ones_like(train)))
    assert all(math.isfinite(value) for value in found.values()), found
    assert found["max_abs_log_ratio"] == pytest.approx(3e38, rel=1e-6)
    assert found["max_log_ratio"] == pytest.approx(3e38, rel=1e-6)
    assert found["min_log_ratio"] == pytest.approx(-3e38, rel=1e-6)
    assert found["max_ratio"] == pytest.approx(math.exp(300))
    assert found["min_ratio"] == 0
    assert found["share_beyond_factor_2"] == pytest.approx(4e-5)
    assert found["effective_sample_size"] == pytest.approx(2e-5), "two tokens have all the weight"
    assert found["max_abs_delta_p"] == pytest.approx(math.exp(-1))


def test_ratios_that_have_all_faded_leave_no_sample() -> None:
    train, other = torch.full((2, 3), -2000.0), torch.zeros(2, 3)
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=torch.ones(2, 3)))
    assert found["effective_sample_size"] == found["sequence_effective_sample_size"] == 0
    assert found["chi_square"] == -1
    # Far below 1, but alike: n samples, which sums of r - 1 could not tell from none.
    train = torch.full((2, 3), -60.0)
    found = _numbers(rollout.rollout_mismatch(train, logp_rollout=other, mask=torch.ones(2, 3)))
    assert found["effective_sample_size"] == pytest.approx(1)
    assert found["sequence_effective_sample_size"] == pytest.approx(1)


@pytest.mark.parametrize("shift", [-0.19, 0.19])
def test_what_all_tokens_share_shows_in_the_mean_log_ratio_alone(shift: float) -> None:
    """17 % less on every token: k3, the sample size, shares and extremes look sound."""
    other = -torch.rand(8, 100) * 5
    mask = torch.rand_like(other) < 0.9
    mask[3] = False
    found = _numbers(rollout.rollout_mismatch(other + shift, logp_rollout=other, mask=mask))
    assert found["kl_k3"] < 5e-2
    assert found["effective_sample_size"] == pytest.approx(1)
    assert found["share_beyond_factor_2"] == found["share_outside"] == 0
    assert found["max_abs_log_ratio"] == pytest.approx(0.19, rel=1e-5)
    assert found["std_log_ratio"] < 1e-6
    # No padding and no empty sequence is among the means and extremes.
    for name in ("mean_log_ratio", "min_log_ratio", "max_log_ratio"):
        assert found[name] == pytest.approx(shift, rel=1e-5)
    for name in ("min_ratio", "mean_ratio", "max_ratio"):
        assert found[name] == pytest.approx(math.exp(shift), rel=1e-5)
    for name in ("log_perplexity_gap", "min_log_perplexity_gap", "max_log_perplexity_gap"):
        assert found[name] == pytest.approx(-shift, rel=1e-5)


def test_a_device_with_float32_only_has_a_sample_size_too() -> None:
    """There the square of a sum of ratios would not be finite."""
    shape = (10, 10_000)
    sums = rollout.mismatch_sums(torch.full(shape, 35.0), logp_rollout=torch.zeros(shape), mask=torch.ones(shape))
    narrow = MismatchSums(sums.sums.float(), sums.maxima.float())
    assert rollout.mismatch_statistics(narrow).effective_sample_size.item() == pytest.approx(1, rel=1e-5)


def test_a_log_prob_over_0_is_a_probability_of_1() -> None:
    found = rollout.rollout_mismatch(torch.tensor([[100.0]]), logp_rollout=torch.tensor([[0.0]]), mask=torch.ones(1, 1))
    assert found.max_abs_delta_p == 0


def test_nothing_waits_for_the_device_and_nothing_has_a_gradient() -> None:
    with fake_cuda(), torch.device("cuda", 0):
        train, other, mask = torch.zeros(3, 4, requires_grad=True), torch.zeros(3, 4), torch.ones(3, 4)
        with count_host_reads() as reads:
            sums = MismatchSums.empty(device="cuda:0")
            sums = sums + rollout.mismatch_sums(train, logp_rollout=other, mask=mask)
            found = rollout.mismatch_statistics(sums)
            log_ratios = rollout.token_log_ratios(train, logp_rollout=other, mask=mask)
            for clip in (
                rollout.TokenClip(),
                rollout.TokenClip(mode="icepop"),
                rollout.SeqClip(ratio="product", veto=1e-4),
                rollout.SeqClip(ratio="geometric", mode="truncate"),
            ):
                clipped = clip(log_ratios, mask=mask)
                assert not clipped.weights.requires_grad
            rollout.normalized_weights(clipped.weights, mask=clipped.mask)
            rollout.divergence_mask(log_ratios, mask=mask, max_divergence=0.1, level="sequence_mean")
            rollout.off_policy_mask(log_ratios, mask=mask, advantages=train[:, 0], max_kl=0.1)
            rollout.dual_clip_loss(log_ratios, mask=mask, advantages=other[:, 0])
        assert not reads
    assert not sums.sums.requires_grad
    assert {value.device.type for value in found.as_dict().values()} == {"cuda"}


def test_all_that_is_promised_is_there() -> None:
    """Of the description of every field, the name comes first."""
    text = MismatchStatistics.__doc__ or ""
    for field in dataclasses.fields(MismatchStatistics):
        assert f"        {field.name}: " in text
