"""Faults that are put into a training on purpose, to see whether the alarms ring."""

from __future__ import annotations

from stabilizer.faults.fault import KINDS, Fault, FaultSpec, parse_faults

__all__ = ["KINDS", "Fault", "FaultSpec", "parse_faults"]
