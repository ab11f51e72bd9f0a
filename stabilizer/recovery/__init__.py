"""When a run is in trouble, what is done about it, and which data it leaves out from then on."""

from __future__ import annotations

from stabilizer.recovery.conditions import LossCondition, NonfiniteCondition, Trouble
from stabilizer.recovery.ladder import Entry, Ladder
from stabilizer.recovery.positions import Span, StepPositions
from stabilizer.recovery.samples import SampleWatch
from stabilizer.recovery.skip_files import FILE_NAME, read_skip_list, write_skip_list
from stabilizer.recovery.skip_list import SkipEntry, SkipList
from stabilizer.recovery.specs import CONDITIONS, RUNGS, parsed_conditions, parsed_ladder

__all__ = [
    "CONDITIONS",
    "FILE_NAME",
    "RUNGS",
    "Entry",
    "Ladder",
    "LossCondition",
    "NonfiniteCondition",
    "SampleWatch",
    "SkipEntry",
    "SkipList",
    "Span",
    "StepPositions",
    "Trouble",
    "parsed_conditions",
    "parsed_ladder",
    "read_skip_list",
    "write_skip_list",
]
