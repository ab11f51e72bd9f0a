"""NumericsFinding: one thing that is wrong with the numbers of a run, with what shows it and what helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

__all__ = ["KINDS", "VERDICTS", "NumericsFinding", "Verdict"]

Verdict: TypeAlias = Literal["repeats", "nondeterministic", "transient", "scaler_overflow", "unknown"]

#: What a step that is run again says: the same each time (the data, or the code), something else each time, never
#: again (the machine), an overflow of the loss scale alone; or that it could not be run again.
VERDICTS: tuple[Verdict, ...] = ("repeats", "nondeterministic", "transient", "scaler_overflow", "unknown")

#: What is told; findings about the optimizer have kinds of their own.
KINDS: tuple[str, ...] = (
    "nonfinite_gradient",
    "nonfinite_loss",
    "nonfinite_parameter",
    "corrupt_parameter",
    "spike",
    "stuck_loss_scale",
    "slow_collective",
    "underflow",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsFinding:
    """One thing that is wrong with the numbers of a run, the same on every rank.

    Attributes:
        kind: What it is, such as "nonfinite_gradient".
        step: The optimizer step that it was seen at.
        text: One line: what, where, and why that is believed.
        remedy: What to do about it.
        verdict: What running the step again says, one of `VERDICTS`; `None` where that is not asked.
        rank: Process that it comes from; `None` if it is of none, or of all.
        host: Name of that process's machine.
        layer: Where it begins, or where it is worst.
        layers: Those concerned, at most eight, the most telling ones.
        micro_batch: Index of the micro-batch in the step, on that rank.
        evidence: Plain numbers, by name.
        optimizer_index: Position of the optimizer.

    Example:
        >>> found = NumericsFinding(kind="underflow", step=7, text="half of it is 0", remedy="raise the loss scale")
        >>> str(found)
        'step 7: half of it is 0; raise the loss scale'
        >>> NumericsFinding.from_plain(found.to_plain()) == found
        True
    """

    kind: str
    step: int
    text: str
    remedy: str = ""
    verdict: Verdict | None = None
    rank: int | None = None
    host: str | None = None
    layer: str | None = None
    layers: tuple[str, ...] = ()
    micro_batch: int | None = None
    evidence: Mapping[str, float] = dataclasses.field(default_factory=dict)
    optimizer_index: int = 0

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")

    def to_plain(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {**dataclasses.asdict(self), "layers": list(self.layers), "evidence": dict(self.evidence)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> NumericsFinding:
        """Take back what `to_plain` gave.

        Args:
            plain: That.
        """
        return cls(**{**plain, "layers": tuple(plain["layers"])})
