"""Rows of an embedding: how often each gets a gradient, how large, and what Adam would do to it at the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.optimizer_health.moments import first_step

__all__ = ["NUM_DECILES", "ROW_FIGURES", "RowBook", "row_sums"]

NUM_DECILES = 10
#: What `RowBook.figures` has before the deciles.
ROW_FIGURES = ("num_rows", "num_trained", "num_silent", "usual_gradient", "largest_step")


@torch.no_grad()
def row_sums(values: Tensor, *, offset: int, num_rows: int, share: float) -> Tensor:
    """Sums of squares of every row, at its place among all rows of the embedding.

    Args:
        values: This rank's rows, shape (rows here, columns).
        offset: Number of the first of them.
        num_rows: Of the whole embedding.
        share: 1 / (number of ranks that hold these rows).

    Returns:
        Shape (num_rows,), float32; 0 for the rows of other ranks.

    Example:
        >>> row_sums(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), offset=1, num_rows=4, share=1.0)
        tensor([ 0., 25.,  0.,  0.])
    """
    found = torch.zeros(num_rows, device=values.device)
    if len(values):
        found[offset : offset + len(values)] = values.to(torch.float32).square().sum(1) * share
    return found


class RowBook:
    """What has become of the rows of one embedding, at the steps that were looked at.

    A row has been trained if it has ever been seen with a gradient or with a second moment that is not 0: a second
    moment keeps any earlier gradient, until it has decayed to an exact 0 (after about 90 / (1 - beta2) steps).

    Args:
        num_rows: Of the embedding.
        num_columns: Of the embedding.
        device: Where the numbers are.

    Attributes:
        counts: How often each row was seen with a gradient, shape (rows,), float32.
        norms: Sum of the norms of these gradients, shape (rows,), float32.
        is_trained: Shape (rows,), bool.
        num_steps: At how many steps the rows were looked at, shape (), float32.
    """

    def __init__(self, num_rows: int, num_columns: int, *, device: torch.device) -> None:
        self.num_columns = num_columns
        self.counts = torch.zeros(num_rows, device=device)
        self.norms = torch.zeros(num_rows, device=device)
        self.is_trained = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.num_steps = torch.zeros((), device=device)

    @torch.no_grad()
    def see(self, squares: Tensor, seconds: Tensor, *, is_lost: Tensor) -> None:
        """Take a step.

        Args:
            squares: Square sums of the gradient's rows over all ranks, shape (rows,).
            seconds: Sums of the second moment's rows, shape (rows,); zeros where the optimizer has none.
            is_lost: Whether the optimizer was kept from the step, shape (), bool.
        """
        is_seen = (squares > 0) & torch.isfinite(squares) & ~is_lost
        kept = torch.where(is_seen, squares, 0.0)
        self.counts += is_seen
        self.norms += kept.sqrt()
        self.is_trained |= is_seen | ((seconds > 0) & ~is_lost)
        self.num_steps += ~is_lost

    @torch.no_grad()
    def figures(
        self, seconds: Tensor, moved: Tensor, *, betas: tuple[float, float] | None, eps: float, near: float = 0.9
    ) -> Tensor:
        """What there is to say of the rows now.

        Args:
            seconds: Sums of the second moment's rows, shape (rows,).
            moved: Sums of squares of the step's updates in learning rates, shape (rows,).
            betas: Of Adam; `None` for other optimizers, whose rows are never silent.
            eps: Of Adam.
            near: A row is silent if a gradient of the usual size would move it by at least this share of
                `first_step`.

        Returns:
            `ROW_FIGURES` (rows in all; trained; silent; the usual RMS of an element of a row's gradient; the largest
            RMS of a row's update in this step, in learning rates), then of each tenth of the rows, the rarest first,
            the mean count, and then of each the mean sum of norms. Shape (5 + 20,), float32.
        """
        usual = self.usual_gradients()
        is_silent = torch.zeros_like(self.is_trained)
        if betas is not None:
            ahead = self.next_steps(seconds, usual, betas=betas, eps=eps)
            is_silent = self.is_trained & (ahead >= near * first_step(*betas)) & (usual > 0)
        largest = (moved / self.num_columns).max().sqrt()
        num_rows = torch.full_like(largest, len(self.counts))
        parts = torch.stack([num_rows, self.is_trained.sum(), is_silent.sum(), usual.mean(), largest])
        order = self.counts.argsort(stable=True)
        tenths = [
            torch.stack([piece.mean() for piece in values[order].tensor_split(NUM_DECILES)])
            for values in (self.counts, self.norms)
        ]
        return torch.cat([parts, *tenths]).nan_to_num(nan=0.0)

    def usual_gradients(self) -> Tensor:
        """RMS of an element of each row's gradient when it has one, shape (rows,): its mean so far, or that of all.

        Rare rows have smaller ones than frequent rows, which are there many times in a batch.
        """
        means: Tensor = self.norms / self.counts.clamp(min=1.0)
        overall = means.sum() / (self.counts > 0).sum().clamp(min=1)
        found: Tensor = torch.where(self.counts > 0, means, overall) / self.num_columns**0.5
        return found

    def next_steps(self, seconds: Tensor, gradient: Tensor, *, betas: tuple[float, float], eps: float) -> Tensor:
        """How far the next gradient would move each row, if its first moment has decayed.

        Args:
            seconds: Sums of the second moment's rows, shape (rows,).
            gradient: RMS of an element of that gradient, shape (rows,).
            betas: Of Adam.
            eps: Of Adam.

        Returns:
            In learning rates, shape (rows,).
        """
        beta1, beta2 = betas
        second = beta2 * seconds / self.num_columns + (1 - beta2) * gradient.square()
        steps: Tensor = (1 - beta1) * gradient / (second.sqrt() + max(eps, 1e-30))
        return steps

    def state_dict(self) -> dict[str, Any]:
        """CPU clones."""
        named = {"counts": self.counts, "norms": self.norms, "is_trained": self.is_trained}
        named["num_steps"] = self.num_steps
        return {name: value.cpu().clone() for name, value in named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state; one of another number of rows is left out.

        Args:
            state: What `state_dict` gave.
        """
        if len(state["counts"]) != len(self.counts):
            return
        for name in ("counts", "norms", "is_trained", "num_steps"):
            getattr(self, name).copy_(state[name])
