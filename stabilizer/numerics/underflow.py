"""How much of a gradient half precision cannot hold at a loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HALF_TYPES", "lost_elements", "lost_shares"]

#: What a gradient is held against.
HALF_TYPES = (torch.float16, torch.bfloat16)


@torch.no_grad()
def lost_elements(gradients: Sequence[Tensor | None], *, scale: Tensor | None, device: torch.device) -> Tensor:
    """Count elements that half precision would round to zero, or keep as a subnormal number with fewer digits.

    A gradient is lost where its absolute value, multiplied by the loss scale, is above 0 and under the smallest normal
    number of the type: 2^-14 in float16, 2^-126 in bfloat16 (Micikevicius et al., "Mixed precision training",
    arXiv 1710.03740, section 3.2, where 31 % of the values of one network become zero without a scale).

    Args:
        gradients: Of this rank, of any shape and dtype.
        scale: What they are multiplied by in half precision and not here, shape (); `None` for 1.
        device: Where the counts go.

    Returns:
        Shape (1 + len(HALF_TYPES),), float64: elements that are finite and not 0, then those lost in each type. No wait
        for the device.

    Example:
        >>> gradient = torch.tensor([0.0, 1e-6, 1.0])
        >>> lost_elements([gradient, None], scale=None, device=gradient.device).tolist()
        [2.0, 1.0, 0.0]
        >>> lost_elements([gradient], scale=torch.tensor(1024.0), device=gradient.device).tolist()
        [2.0, 0.0, 0.0]
    """
    counts = torch.zeros(1 + len(HALF_TYPES), dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient is None or not gradient.numel():
            continue
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        sizes = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).abs()
        # Never the product: it could be infinite.
        one = 1.0 if scale is None else scale.to(sizes.device, torch.float32)
        sizes = sizes.to(torch.float32) if sizes.dtype.itemsize < 4 else sizes
        is_there = (sizes > 0) & (sizes < torch.inf)
        lost = [(sizes < torch.finfo(dtype).tiny / one) & is_there for dtype in HALF_TYPES]
        counts += torch.stack([torch.count_nonzero(flags) for flags in (is_there, *lost)]).to(counts)
    return counts


def lost_shares(counts: Tensor) -> Tensor:
    """The same as shares of the elements that are not 0.

    Args:
        counts: Of `lost_elements`.

    Returns:
        Shape (len(HALF_TYPES),), float32; 0 where there is nothing.
    """
    return (counts[1:] / counts[0].clamp(min=1.0)).to(torch.float32)
