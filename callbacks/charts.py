"""Charts of TensorBoard's Custom Scalars page: what a callback shows there, and how all of them are laid out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from stabilizer import tags

__all__ = [
    "PAGES",
    "Chart",
    "ChartPage",
    "Layout",
    "SharedTitle",
    "alarm_chart",
    "checkpoint_charts",
    "incident_chart",
    "layout_of",
    "skip_chart",
]

#: Page -> title of a chart -> what TensorBoard's `add_custom_scalars` takes for it.
Layout: TypeAlias = dict[str, dict[str, list[Any]]]


class ChartPage:
    """Names of the pages."""

    NORMS = "Norms"
    CLIPPING = "Clipping"
    WINDOWS = "Noise & loss windows"
    ALARMS = "Alarms"
    UPDATES = "Updates & optimizer"
    POLICY = "Rollout & policy"


class SharedTitle:
    """Titles of charts in which several callbacks have lines."""

    LAYER_NORMS = "Norm by layer, before clipping: watch for a line that leaves the others"
    TOTAL_NORM = "Total norm, before and after clipping, with its threshold: watch for peaks over it"
    RATES = "Share of the last steps that were clipped: should stay near 0"


#: In the order in which they are shown; pages of a user's own come after them.
PAGES = (
    ChartPage.NORMS,
    ChartPage.CLIPPING,
    ChartPage.WINDOWS,
    ChartPage.ALARMS,
    ChartPage.UPDATES,
    ChartPage.POLICY,
)


@dataclasses.dataclass(frozen=True)
class Chart:
    r"""One chart, of lines or of one line in a band. Charts of one page and title are one, with the lines of all.

    Attributes:
        page: One of `PAGES`, or a name of your own.
        title: What to look for, in few words.
        lines: Regular expressions of tags, without the prefixes of callback and optimizer. Each matches from the
            beginning of a tag to its end, so that "loss/mean" is this tag alone.
        band: Three tags, no patterns: of a value, of the lower and of the upper edge around it. All three must be
            logged at the same steps, or TensorBoard draws none of them.

    Raises:
        ValueError: If there are both lines and a band, or neither, or the band is not three tags.

    Example:
        >>> Chart("Norms", "Norm by layer", lines=("grad_norm/layer/.*",)).band
        ()
    """

    page: str
    title: str
    lines: tuple[str, ...] = ()
    band: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.lines) == bool(self.band):
            raise ValueError(f"chart {self.title!r}: expected lines= or band=, got {self.lines!r} and {self.band!r}")
        if self.band and len(self.band) != 3:
            raise ValueError(f"chart {self.title!r}: band={self.band!r}: expected value, lower and upper edge")


def alarm_chart() -> Chart:
    """Of a callback that has alarms."""
    title = "Alarms of loss and rollouts, by kind: every point is one"
    return Chart(ChartPage.ALARMS, title, lines=(f"{tags.ALARM}/.*",))


def incident_chart(tag: str) -> Chart:
    """Of a callback that writes incidents.

    Args:
        tag: Of their number.
    """
    return Chart(ChartPage.ALARMS, "Incidents so far: empty while all is well", lines=(tag,))


def skip_chart() -> Chart:
    """Of a callback that may skip steps."""
    title = "Skipped steps, in all and in a row: every rise is a step without an update"
    return Chart(ChartPage.CLIPPING, title, lines=(f"{tags.SKIP_COUNT.partition('/')[0]}/.*",))


def checkpoint_charts() -> list[Chart]:
    """Of a callback that verifies checkpoints and goes back to them."""
    rungs = "Recovery: 1 alarm, 2 skip, 3 lower learning rate, 4 roll back, 5 stop; empty while all is well"
    verdicts = "Checkpoints that were verified: none should be bad"
    return [
        Chart(ChartPage.ALARMS, rungs, lines=(tags.RECOVERY_RUNG,)),
        Chart(ChartPage.ALARMS, verdicts, lines=(tags.CHECKPOINT_GOOD, tags.CHECKPOINT_BAD)),
    ]


def layout_of(named: Iterable[tuple[str, Sequence[Chart]]], *, num_optimizers: int = 1) -> Layout:
    r"""Lay out the charts of all callbacks.

    Args:
        named: Names of callbacks, possibly empty, and their charts.
        num_optimizers: How many there are: every one of them has bands of its own; its lines are beside the others'.

    Returns:
        Pages in the order of `PAGES`.

    Example:
        >>> charts = [Chart("Norms", "Total", lines=("grad_norm/total(_after)?",))]
        >>> layout_of([("", charts)])
        {'Norms': {'Total': ['Multiline', ['^(opt\\d+/)?grad_norm/total(_after)?$']]}}
    """
    found: Layout = {}
    bands: list[tuple[str, str, list[str]]] = []
    for name, chart in [(name, chart) for name, charts in named for chart in charts]:
        title = f"{chart.title} ({name})" if name else chart.title
        start = (f"^{re.escape(name)}/" if name else "^") + r"(opt\d+/)?"
        if chart.lines:
            lines = found.setdefault(chart.page, {}).setdefault(title, ["Multiline", []])[1]
            lines += [line for line in (f"{start}{line}$" for line in chart.lines) if line not in lines]
        for number in range(num_optimizers if chart.band else 0):
            ending = f", optimizer {number}" if num_optimizers > 1 else ""
            bands.append((chart.page, title + ending, [tags.prefix(name, number) + tag for tag in chart.band]))
    # TensorBoard shows the lines of a page first and then its bands, the last one before the others.
    for page, title, band in reversed(bands):
        found.setdefault(page, {})[title] = ["Margin", band]
    known = [page for page in PAGES if page in found]
    return {page: found[page] for page in [*known, *(page for page in found if page not in known)]}
