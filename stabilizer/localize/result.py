"""What sets off a search, and what has come of it."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from stabilizer.localize.searching import LocalFinding
from stabilizer.localize.suspects import Suspect

__all__ = ["Result", "Suspicion"]


@dataclasses.dataclass(frozen=True, eq=False)
class Suspicion:
    """What sets off a search; the same on every rank.

    Attributes:
        norm: As observed, of the whole model or of one layer.
        chosen: Which units of the store make it up, shape (units,), bool.
        factor: How many times a usual norm is still normal.
        typical: A usual norm; NaN if it is not known.
    """

    norm: float
    chosen: Tensor
    factor: float
    typical: float


@dataclasses.dataclass
class Result:
    """What a search has found, on all ranks.

    Attributes:
        suspects: Local norms of all ranks and micro-batches.
        findings: Of all ranks, in the order of ranks and micro-batches; without those of closed gates.
        errors: What ranks have failed with.
        counterfactual: Norm of the step's gradient without the found units; `None` if nothing was shown.
        is_bound: Whether that is an upper bound, since a difference would have been too inexact.
        num_passes: Passes of the search.
        num_forwards: Forward passes of the search.
        num_rebuild_passes: Passes that the gradient without the units has taken.
        seconds: All of it.
        is_complete: Whether the budget has sufficed.
        is_rebuilt: Whether the step's gradient is now that without the units.
        largest: The largest norm that the ranks' own gradients can add up to, where the step's is larger still: it was
            changed after the backward pass. Nothing is searched then.
        notes: What a reader should know.
        parts: Norms of the attention and the MLP part by layer, see `part_norms`.
    """

    suspects: list[Suspect] = dataclasses.field(default_factory=list)
    findings: list[tuple[int, LocalFinding]] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    counterfactual: float | None = None
    is_bound: bool = False
    num_passes: int = 0
    num_forwards: int = 0
    num_rebuild_passes: int = 0
    seconds: float = 0.0
    is_complete: bool = True
    is_rebuilt: bool = False
    largest: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    parts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def has_tokens(self) -> bool:
        """Whether any rank has found units."""
        return any(finding.units for _, finding in self.findings)
