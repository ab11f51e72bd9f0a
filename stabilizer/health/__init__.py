"""What the gradient norms of the layers say of a run: statistics on the device, findings in words on the host.

`HealthHistory` keeps the last steps, `examine` makes numbers of them, and `describe` says what the numbers mean.
"""

from stabilizer.health.examining import Examiner, examine, reading_shapes
from stabilizer.health.findings import KINDS, SEVERITIES, Finding, FindingLog
from stabilizer.health.history import HealthHistory, Row
from stabilizer.health.layout import Layout, make_layout
from stabilizer.health.limits import Limits
from stabilizer.health.wording import Reading, describe

__all__ = [
    "KINDS",
    "SEVERITIES",
    "Examiner",
    "Finding",
    "FindingLog",
    "HealthHistory",
    "Layout",
    "Limits",
    "Reading",
    "Row",
    "describe",
    "examine",
    "make_layout",
    "reading_shapes",
]
