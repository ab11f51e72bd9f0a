"""Clips of importance weights: against the oracle, their shares, their arguments, and together."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.rollout import (
    SeqClip,
    TokenClip,
    divergence_mask,
    normalized_weights,
    off_policy_mask,
    veto_mask,
)
from tests.reference_rollout import sequence_weights, token_weights


def _batch() -> tuple[Tensor, Tensor]:
    log_ratios = torch.randn(40, 9, dtype=torch.float64)
    lengths = torch.randint(1, 10, (40,))
    return log_ratios, torch.arange(9) < lengths[:, None]


def _ratios(log_ratios: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[chosen].exp().tolist() for row, chosen in zip(log_ratios, mask, strict=True)]


def _flat(rows: list[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(rows))


@pytest.mark.parametrize(
    ("mode", "bounds"),
    [
        ("truncate", (None, 2.0)),
        ("truncate", (0.5, 2.0)),
        ("icepop", (0.5, 5.0)),
        ("mis", (None, 2.0)),
        ("mis", (0.9, 3.0)),
    ],
)
def test_tokens_are_weighted_as_in_the_papers(mode: Any, bounds: Any) -> None:
    log_ratios, mask = _batch()
    found = TokenClip(mode=mode, bounds=bounds)(log_ratios, mask=mask.long())
    ratios = _ratios(log_ratios, mask)
    expected = [token_weights(row, mode, bounds) for row in ratios]
    assert found.weights[mask].tolist() == pytest.approx(_flat(expected), rel=1e-12)
    assert not found.weights[~mask].any()
    flat = _flat(ratios)
    below, above = [r < (bounds[0] or 0) for r in flat], [r > bounds[1] for r in flat]
    assert found.num_tokens == len(flat)
    assert found.share_below.item() == pytest.approx(sum(below) / len(flat))
    assert found.share_above.item() == pytest.approx(sum(above) / len(flat))
    assert found.share_changed.item() == pytest.approx((sum(below) + sum(above)) / len(flat))
    rows = [r != e for r, e in zip(ratios, expected, strict=True)]
    assert 0 < sum(rows) < len(rows)
    assert found.share_sequences.item() == pytest.approx(sum(rows) / len(rows))
    outside = torch.zeros_like(mask).masked_scatter(mask, torch.tensor(below) | torch.tensor(above))
    assert torch.equal(found.mask, mask if mode == "truncate" else mask & ~outside)


@pytest.mark.parametrize("veto", [None, 0.1])
@pytest.mark.parametrize("ratio", ["product", "geometric"])
@pytest.mark.parametrize(
    ("mode", "bounds", "weighting"),
    [
        ("mis", (0.5, 2.0), "sequence"),
        ("mis", (None, 1.2), "token"),
        ("mis", (0.9, 1.1), "none"),
        ("truncate", (None, 1.2), "sequence"),
        ("truncate", (0.8, 1.2), "sequence"),
    ],
)
def test_sequences_are_weighted_as_in_the_papers(
    mode: Any, bounds: Any, weighting: Any, ratio: Any, veto: float | None
) -> None:
    log_ratios, mask = _batch()
    clip = SeqClip(ratio=ratio, mode=mode, bounds=bounds, veto=veto, weighting=weighting)
    found = clip(log_ratios, mask=mask)
    expected = sequence_weights(
        _ratios(log_ratios, mask), ratio=ratio, mode=mode, bounds=bounds, veto=veto or 0.0, weighting=weighting
    )
    assert found.weights[mask].tolist() == pytest.approx(_flat(expected), rel=1e-9)
    assert not found.weights[~mask].any()
    is_dropped = torch.tensor([not any(row) for row in expected])
    assert torch.equal(found.mask, mask & ~is_dropped[:, None])
    if mode == "mis":
        assert 0 < is_dropped.sum() < len(expected)
        assert found.share_sequences.item() == pytest.approx(is_dropped.double().mean().item())
        assert found.share_changed.item() == pytest.approx(
            (mask & is_dropped[:, None]).sum().item() / mask.sum().item()
        )


def test_the_same_bounds_mean_another_thing_for_a_product_and_a_mean() -> None:
    log_ratios, mask = torch.full((1, 1000), 0.002), torch.ones(1, 1000)
    assert not SeqClip(ratio="product", bounds=(0.5, 2.0))(log_ratios, mask=mask).mask.any(), "e^2 is over 2"
    assert SeqClip(ratio="geometric", bounds=(0.5, 2.0))(log_ratios, mask=mask).mask.all()
    assert not SeqClip(ratio="geometric")(log_ratios, mask=mask).mask.any(), "1.002 is over 1.001"


def test_defaults_are_those_of_the_papers() -> None:
    assert TokenClip().bounds == (None, 2.0)
    assert TokenClip(mode="icepop").bounds == (0.5, 5.0)
    assert TokenClip(mode="mis").bounds == (None, 2.0)
    assert SeqClip(ratio="geometric").bounds == (0.999, 1.001)
    with pytest.raises(TypeError, match="ratio"):
        SeqClip()  # type: ignore[call-arg]


def test_what_is_right_on_a_bound_is_inside() -> None:
    log_ratios, mask = torch.tensor([[0.5, 2.0, 1.0]]).log(), torch.ones(1, 3)
    for mode in ("truncate", "icepop", "mis"):
        found = TokenClip(mode=mode, bounds=(0.5, 2.0))(log_ratios, mask=mask)  # type: ignore[arg-type]
        assert found.share_changed == 0
        torch.testing.assert_close(found.weights, log_ratios.exp())
    assert TokenClip(bounds=(None, 2.0))(torch.full((1, 3), 50.0), mask=mask).weights.tolist() == [[2.0, 2.0, 2.0]]


@pytest.mark.parametrize("size", [1.0, 80.0, 1e4, 3e38, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_ratio_is_too_large(size: float, dtype: torch.dtype) -> None:
    log_ratios, mask = torch.tensor([[size, 0.0], [-size, 0.0]], dtype=dtype), torch.ones(2, 2)
    by_token = SeqClip(ratio="geometric", bounds=(None, 1e30), weighting="token")
    for clip in (
        by_token,
        TokenClip(),
        TokenClip(mode="icepop"),
        TokenClip(mode="mis"),
        SeqClip(ratio="product"),
        SeqClip(ratio="product", mode="truncate", bounds=(0.5, 2.0)),
        SeqClip(ratio="geometric", mode="truncate", log_ratio_limit=20.0),
    ):
        found = clip(log_ratios, mask=mask)
        assert found.weights.isfinite().all(), clip
        largest = math.exp(80) if clip == by_token else clip.bounds[1]
        assert found.weights.amax().item() <= largest * (1 + 1e-6), clip
        assert found.weights.amin() >= 0


def test_a_token_that_is_nan_counts_for_nothing() -> None:
    log_ratios, mask = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, math.nan]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    for mode in ("truncate", "icepop", "mis"):
        found = TokenClip(mode=mode)(log_ratios, mask=mask)  # type: ignore[arg-type]
        assert found.weights.tolist() == [[1, 0, 1], [1, 1, 0]]
        assert found.mask.tolist() == [[True, False, True], [True, True, False]]
        assert found.share_changed.item() == pytest.approx(1 / 5)
    for clip in (SeqClip(ratio="product"), SeqClip(ratio="geometric", mode="truncate")):
        found = clip(log_ratios, mask=mask)
        assert found.weights.tolist() == [[0, 0, 0], [1, 1, 0]]
        assert found.share_sequences == 0.5


def test_empty_sequences_are_no_part_of_a_share() -> None:
    log_ratios, mask = torch.tensor([[9.0, 0.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([[1, 1], [1, 1], [0, 0]])
    for clip in (TokenClip(), SeqClip(ratio="product")):
        found = clip(log_ratios, mask=mask)
        assert (found.num_tokens, found.num_sequences) == (4, 2)
        assert found.share_sequences == 0.5


def test_no_token_has_no_share() -> None:
    for clip in (TokenClip(), SeqClip(ratio="product", veto=1e-4)):
        found = clip(torch.full((2, 3), math.nan), mask=torch.zeros(2, 3))
        assert not found.weights.any()
        assert [x.item() for x in (found.num_tokens, found.share_changed, found.share_sequences)] == [0, 0, 0]


def test_the_limit_of_log_ratios_is_felt_by_weights_alone() -> None:
    log_ratios, mask = torch.tensor([[-75.0, 0.0]]), torch.ones(1, 2)
    for limit, weight in ((None, math.exp(-75)), (20.0, math.exp(-20))):
        found = TokenClip(log_ratio_limit=limit)(log_ratios, mask=mask)
        assert found.weights[0, 0].item() == pytest.approx(weight, rel=1e-5)
    assert SeqClip(ratio="product", bounds=(1e-30, 2.0), log_ratio_limit=20.0)(log_ratios, mask=mask).share_below == 1


def test_one_token_vetoes_its_sequence_and_no_other() -> None:
    log_ratios = torch.zeros(3, 4)
    log_ratios[0, 2], log_ratios[1, 3] = math.log(0.9e-4), math.log(1.1e-4)
    log_ratios[2, 0] = -100
    mask = torch.ones(3, 4)
    mask[2, 0] = 0
    kept = veto_mask(log_ratios, mask=mask)
    assert kept.any(1).tolist() == [False, True, True]
    found = SeqClip(ratio="geometric", bounds=(None, 2.0), veto=1e-4)(log_ratios, mask=mask)
    assert torch.equal(found.mask, kept)
    assert found.share_below == 0
    assert found.share_sequences.item() == pytest.approx(1 / 3)


def test_token_weights_within_sequences_that_stay() -> None:
    log_ratios, mask = torch.tensor([[0.1, 3.0], [0.0, 0.1]]), torch.ones(2, 2)
    tokens, sequences = TokenClip()(log_ratios, mask=mask), SeqClip(ratio="product")(log_ratios, mask=mask)
    weights = tokens.weights * sequences.mask
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0], [1.0, math.exp(0.1)]]))


def test_normalized_weights_have_a_mean_of_1() -> None:
    log_ratios, mask = _batch()
    mask[3] = False
    found = TokenClip()(log_ratios, mask=mask)
    by_token = normalized_weights(found.weights, mask=mask)
    assert by_token[mask].mean().item() == pytest.approx(1)
    by_sequence = normalized_weights(found.weights, mask=mask, over="sequences")
    means = [row[chosen].mean() for row, chosen in zip(by_sequence, mask, strict=True) if chosen.any()]
    assert torch.stack(means).mean().item() == pytest.approx(1)
    assert not torch.allclose(by_token, by_sequence)
    assert not normalized_weights(torch.zeros(2, 2), mask=torch.ones(2, 2)).any()
    with pytest.raises(ValueError, match="over='all'"):
        normalized_weights(found.weights, mask=mask, over="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
def test_divergences_of_tokens_and_sequences_are_held_against_a_limit(level: Any) -> None:
    log_ratios, mask = _batch()
    found = divergence_mask(log_ratios, mask=mask, max_divergence=0.4, estimator="k2", level=level)
    for row, chosen, kept in zip(log_ratios.tolist(), mask.tolist(), found.tolist(), strict=True):
        k2 = [x * x / 2 for x, is_token in zip(row, chosen, strict=True) if is_token]
        whole = {"sequence_sum": sum(k2), "sequence_mean": sum(k2) / len(k2), "sequence_max": max(k2)}
        expected = [x <= 0.4 for x in k2] if level == "token" else [whole[level] <= 0.4] * len(k2)
        assert kept == expected + [False] * (9 - len(k2))
    with pytest.raises(ValueError, match="level='batch': expected token"):
        divergence_mask(log_ratios, mask=mask, max_divergence=0.4, level="batch")  # type: ignore[arg-type]
    log_ratios[:, 0] = math.nan
    kept = divergence_mask(log_ratios, mask=mask, max_divergence=9.0, estimator="k2", level=level)
    assert not kept[:, 0].any()
    assert kept.any() == (level == "token")


def test_only_negative_advantages_are_dropped_for_drift() -> None:
    log_ratios = torch.tensor([[-0.5, math.nan], [-0.5, -0.5], [0.5, 0.5], [-math.inf, 0.0]])
    mask = torch.ones(4, 2)
    for sign, expected in ((1.0, [True] * 4), (0.0, [True] * 4), (-1.0, [True, False, True, False])):
        kept = off_policy_mask(log_ratios, mask=mask, advantages=torch.full((4,), sign), max_kl=0.3)
        assert kept.all(1).tolist() == expected
        assert kept.any(1).tolist() == expected
    with pytest.raises(ValueError, match=r"advantages have shape \(4, 1\): expected \(4,\)"):
        off_policy_mask(log_ratios, mask=mask, advantages=torch.ones(4, 1), max_kl=0.3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "clip"},
        {"bounds": (2.0, 0.5)},
        {"bounds": (0.0, 2.0)},
        {"bounds": (1.0, 1.0)},
        {"bounds": (0.5, None)},
        {"bounds": (None, math.inf)},
        {"bounds": (math.nan, 2.0)},
        {"bounds": 2.0},
        {"bounds": (True, 2.0)},
        {"log_ratio_limit": 0.0},
        {"log_ratio_limit": math.nan},
    ],
)
def test_arguments_are_checked_when_given(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name}="):
        TokenClip(**arguments)
    with pytest.raises(ValueError, match=f"^{name}="):
        SeqClip(ratio="product", **arguments)


def test_arguments_of_sequences_are_checked_when_given() -> None:
    for arguments in (
        {"ratio": "mean"},
        {"ratio": "product", "veto": 0.0},
        {"ratio": "product", "weighting": "all"},
        {"ratio": "product", "mode": "truncate", "weighting": "token"},
    ):
        with pytest.raises(ValueError, match=f"^{list(arguments)[-1]}="):
            SeqClip(**arguments)  # type: ignore[arg-type]
