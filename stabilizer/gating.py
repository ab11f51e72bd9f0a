"""Where a loss says itself what its tokens are: the gate of the search that is under way, if one is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from stabilizer.gate import Gate
from stabilizer.localize.masking import check_dims

__all__ = ["gate_together", "gating", "token_gate"]

_active: Gate | None = None


def token_gate(x: Tensor, *, dims: int | None = None) -> Tensor:
    """Mark a tensor of per-token (or per-sample) terms, so that a search can tell whose gradient is whose.

    Call it on per-token losses or log-probabilities just before they are summed up, in a model whose logits a search
    does not find. While nothing is searched it returns its argument: no copy, nothing kept, no graph break.

    Args:
        x: Its leading dimensions are the units: (rows, positions, ...) for tokens, (rows, ...) for samples.
        dims: How many dimensions are units, where it is not two (one, if there is only one).

    Returns:
        `x`.

    Raises:
        ValueError: If `x` has fewer dimensions.

    Example:
        >>> token_losses = torch.rand(2, 5, requires_grad=True)
        >>> token_gate(token_losses) is token_losses
        True
    """
    if dims is None:
        dims = 2 if x.dim() >= 2 else 1
    check_dims(x, dims)
    # A plain global: checkpointed parts are computed again on autograd's own threads.
    return x if _active is None else _active.apply(x, dims=dims, by_hand=True)


def gate_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark tensors that say something of the same tokens, so that a search opens and closes a token in all of them.

    Args:
        tensors: Of one shape and dtype, one number a token; the first are log-probabilities, or losses.

    Returns:
        The tensors themselves while nothing is searched, else copies.

    Example:
        >>> log_probs, entropies = torch.zeros(2, 5), torch.ones(2, 5)
        >>> gate_together(log_probs, entropies)[0] is log_probs
        True
    """
    if _active is None:
        return tensors
    first = tensors[0]
    stacked = torch.stack(tensors, dim=-1)
    return _active.apply(stacked, dims=first.dim(), by_hand=True, values=first).unbind(-1)


@contextlib.contextmanager
def gating(gate: Gate) -> Iterator[None]:
    """Have `token_gate` use a gate.

    Args:
        gate: For one forward pass and the backward passes after it; both belong inside, for what reentrant
            checkpointing computes again calls `token_gate` again.

    Yields:
        Nothing.

    Example:
        >>> losses = torch.rand(2, 5, requires_grad=True)
        >>> with gating(Gate()) as _, torch.enable_grad():
        ...     token_gate(losses) is losses
        False
    """
    global _active
    before, _active = _active, gate
    try:
        yield
    finally:
        _active = before
