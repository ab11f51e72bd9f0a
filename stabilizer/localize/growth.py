"""Where a gradient grows on its way down through the blocks: one row in one block, far over what the others do."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Growth", "grown"]

# A healthy block's gain differs by a factor of 2.2 at most between rows, 3.6 where one token makes all of a row's
# gradient (random transformers of large and of usual weights); where there is one row, it differs more between blocks.
_OVER_OTHER_ROWS = 10.0
_OVER_OTHER_BLOCKS = 30.0
# A position has grown too if it is that much over the block's usual gain; what is under the other was not touched.
_GROWN, _UNTOUCHED = 10.0, 4.0
# How near to the largest gradient of the row the last grown position has to be, to be the cause.
_NEAR = 0.2


class Growth(NamedTuple):
    """What `grown` returns: where, and how many times more the gradient grew there than elsewhere."""

    block: int
    row: int
    position: int
    factor: float


@torch.no_grad()
def grown(below: Tensor, above: Tensor) -> Growth | None:
    """The block and the position whose Jacobian makes a gradient grow.

    A block's gain is the norm of a row's gradient below the block over that above it. It cannot exceed the norm of the
    block's Jacobian, whatever the gradient: a large gradient that comes from above changes it little, and so does the
    spreading of a gradient over the positions by attention. Where it is far over what it is in other rows, something in
    the block amplifies. A single row is compared with the gains of the other blocks (and of its own positions, in the
    first block).

    Args:
        below: Norms of the gradient of each block's input, shape (blocks, rows, positions).
        above: Those of its output, same shape.

    Returns:
        The largest growth; `None` where nothing stands out. Rows whose gradient is zero or not finite are left out.

    Example:
        >>> above = torch.ones(2, 3, 4)
        >>> below = torch.ones(2, 3, 4)
        >>> below[1, 2, 3] = 1e4
        >>> grown(below, above)
        Growth(block=1, row=2, position=3, factor=5000.0...)
    """
    below, above = below.double(), above.double()
    gains = (torch.linalg.vector_norm(below, dim=-1) / torch.linalg.vector_norm(above, dim=-1)).log()
    gains = torch.where(torch.isfinite(gains), gains, torch.nan)
    usual = _usual_in_other_rows(gains)
    limit = _OVER_OTHER_ROWS
    if gains.shape[1] == 1:
        usual, limit = _usual_of_one_row(gains, below, above), _OVER_OTHER_BLOCKS
    excess = torch.nan_to_num(gains - usual, nan=-torch.inf)
    block, row = divmod(int(excess.argmax()), gains.shape[1])
    if not float(excess[block, row]) > math.log(limit):
        return None
    position = _position(below[block, row], above[block, row], usual=float(usual[block, row].exp()))
    return Growth(block, row, position, float(excess[block, row].exp()))


def _usual_in_other_rows(gains: Tensor) -> Tensor:
    """Median over all rows but one, for each of them, in logs."""
    num_rows = gains.shape[1]
    others = gains.unsqueeze(1).expand(-1, num_rows, -1).clone()
    others.diagonal(dim1=1, dim2=2).fill_(torch.nan)
    return others.nanmedian(dim=-1).values


def _usual_of_one_row(gains: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """What other blocks show, in logs; of the first block also what its least moved positions show."""
    usual = _usual_in_other_rows(gains.T).T.nan_to_num(nan=0.0)
    # The first one may be steep for good, where embeddings are small. A position without a gradient above has one
    # below, from others.
    level = above[0].square().mean(-1, keepdim=True).sqrt()
    by_position = (below[0] / torch.maximum(above[0], level)).log()
    least = torch.where(torch.isfinite(by_position), by_position, torch.nan).nanquantile(0.25, dim=-1)
    usual[0] = torch.maximum(usual[0], least)
    return usual


def _position(below: Tensor, above: Tensor, *, usual: float) -> int:
    """The position of a row that the growth comes from.

    That with the largest gradient, as a rule. Causal attention spreads a gradient to earlier positions, which may end
    up larger where attention is strong; then no later one has grown.
    """
    peak = int(below.argmax())
    level = above.square().mean().sqrt()
    gains = below / torch.maximum(above, level) / usual
    last = int((gains > _GROWN).nonzero().max()) if bool((gains > _GROWN).any()) else peak
    is_clean = last + 1 < len(gains) and bool((gains[last + 1 :] < _UNTOUCHED).all())
    return last if last > peak and is_clean and below[last] >= _NEAR * below[peak] else peak
