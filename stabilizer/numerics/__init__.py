"""What broke a step: the data, the numerics or the machine."""

from __future__ import annotations

from stabilizer.numerics.finding import KINDS, VERDICTS, NumericsFinding, Verdict

__all__ = ["KINDS", "VERDICTS", "NumericsFinding", "Verdict"]
