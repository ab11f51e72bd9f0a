"""What the tests of the gate share: gradients, and what they should be, without a gate."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer.gating import token_gate

__all__ = [
    "GatedModel",
    "Gradients",
    "difference",
    "gradients_of",
    "norm_of",
    "partition",
    "reference_gradients_of",
    "token_losses",
]

Gradients = list[Tensor]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy by token.

    Args:
        logits: (rows, positions, vocabulary).
        targets: (rows, positions).
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


def gradients_of(loss: Tensor, model: nn.Module) -> Gradients:
    """Of a loss, by parameter; the graph is kept.

    Args:
        loss: Shape ().
        model: Its parameters get the gradients too.
    """
    model.zero_grad()
    # Not `torch.autograd.grad`: reentrant checkpointing refuses it.
    loss.backward(retain_graph=True)
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def norm_of(gradients: Gradients) -> float:
    """Over all elements.

    Args:
        gradients: By parameter.
    """
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().item()


def difference(one: Gradients, other: Gradients) -> float:
    """Relative to the other's norm.

    Args:
        one: By parameter.
        other: By parameter.
    """
    return norm_of([a.double() - b.double() for a, b in zip(one, other, strict=True)]) / norm_of(other)


def partition(num_units: int) -> list[Tensor]:
    """Four masks; every unit is in exactly one.

    Args:
        num_units: Length of each.
    """
    generator = torch.Generator().manual_seed(1)
    owner = torch.randint(0, 4, (num_units,), generator=generator)
    return [owner == number for number in range(4)]


def reference_gradients_of(model: nn.Module, batch: tuple[Tensor, Tensor], open: Tensor) -> Gradients:  # noqa: A002
    """Without a gate: the loss terms of the open tokens alone, denominators unchanged, in float64.

    Args:
        model: Maps tokens to logits.
        batch: Tokens and targets.
        open: Which tokens count.
    """
    reference = copy.deepcopy(model).double()
    losses = token_losses(reference(batch[0]), batch[1])
    return gradients_of((losses * open.view(losses.shape)).sum() / losses.numel(), reference)


class GatedModel(nn.Module):
    """Calls `token_gate` on its token losses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map tokens to their mean loss."""
        return token_gate(token_losses(self.inner(tokens), targets)).mean()
