"""The dual clip: values and gradients against the oracle, with advantages of either sign and ratios of any size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stabilizer.rollout import dual_clip_loss
from tests.reference_rollout import dual_clip

LOG_RATIOS = [-300.0, -2.0, -0.3, -0.1, 0.0, 0.1, 0.19, 0.25, 1.0, 1.2, 5.0, 60.0]
ADVANTAGES = [-2.0, -0.5, 0.0, 0.7, 3.0]


@pytest.mark.parametrize("c", [None, 1.5, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_the_paper(c: float | None, low: float, high: float, dtype: torch.dtype) -> None:
    log_ratios = torch.tensor([LOG_RATIOS] * len(ADVANTAGES), dtype=dtype, requires_grad=True)
    mask = torch.ones_like(log_ratios)
    found = dual_clip_loss(
        log_ratios, advantages=torch.tensor(ADVANTAGES), mask=mask, clip_low=low, clip_high=high, dual_clip=c
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_ratios)
    for row, advantage in enumerate(ADVANTAGES):
        for column, log_ratio in enumerate(LOG_RATIOS):
            loss, slope = dual_clip(log_ratio, advantage, low, high, c)
            assert found.loss[row, column].item() == pytest.approx(loss, rel=1e-5)
            assert gradient[row, column].item() == pytest.approx(slope, rel=1e-5)
            # Said to have no gradient where it has none.
            is_clipped = any(part[row, column] for part in (found.is_low, found.is_high, found.is_dual))
            if advantage and log_ratio > -300:
                assert is_clipped == (slope == 0)


def test_gradients_are_those_of_finite_differences() -> None:
    log_ratios = torch.tensor([[-0.5, 0.05, 0.4, 1.5]] * 2, dtype=torch.float64, requires_grad=True)
    advantages, mask = torch.tensor([-1.0, 1.0], dtype=torch.float64), torch.ones(2, 4)
    assert torch.autograd.gradcheck(lambda x: dual_clip_loss(x, advantages=advantages, mask=mask).loss, log_ratios)


@pytest.mark.parametrize("size", [88.0, 1e3, 3e38, math.inf])
def test_a_ratio_of_any_size_costs_c_at_most_and_has_no_gradient(size: float) -> None:
    log_ratios = torch.full((2, 1), size, requires_grad=True)
    found = dual_clip_loss(log_ratios, advantages=torch.tensor([-2.0, 2.0]), mask=torch.ones(2, 1))
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_ratios)
    assert found.loss.flatten().tolist() == pytest.approx([6.0, -2.4])
    assert gradient.flatten().tolist() == [0, 0]
    assert found.is_dual.flatten().tolist() == [True, False]
    unbounded = dual_clip_loss(log_ratios, advantages=torch.tensor([-2.0, 2.0]), mask=torch.ones(2, 1), dual_clip=None)
    assert unbounded.loss.isfinite().all()


def test_advantages_of_sequences_and_of_tokens() -> None:
    log_ratios, mask = torch.randn(3, 3), torch.ones(3, 3)
    advantages = torch.tensor([-1.0, 0.5, 2.0])
    found = [
        dual_clip_loss(log_ratios, advantages=given, mask=mask).loss
        for given in (advantages, advantages[:, None], advantages[:, None].expand(3, 3))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for shape in ((3, 2), (1, 3), (4,), ()):
        with pytest.raises(ValueError, match="advantages have shape"):
            dual_clip_loss(log_ratios, advantages=torch.ones(shape), mask=mask)


@pytest.mark.parametrize(
    "arguments",
    [
        {"clip_low": 0.0},
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"clip_high": math.inf},
        {"dual_clip": 1.2},
        {"dual_clip": math.nan},
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name}="):
        dual_clip_loss(torch.zeros(1, 1), advantages=torch.ones(1), mask=torch.ones(1, 1), **arguments)
