"""What a step's gradient is without some of its tokens: all of it in one process, from its definition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.localize_loops import Plan, Unit, batches

__all__ = ["gradient_without"]


def gradient_without(
    plan: Plan,
    step: int,
    parameters: Mapping[str, Tensor],
    *,
    make_model: Callable[[], nn.Module],
    num_ranks: int = 1,
    without: Collection[Unit] = (),
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The gradient of mean over ranks, micro-batches and tokens of (weight x cross-entropy), some terms left out.

    The denominators count the tokens that are left out too.

    Args:
        plan: Of the run.
        step: Which.
        parameters: Of the model in that step, by name.
        make_model: Makes a model with such parameters.
        num_ranks: How many ranks have taken part.
        without: Tokens whose terms are left out.
        dtype: Of all numbers.

    Returns:
        By name; zeros where nothing comes.
    """
    model = make_model().to(dtype)
    model.load_state_dict({name: value.to(dtype) for name, value in parameters.items()}, strict=True)
    num_tokens = num_ranks * plan.micro_batches * plan.rows * plan.length
    for rank in range(num_ranks):
        for at, rows in enumerate(batches(plan, rank)):
            for number, (tokens, targets, weights) in enumerate(rows if at == step else ()):
                is_left = torch.tensor(
                    [
                        [(rank, number, row, position) not in without for position in range(plan.length)]
                        for row in range(plan.rows)
                    ]
                )
                losses = F.cross_entropy(model(tokens)[is_left], targets[is_left], reduction="none")
                ((losses * weights.to(dtype)[is_left]).sum() / num_tokens).backward()
            if at == step:
                break
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
