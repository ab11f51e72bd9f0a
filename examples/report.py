"""What the demo prints: lines that can be copied, and what a run did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, NormHistory

__all__ = ["loss_line", "report", "say"]


def say(text: str) -> None:
    """Print lines that nothing wraps or colours, so that they can be copied.

    Args:
        text: The lines.
    """
    Console().print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


def report(grad_norm: GradNormCallback, loss_mean_var: LossMeanVarCallback, *, losses: Sequence[float]) -> None:
    """Print what a run did.

    Args:
        grad_norm: The callback, after the run.
        loss_mean_var: The callback, after the run.
        losses: Loss of every step, in nats per byte.
    """
    try:
        Console().print(_norm_table(grad_norm.norm_history()))
    except ValueError as error:
        # Switched off by STABILIZER_DISABLE: the training itself is still worth a report.
        say(f"no gradient norms: {error}")
    last = losses[-10:]
    say(f"loss {losses[0]:.2f} -> {sum(last) / len(last):.2f} nats per byte (mean of the last {len(last)} steps)")
    if line := loss_line(loss_mean_var.statistics(), windows=loss_mean_var.windows, num_steps=len(losses)):
        say(line)


def loss_line(statistics: Mapping[str, float], *, windows: Sequence[int], num_steps: int) -> str:
    """What the windows of the loss hold, in words; no words where they hold too little.

    Args:
        statistics: Of `LossMeanVarCallback.statistics`.
        windows: Their lengths, in steps.
        num_steps: Length of the run, in steps.

    Example:
        >>> found = {"mean_100": 2.5, "std_100": 0.1, "slope_1000": -0.004, "slope_error_1000": 0.0003}
        >>> loss_line(found, windows=(100, 1000), num_steps=200)
        'all ranks: mean 2.500, std 0.100 (last 100 steps); slope -0.40 +- 0.03 per 100 steps (last 200 steps)'
    """
    short, long = windows[0], windows[-1]
    names = (f"mean_{short}", f"std_{short}", f"slope_{long}", f"slope_error_{long}")
    mean, std, slope, error = (statistics.get(name, math.nan) for name in names)
    parts = []
    if math.isfinite(mean) and math.isfinite(std):
        parts.append(f"mean {mean:.3f}, std {std:.3f} (last {min(short, num_steps)} steps)")
    if math.isfinite(slope) and math.isfinite(error):
        span = f"(last {min(long, num_steps)} steps)"
        parts.append(f"slope {100 * slope:.2f} +- {100 * error:.2f} per 100 steps {span}")
    return f"all ranks: {'; '.join(parts)}" if parts else ""


def _norm_table(history: NormHistory) -> Table:
    table = Table(title=f"Gradient norms of {len(history.steps)} steps")
    table.add_column("layer", overflow="fold")
    for column in ("now", "median", "largest", "at step"):
        table.add_column(column, justify="right")
    largest, rows = history.norms.max(dim=0)
    columns = zip(
        history.layer_names, history.norms[-1], history.norms.median(dim=0).values, largest, rows, strict=True
    )
    for name, now, median, high, row in columns:
        table.add_row(name, f"{now:.4f}", f"{median:.4f}", f"{high:.4f}", str(history.steps[int(row)]))
    return table
