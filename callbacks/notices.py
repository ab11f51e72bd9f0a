"""Notices of what callbacks find: what happened, where, what to do next, and where more is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stabilizer import tags
from stabilizer.callbacks.alarms import Alarm
from stabilizer.checkpoints.guard_file import Guard
from stabilizer.early_warning import WarningSign
from stabilizer.faults import Fault
from stabilizer.health import Finding
from stabilizer.notices import Notice
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.recovery.ladder import Entry

__all__ = [
    "BAD_CHECKPOINT",
    "BAD_CHECKPOINT_ADVICE",
    "GOOD_CHECKPOINT",
    "ROLLBACK",
    "alarm_notice",
    "checkpoint_notice",
    "drill_notice",
    "entry_notice",
    "finding_notice",
    "logged",
    "numerics_notice",
    "spike_notice",
    "warning_notice",
]

# Kinds that the summary of a run has rows of its own for.
GOOD_CHECKPOINT, BAD_CHECKPOINT, ROLLBACK = "good checkpoint", "bad checkpoint", "rollback"
BAD_CHECKPOINT_ADVICE = (
    "It is marked and counts for nothing; the good ones before it stay. Resume from last_good_checkpoint(folder); if "
    "parameters are not finite, stop this run: it trains on nothing"
)
_NUM_LAYERS = 3


def logged(context: Any, tag: str) -> str:
    """Where in the logs more is; empty where nothing is logged into a folder.

    Args:
        context: Of the step, a `StepContext`.
        tag: Of the text or the number.
    """
    folder = context.log_dir() if context.is_logging else Path(".")
    return "" if folder == Path(".") else f"{tag} in {folder}"


def alarm_notice(alarm: Alarm, source: str, *, more: str = "") -> Notice:
    """Of an alarm.

    Args:
        alarm: It.
        source: Key of the callback.
        more: Where more is.
    """
    batch, rank = getattr(alarm, "batch_index", -1), getattr(alarm, "rank", -1)
    places = [f"{name} {number}" for name, number in (("batch", batch), ("rank", rank)) if number >= 0]
    what = alarm.text.partition(": ")[2] or alarm.text
    return Notice(
        kind=alarm.title,
        step=alarm.step,
        text=f"{source}: {alarm.text}",
        what=what.removesuffix(f". {alarm.advice}"),
        where=", ".join(places),
        advice=alarm.advice,
        more=more,
        source=source,
        severity="warning" if alarm.is_warning else "alarm",
        count=getattr(alarm, "count", 1),
        optimizer_index=alarm.optimizer_index,
    )


def numerics_notice(finding: NumericsFinding, source: str, *, folder: Path | None) -> Notice:
    """Of something wrong with the numbers of a run.

    Args:
        finding: It.
        source: Key of the callback.
        folder: Of its report; `None` where there is none.
    """
    number = f"optimizer {finding.optimizer_index}: " if finding.optimizer_index else ""
    known = (("rank", finding.rank), ("host", finding.host), ("micro-batch", finding.micro_batch))
    places = [f"{name} {value}" for name, value in known if value is not None]
    places += [finding.layer] if finding.layer is not None else []
    return Notice(
        kind=_in_words(finding.kind),
        step=finding.step,
        text=f"{number}{finding.kind}: {finding}",
        what=finding.text,
        where=", ".join(places),
        advice=finding.remedy,
        more="" if folder is None else str(folder),
        source=source,
        optimizer_index=finding.optimizer_index,
    )


def finding_notice(finding: Finding, source: str, *, optimizer_index: int, more: str = "") -> Notice:
    """Of something that the norms of a run say.

    Args:
        finding: It.
        source: Key of the callback.
        optimizer_index: Position of the optimizer.
        more: Where more is.
    """
    number = f"optimizer {optimizer_index}: " if optimizer_index else ""
    layers = finding.layers[:_NUM_LAYERS]
    rest = f" and {len(finding.layers) - len(layers)} more" if len(finding.layers) > len(layers) else ""
    return Notice(
        kind=_in_words(finding.kind),
        step=finding.step,
        text=f"{number}{finding.kind} ({finding.severity}): {finding.text}",
        what=finding.text,
        where=", ".join(layers) + rest,
        more=more,
        source=source,
        severity=finding.severity if finding.severity == "alarm" else "warning",
        optimizer_index=optimizer_index,
    )


def entry_notice(entry: Entry, source: str) -> Notice:
    """Of what recovery has done.

    Args:
        entry: Of its history.
        source: Key of the callback.
    """
    is_done = entry.rung == "roll_back" and not entry.outcome.startswith("not done")
    return Notice(
        kind=ROLLBACK if is_done else f"recovery, {entry.rung.replace('_', ' ')}",
        step=entry.step,
        text=f"{source}: {entry}",
        what=entry.reason + (f" ({entry.count} times)" if entry.count > 1 else ""),
        advice=entry.outcome,
        more=tags.RECOVERY_TEXT,
        source=source,
        severity="warning",
    )


def checkpoint_notice(text: str, path: Path, guard: Guard, *, source: str) -> Notice:
    """Of a bad checkpoint.

    Args:
        text: All of it in one line.
        path: Of the checkpoint.
        guard: The verdict.
        source: Key of the callback.
    """
    return Notice(
        kind=BAD_CHECKPOINT,
        step=guard.step,
        text=f"{source}: {text}",
        what="; ".join(guard.reasons),
        where=str(path),
        advice=BAD_CHECKPOINT_ADVICE,
        source=source,
    )


def drill_notice(number: int, fault: Fault, *, step: int) -> Notice:
    """Of a fault on purpose.

    Args:
        number: Its position in `faults`.
        fault: It.
        step: The optimizer step.
    """
    said = f"a fault on purpose: faults[{number}]: {fault}"
    return Notice(kind="drill", step=step, text=f"drill: {said}", what=said, severity="note")


def warning_notice(sign: WarningSign, source: str, *, context: Any, more: str = "") -> Notice:
    """Of signs that a run is about to become unstable.

    Args:
        sign: They.
        source: Key of the callback.
        context: Of the step, a `StepContext`.
        more: Where more is.
    """
    return Notice(
        kind="early warning",
        step=context.step,
        text=f"{source}: step {context.step}: level {sign.level}: {sign.text}",
        what=f"level {sign.level}: {sign.text}",
        advice="look at what has changed in the data and the learning rate, and keep a good checkpoint",
        more=more,
        source=source,
        severity="warning",
        optimizer_index=context.optimizer_index,
    )


def spike_notice(step: int, optimizer_index: int, *, source: str) -> Notice:
    """Of a spike that cannot be searched.

    Args:
        step: The optimizer step.
        optimizer_index: Position of the optimizer.
        source: Key of the callback.
    """
    said = f"step {step} has a spike, and nothing here can run it again"
    return Notice(
        kind="gradient spike",
        step=step,
        text=f"{source}: {said}",
        what=said,
        source=source,
        optimizer_index=optimizer_index,
    )


def _in_words(kind: str) -> str:
    return kind.replace("_", " ").replace("nonfinite", "non-finite")
