"""The one table of all figures: benchmarks/README.md, and the rows of it that README.md quotes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.jobs import Outcome
from benchmarks.reports import number
from benchmarks.timing import Figure

__all__ = ["COSTS", "MARKS", "QUOTED", "costs", "described", "replace_between", "table"]

#: Around the table of benchmarks/README.md, and around what README.md quotes of it.
MARKS = ("<!-- benchmarks:start -->", "<!-- benchmarks:end -->")
COSTS = ("<!-- costs:start -->", "<!-- costs:end -->")
_HEAD = ("benchmark", "what", "against", "figure", "limit", "how it was measured")
#: What README.md quotes: how a row of the table begins (its first three cells) -> what README.md calls it.
QUOTED: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("gradient_statistics", "all statistics of a step", "torch._foreach_norm"): (
        "all statistics of a step, 124 M parameters in float32",
        "`torch._foreach_norm` of the same gradients",
    ),
    ("gradient_statistics", "all statistics of a step", "clip_grad_norm_ (nothing to clip)"): (
        "",
        "`clip_grad_norm_` with nothing to clip",
    ),
    ("gradient_statistics", "GradNormCallback, whole", "clip_grad_norm_ (nothing to clip)"): (
        "the whole `GradNormCallback`, defaults",
        "`clip_grad_norm_` with nothing to clip",
    ),
    ("gradient_statistics", "index, store and first measurement", "first clip_grad_norm_"): (
        "first step with 2,000 DTensor parameters, two processes",
        "the first `clip_grad_norm_` of them",
    ),
    ("gradient_statistics", "import stabilizer", "import torch"): ("`import stabilizer`", "`import torch`"),
    ("gradient_statistics", "FSDP2 step with the default suite", "without"): (
        "an FSDP2 step with the default suite, small GPT, two CPU processes",
        "the step without it",
    ),
    ("gradient_statistics", "DDP step with the default suite", "without"): ("a DDP step, likewise", "likewise"),
    ("gradient_statistics", "GPU: quiet step with GradNormCallback", "without"): (
        "a quiet step on a GPU, bf16",
        "the step without it",
    ),
    ("clipping", "LayerClip and AdaptiveClip, whole step, nothing clipped", "clip_grad_norm_"): (
        "`LayerClipCallback` and `AdaptiveClipThreshold` with all statistics, 124 M parameters, nothing clipped",
        "`clip_grad_norm_` with nothing to clip",
    ),
    ("clipping", "LayerClip and AdaptiveClip, whole step, everything clipped", "clip_grad_norm_"): (
        "the same, everything clipped",
        "`clip_grad_norm_` that clips",
    ),
    ("clipping", "FSDP2: LayerClip and AdaptiveClip, whole step, nothing clipped", "clip_grad_norm_"): (
        "the same two under FSDP2, two processes: nothing clipped",
        "likewise",
    ),
    ("clipping", "FSDP2: LayerClip and AdaptiveClip, whole step, everything clipped", "clip_grad_norm_"): (
        "everything clipped",
        "likewise",
    ),
}


def table(outcomes: Sequence[Outcome]) -> str:
    """All figures in Markdown; a benchmark that failed is a row that says so.

    Args:
        outcomes: Of the jobs, in the order of the table.

    Returns:
        A table with a row for each figure. A figure over its limit is bold.
    """
    rows = [_HEAD, ("---", "---", "---", "--:", "--:", "---")]
    for outcome in outcomes:
        benchmark = outcome.job.benchmark
        if outcome.error is not None:
            rows.append((benchmark, outcome.job.row or "all", "", "**failed**", "", outcome.error))
        rows += [(benchmark, *_cells(figure)) for figure in outcome.figures]
    return "\n".join(_line(row) for row in rows)


def described(
    environment: Mapping[str, Any], *, day: datetime.date, seconds: float, warning: str | None, is_quick: bool = False
) -> str:
    """What stands above the table: when, with what and on what it was measured.

    Args:
        environment: As `benchmarks.reports.environment` gives it.
        day: Of the run.
        seconds: The whole run took.
        warning: That the machine had other work to do, if it had.
        is_quick: Whether no third run was made where two did not agree.

    Returns:
        One or two paragraphs.
    """
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    cores, threads = environment["num_cores"], environment["num_threads"]
    lines = [
        (
            f"One run of {seconds / 60:.0f} minutes on {day.isoformat()}: {versions}, Python {environment['python']}; "
            f"{environment['processor']}, {cores} cores, {environment['system']}; {threads} thread(s) "
            "in a single process, one in each of two. Times are ratios of medians within one run. Bold: over its limit."
        )
    ]
    if is_quick:
        lines.append("A quick run: where two runs in turn did not agree, no third one was made.")
    if environment["is_tiny"]:
        lines.append("**Tiny sizes: these figures mean nothing.**")
    if warning is not None:
        lines.append(f"**{warning[0].upper()}{warning[1:]}.**")
    return "\n\n".join(lines)


def costs(page: str) -> str:
    """The rows that README.md quotes.

    Args:
        page: benchmarks/README.md, with its table.

    Returns:
        A small table of them; what the page does not have is "not measured".
    """
    measured = {cells[:3]: cells[3:5] for cells in map(_read, page.splitlines()) if len(cells) == len(_HEAD)}
    rows = [("", "against", "ratio", "limit"), ("---", "---", "--:", "--:")]
    for key, names in QUOTED.items():
        rows.append((*names, *measured.get(key, ("not measured", ""))))
    return "\n".join(_line(row) for row in rows)


def replace_between(text: str, marks: tuple[str, str], new: str) -> str:
    r"""Put something between two marks of a page.

    Args:
        text: The page.
        marks: The two.
        new: What goes between them.

    Returns:
        The page with it.

    Raises:
        ValueError: The page does not have each mark once, in this order.

    Example:
        >>> replace_between("a <x> old <y> b", ("<x>", "<y>"), "new")
        'a <x>\n\nnew\n\n<y> b'
    """
    start, end = marks
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    if text.count(start) != 1 or rest.count(end) != 1 or text.count(end) != 1:
        raise ValueError(f"the page must hold {start} and, after it, {end} once each: the table goes between them.")
    return f"{before}{start}\n\n{new}\n\n{end}{after}"


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    """What, against, figure, limit and how."""
    what, _, against = figure.what.partition(" / ")
    value = "not measured" if figure.value is None else number(figure.value, figure.unit)
    if figure.is_met is False:
        value = f"**{value}**"
    limit = "" if figure.target is None else number(figure.target, figure.unit)
    return what, against, value, limit, figure.how


def _line(cells: Sequence[str]) -> str:
    # A bar in a cell would begin the next one.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _read(line: str) -> tuple[str, ...]:
    """The cells of a line of a table; nothing for any other line."""
    if not line.startswith("| "):
        return ()
    cells = line.strip("|").replace("\\|", "\0").split("|")
    return tuple(cell.replace("\0", "|").strip() for cell in cells)
