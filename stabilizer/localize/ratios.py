"""Importance ratios and advantages of the units, where a batch has what they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stabilizer.batches import IGNORED_LABEL
from stabilizer.localize.grid import Grid, named

__all__ = ["advantage", "log_ratios", "sequence_mask"]

_LOG_PROBS = r"(per_token_)?(action_)?log_?p(rob)?s?"
_RATIO_NAMES = ("log_(importance_)?ratios?",)
# The policy that the loss divides by, and the one that sampled where it is another. A reference policy is neither.
_BEHAVIOUR_NAMES = tuple(
    f"{policy}_(policy_)?{_LOG_PROBS}"
    for policy in ("old", "prev(ious)?", "behaviou?r", "rollout", "sampling", "generation", "inference", "vllm")
)
_CURRENT_NAMES = (f"((current|new|policy|actor)_)?{_LOG_PROBS}",)
_ADVANTAGE_NAMES = ("advantages?",)
_MASK_NAMES = ("(completion|response|action|loss)_masks?",)


def log_ratios(entries: Mapping[str, Tensor], grid: Grid, values: Tensor | None = None) -> Tensor | None:
    """Logarithms of the importance ratios, current policy over the one that sampled.

    Args:
        entries: Tensors of the batch by dotted keys: `log_ratios`, or log-probs of an earlier policy (`old_log_probs`,
            `sampling_per_token_logps`, ...). Of several the one counts that is farthest from the current policy: a loss
            may divide by any of them.
        grid: Where the units are.
        values: What the gate let through, one number a unit: the current log-probs, if they are not above 0. Without
            them, the batch's own (`log_probs`) are taken.

    Returns:
        Shape (rows, positions) or one position less, float64, on the CPU; `None` where they cannot be seen.

    Example:
        >>> batch = {"old_log_probs": torch.tensor([[-1.0, -9.0]])}
        >>> log_ratios(batch, Grid(1, 2), values=torch.tensor([-1.5, -2.0]))
        tensor([[-0.5000,  7.0000]], dtype=torch.float64)
    """
    if (given := _first(entries, _RATIO_NAMES, grid)) is not None:
        return given
    batch_own = _first(entries, _CURRENT_NAMES, grid)
    at_gate = None if values is None else _as_log_probs(values, grid)
    current = batch_own if at_gate is None else at_gate
    behaviours = _all(entries, _BEHAVIOUR_NAMES, grid)
    if not behaviours and at_gate is not None and batch_own is not None:
        behaviours = [batch_own]  # the batch was made before this forward
    if current is None or not behaviours:
        return None
    length = min(found.shape[1] for found in (current, *behaviours))
    apart = torch.stack([current[:, :length] - found[:, :length] for found in behaviours])
    # A token that the one which sampled could not score has no number there.
    farthest = apart.abs().nan_to_num(nan=-1.0, posinf=torch.inf).argmax(0, keepdim=True)
    return apart.gather(0, farthest).squeeze(0)


def sequence_mask(entries: Mapping[str, Tensor], grid: Grid) -> Tensor | None:
    """Which positions belong to what was sampled.

    Args:
        entries: Tensors of the batch by dotted keys.
        grid: Where the units are.

    Returns:
        Bool, shape (rows, positions) or one position less; `None` if nothing says so.
    """
    if (mask := _first(entries, _MASK_NAMES, grid)) is not None:
        return mask > 0
    labels = _first(entries, ("labels",), grid)
    return None if labels is None else labels != IGNORED_LABEL


def advantage(entries: Mapping[str, Tensor], grid: Grid, *, row: int, position: int | None) -> float | None:
    """Advantage of a unit: its token's, or its row's.

    Args:
        entries: Tensors of the batch by dotted keys.
        grid: Where the units are.
        row: Row of the unit.
        position: Position of the unit.
    """
    for found in named(entries, _ADVANTAGE_NAMES):
        if found.numel() == len(found) == grid.num_rows:
            return float(found.reshape(-1)[row])
        by_token = grid.fitted(found)
        if by_token is not None and position is not None and position < by_token.shape[1]:
            return float(by_token[row, position])
    return None


def _first(entries: Mapping[str, Tensor], names: tuple[str, ...], grid: Grid) -> Tensor | None:
    return next(iter(_all(entries, names, grid)), None)


def _all(entries: Mapping[str, Tensor], names: tuple[str, ...], grid: Grid) -> list[Tensor]:
    fitted = [grid.fitted(found) for found in named(entries, names)]
    return [found.detach().cpu().double() for found in fitted if found is not None]


def _as_log_probs(values: Tensor, grid: Grid) -> Tensor | None:
    if grid.num_positions is None or values.numel() != grid.num_rows * grid.num_positions:
        return None
    found = values.detach().cpu().double().reshape(grid.num_rows, grid.num_positions)
    # Anything above 0 by more than rounding is a loss or a logit.
    return found if bool((torch.nan_to_num(found, nan=-math.inf) <= 1e-3).all()) else None
