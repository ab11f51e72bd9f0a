"""Steps at which layers are far over what is usual for them, and which layers these are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stabilizer.health.statistics import Baseline

__all__ = ["CLASSES", "Explosions", "explosions"]

#: In the order of `Explosions`.
CLASSES = ("all", "shallow", "one", "some")

_MAX_SHARE_OUTSIDE = 0.25


class Explosions(NamedTuple):
    """What happened at some steps, by class: all layers, shallow ones, one alone, some.

    Attributes:
        counts: How many steps of each class, shape (4,).
        rows: The worst step of each class, counted from the first that was looked at; -1 if there is none; shape (4,).
        excess: ln of norm over the usual norm at that step, by class and column, shape (4, columns); NaN where there is
            none.
        is_far: Which layers are far over it there, shape (4, layers).
    """

    counts: Tensor
    rows: Tensor
    excess: Tensor
    is_far: Tensor


def explosions(
    logs: Tensor,
    usual: Baseline,
    *,
    is_shallow: Tensor,
    is_before: Tensor,
    ratio: float,
    k: float,
    together_share: float,
) -> Explosions:
    """Sort steps by which layers are far over their baselines.

    A layer is far over its baseline if ln norm is above it by the larger of ln(ratio) and k robust deviations, and
    raised if it is so by half of that. With at least one layer far, a step is of the first class that fits:

    - all: together_share of the layers are raised;
    - shallow: no layer outside the shallow ones is far and at most a quarter of them is raised; two shallow layers are
      far, or one that stands before all blocks;
    - one: one layer is far and at most a quarter of the others is raised;
    - some: anything else.

    Args:
        logs: ln norm by step and column, shape (steps, columns), NaN where there is none; the layers come first.
        usual: Of every column, shape (columns,).
        is_shallow: Of every layer, bool, shape (layers,).
        is_before: Whether a layer stands before all blocks, shape (layers,).
        ratio: Norm over usual norm.
        k: Robust deviations.
        together_share: Share of the layers.

    Returns:
        Of all steps.
    """
    num_layers = len(is_shallow)
    excess = logs - usual.median
    limit = (k * usual.sigma).clamp(min=math.log(ratio))[:num_layers]
    layers = excess[:, :num_layers]
    is_known, is_far, is_raised = ~layers.isnan(), layers > limit, layers > limit / 2
    num_known, num_far, num_raised = is_known.sum(1), is_far.sum(1), is_raised.sum(1)
    outside = ~is_shallow
    raised_outside, known_outside = (is_raised & outside).sum(1), (is_known & outside).sum(1)
    is_any = num_far > 0
    is_all = is_any & (num_known > 1) & (num_raised >= together_share * num_known)
    is_shallow_step = is_any & ~is_all & ~(is_far & outside).any(1) & (known_outside > 0)
    is_shallow_step &= raised_outside <= _MAX_SHARE_OUTSIDE * known_outside
    is_shallow_step &= (num_far > 1) | (is_far & is_before).any(1)
    is_one = is_any & ~is_all & ~is_shallow_step & (num_far == 1)
    is_one &= num_raised - 1 <= _MAX_SHARE_OUTSIDE * (num_known - 1)
    is_some = is_any & ~is_all & ~is_shallow_step & ~is_one
    classes = torch.stack([is_all, is_shallow_step, is_one, is_some])
    # The worst step of a class is that with the largest excess in any layer.
    height = layers.nan_to_num(nan=-math.inf).amax(1)
    worst = torch.where(classes, height, -math.inf).argmax(1)
    counts = classes.sum(1)
    return Explosions(
        counts=counts,
        rows=torch.where(counts > 0, worst, -1),
        excess=excess.index_select(0, worst),
        is_far=is_far.index_select(0, worst),
    )
