"""Importance ratios between the policy in training and the one that generated, as logarithms from raw log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "MAX_LOG_RATIO",
    "as_bool",
    "check_shape",
    "importance_ratios",
    "sequence_log_ratios_mean",
    "sequence_log_ratios_sum",
    "token_log_ratios",
]

#: Where `importance_ratios` stops: exp(80) is 5.5e34, and float32 ends at 3.4e38.
MAX_LOG_RATIO = 80.0


def token_log_ratios(logp_train: Tensor, *, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """The difference log pi_train - log pi_rollout of every token: positive where training finds the token likelier.

    Nothing is clamped. The gradient flows into whichever of the two log-probs wants one.

    Args:
        logp_train: Log-probs of the sampled tokens under the policy in training, shape (B, T). For the mismatch between
            two engines these come from the weights that generated; for off-policy drift from the current ones.
        logp_rollout: The same under the policy that generated, as it was sampled from, shape (B, T).
        mask: Which tokens count (of the completion, not of tools), bool or 0 and 1, shape (B, T).

    Returns:
        Shape (B, T), float32 at least; 0 where the mask is 0, whatever stands there, and with no gradient.

    Raises:
        ValueError: If the shapes differ or are not (B, T).

    Example:
        >>> train, rollout = torch.tensor([[-0.5, -1.0, torch.nan]]), torch.tensor([[-0.7, -1.0, -3.0]])
        >>> token_log_ratios(train, logp_rollout=rollout, mask=torch.tensor([[1, 1, 0]]))
        tensor([[0.2000, 0.0000, 0.0000]])
    """
    check_shape(logp_train, logp_rollout=logp_rollout, mask=mask)
    return torch.where(as_bool(mask), _at_least_float32(logp_train) - _at_least_float32(logp_rollout), 0.0)


def sequence_log_ratios_sum(log_ratios: Tensor, *, mask: Tensor) -> Tensor:
    """Logarithm of the product of a sequence's token ratios: the ratio of its probabilities.

    Its spread grows with the length; compare `sequence_log_ratios_mean`.

    Args:
        log_ratios: Of tokens, shape (B, T).
        mask: Which tokens count, shape (B, T).

    Returns:
        Shape (B,); 0 for a sequence without tokens.

    Raises:
        ValueError: If the shapes differ or are not (B, T).

    Example:
        >>> sequence_log_ratios_sum(torch.tensor([[0.25, 0.5, 9.0]]), mask=torch.tensor([[1, 1, 0]]))
        tensor([0.7500])
    """
    check_shape(log_ratios, mask=mask)
    return torch.where(as_bool(mask), log_ratios, 0.0).sum(-1)


def sequence_log_ratios_mean(log_ratios: Tensor, *, mask: Tensor) -> Tensor:
    """Logarithm of the geometric mean of a sequence's token ratios, as in GSPO (Zheng et al. 2025, equation 7).

    Args:
        log_ratios: Of tokens, shape (B, T).
        mask: Which tokens count, shape (B, T).

    Returns:
        Shape (B,); 0 for a sequence without tokens.

    Raises:
        ValueError: If the shapes differ or are not (B, T).

    Example:
        >>> sequence_log_ratios_mean(torch.tensor([[0.25, 0.5, 9.0]]), mask=torch.tensor([[1, 1, 0]]))
        tensor([0.3750])
    """
    return sequence_log_ratios_sum(log_ratios, mask=mask) / as_bool(mask).sum(-1).clamp(min=1)


def importance_ratios(log_ratios: Tensor, *, max_log_ratio: float = MAX_LOG_RATIO) -> Tensor:
    """The ratios themselves, held below what the type can represent.

    Args:
        log_ratios: Of tokens or of sequences, any shape.
        max_log_ratio: A larger logarithm counts as this one, and gets no gradient. There is no limit below, where a
            ratio fades to 0.

    Returns:
        Same shape.

    Example:
        >>> importance_ratios(torch.tensor([0.0, -200.0, 200.0]))
        tensor([1.0000e+00, 0.0000e+00, 5.5406e+34])
    """
    return log_ratios.clamp(max=max_log_ratio).exp()


def as_bool(mask: Tensor) -> Tensor:
    """A mask of 0 and 1 as one of truth values.

    Args:
        mask: Bool, or numbers.

    Returns:
        Same shape, bool.

    Example:
        >>> as_bool(torch.tensor([1.0, 0.0]))
        tensor([ True, False])
    """
    return mask if mask.dtype == torch.bool else mask != 0


def check_shape(first: Tensor, **others: Tensor) -> None:
    """Refuse what broadcasting would make something else of.

    Args:
        first: What the others are compared with.
        others: By their names in the message.

    Raises:
        ValueError: If the first is not (B, T), or another has not its shape.

    Example:
        >>> check_shape(torch.zeros(2, 3), mask=torch.zeros(2, 1))
        Traceback (most recent call last):
        ValueError: mask has shape (2, 1): expected (2, 3), one value for each token
    """
    if first.ndim != 2:
        raise ValueError(
            f"log-probs or log-ratios have shape {tuple(first.shape)}: expected (B, T), one row a sequence"
        )
    for name, other in others.items():
        if other.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(other.shape)}: expected {tuple(first.shape)}, one value for each token"
            )


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
