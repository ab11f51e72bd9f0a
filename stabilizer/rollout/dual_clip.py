"""The clipped policy loss with a second bound for negative advantages."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from stabilizer.rollout.clipped import check_limit
from stabilizer.rollout.ratios import as_bool, check_shape, importance_ratios

__all__ = ["DualClipLoss", "dual_clip_loss"]


@dataclasses.dataclass(frozen=True, eq=False)
class DualClipLoss:
    """What `dual_clip_loss` returns.

    Attributes:
        loss: Of each token, to be summed or averaged and made small, shape (B, T); 0 where the mask is 0.
        is_low: Negative advantage and a ratio under 1 - clip_low: no gradient, bool, shape (B, T).
        is_high: Positive advantage and a ratio over 1 + clip_high: no gradient.
        is_dual: Negative advantage and a ratio over `dual_clip`: no gradient.
    """

    loss: Tensor
    is_low: Tensor
    is_high: Tensor
    is_dual: Tensor


def dual_clip_loss(
    log_ratios: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> DualClipLoss:
    """PPO's clipped loss, bounded for negative advantages too.

    With r the ratio and A the advantage, PPO's loss is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), which has no
    bound where A < 0 and r grows. There it becomes min(that, -c A), with c = `dual_clip`: "Mastering Complex Control in
    MOBA Games with Deep Reinforcement Learning" (Ye et al. 2020), equation 5.

    Args:
        log_ratios: log pi_current - log pi_old (not the mismatch of two engines), with its gradient, shape (B, T).
        advantages: Of sequences or tokens, shape (B,), (B, 1) or (B, T).
        mask: Which tokens count, bool or 0 and 1, shape (B, T); what the others hold may be anything.
        clip_low: How far a ratio may fall under 1.
        clip_high: How far it may rise over 1.
        dual_clip: c, more than 1 + clip_high; None for PPO's own loss, in which a log-ratio over 80 counts as 80.

    Returns:
        The loss of each token, and where it has no gradient.

    Raises:
        ValueError: If a shape does not fit, or a number is out of range.

    Example:
        >>> log_ratios = torch.tensor([[0.0, 4.0]], requires_grad=True)
        >>> found = dual_clip_loss(log_ratios, advantages=torch.tensor([-1.0]), mask=torch.ones(1, 2))
        >>> found.loss.detach()
        tensor([[1., 3.]])
        >>> torch.autograd.grad(found.loss.sum(), log_ratios)
        (tensor([[1., 0.]]),)
    """
    check_shape(log_ratios, mask=mask)
    _check(clip_low, clip_high, dual_clip)
    is_token = as_bool(mask)
    # Chosen before anything else: 0 times the gradient of a NaN would be NaN.
    advantages = torch.where(is_token, _of_tokens(advantages, log_ratios), 0.0)
    ratios = importance_ratios(torch.where(is_token, log_ratios, 0.0))
    loss = torch.maximum(-ratios * advantages, -ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
    is_negative, exceeds = advantages < 0, ratios > (torch.inf if dual_clip is None else dual_clip)
    if dual_clip is not None:
        loss = torch.where(is_negative, torch.minimum(loss, -dual_clip * advantages), loss)
    return DualClipLoss(
        loss,
        is_low=is_negative & (ratios < 1 - clip_low),
        is_high=(advantages > 0) & (ratios > 1 + clip_high),
        is_dual=is_negative & exceeds,
    )


def _of_tokens(advantages: Tensor, log_ratios: Tensor) -> Tensor:
    num_sequences, num_tokens = log_ratios.shape
    if advantages.shape == (num_sequences,):
        advantages = advantages.unsqueeze(-1)
    if advantages.shape not in {(num_sequences, 1), (num_sequences, num_tokens)}:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}: expected ({num_sequences},), one a sequence, "
            f"or {(num_sequences, num_tokens)}, one a token"
        )
    return advantages


def _check(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    check_limit("dual_clip", dual_clip)
    if not 0 < clip_low < 1:
        raise ValueError(f"clip_low={clip_low!r}: expected a number between 0 and 1")
    if not 0 < clip_high < float("inf"):
        raise ValueError(f"clip_high={clip_high!r}: expected a positive number")
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(f"dual_clip={dual_clip!r}: expected more than 1 + clip_high = {1 + clip_high}")
