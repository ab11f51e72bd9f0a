"""What a clip says to people: once, when it acts so often that it changes the training, and why a run was ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stabilizer.callbacks.clip_counts import WINDOW
from stabilizer.callbacks.clip_memory import ClipMemory, Spikes
from stabilizer.callbacks.context import StepContext
from stabilizer.errors import warn
from stabilizer.thresholds import Fixed

__all__ = ["ClipAdvice", "describe_skips", "describe_spikes"]

_EVERY = 100
_MAX_CLIPPED = WINDOW // 20
_MIN_RATIO = 3.0
_MAX_NAMES = 5


class ClipAdvice:
    """Warns once of thresholds that are too low.

    Args:
        key: What the callback is called.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._is_done = False
        self._recent: Tensor | None = None

    def see(self, context: StepContext, memory: ClipMemory, spikes: Spikes) -> None:
        """Look at the counts, every 100th step; they are read when they have reached the host.

        Args:
            context: Of a step that is done.
            memory: Which holds the counts.
            spikes: What was found.
        """
        num_steps, thresholds = memory.rates.num_steps, memory.thresholds
        if self._is_done:
            return
        if any(isinstance(rule, Fixed) for rule, _ in thresholds.parts):
            self._note(spikes.norms, num_steps)
        if num_steps % _EVERY:
            return
        typical = thresholds.typical
        if self._recent is not None:
            typical = torch.where(typical.isnan(), self._recent.nanmedian(0).values, typical)
        columns = [memory.rates.counts, spikes.limits, typical, thresholds.num_accepted]
        values = torch.stack([column.to(torch.float32) for column in columns])
        context.later(values, self._reader(memory, num_steps))

    def _note(self, norms: Tensor, num_steps: int) -> None:
        """Keep the last norms, since a fixed rule remembers none; NaN for those that are no norms."""
        if self._recent is None or self._recent.shape[1] != len(norms):
            self._recent = norms.new_full((_EVERY, len(norms)), torch.nan)
        self._recent[num_steps % _EVERY].copy_(torch.where((norms > 0) & (norms < torch.inf), norms, torch.nan))

    def _reader(self, memory: ClipMemory, num_steps: int) -> Callable[[int, Tensor], None]:
        names, parts, described = memory.names, memory.thresholds.parts, memory.thresholds.describe()
        fixed = {position for rule, positions in parts if isinstance(rule, Fixed) for position in positions}
        # What a cap clips before there is a threshold does not speak against the threshold.
        warmup = max(rule.warmup_steps for rule, _ in parts)
        spared = warmup if memory.thresholds.warmup_cap is not None and num_steps < WINDOW + warmup else 0

        def read(step: int, values: Tensor) -> None:
            rows = zip(names, *values.view(4, -1).tolist(), strict=True)
            often, low = [], []
            for position, (name, count, limit, typical, num_accepted) in enumerate(rows):
                # `typical` is NaN where nothing is known: no comparison is true then.
                ratio = f" (k = {limit / typical:.2g} in force)" if typical > 0 else ""
                if count - spared > _MAX_CLIPPED:
                    often.append(f"{name} in {100 * count / min(num_steps, WINDOW):.3g} %{ratio}")
                elif position in fixed and num_accepted >= _EVERY and limit < _MIN_RATIO * typical:
                    low.append(f"{name}: {limit:.4g}{ratio}")
            self._say(step, often, low, described=described)

        return read

    def _say(self, step: int, often: list[str], low: list[str], *, described: str) -> None:
        if self._is_done or not (often or low):
            return
        self._is_done = True
        parts = []
        if often:
            parts.append(f"more than 5 % of the last {WINDOW} steps were over the threshold: {_listed(often)} so far")
        if low:
            parts.append(f"fixed thresholds under {_MIN_RATIO:.0f} times the usual norm: {_listed(low)}")
        warn(
            f"{self._key}, step {step}: {'; '.join(parts)}; rule: {described}. k is the threshold over the usual norm. "
            "To clip healthy steps makes Adam's second moment too small and so its steps too large (and to skip them "
            "loses them): choose a larger k, an adaptive rule, or `stabilizer calibrate`"
        )


def describe_spikes(key: str, step: int, names: Sequence[str], spikes: Spikes) -> str:
    """Name what is over its threshold; waits for the device.

    Args:
        key: What the callback is called.
        step: The optimizer step.
        names: Of the norms.
        spikes: What was found.
    """
    rows = zip(names, spikes.flags.tolist(), spikes.norms.tolist(), spikes.limits.tolist(), strict=True)
    found = [f"{name} ({norm:.4g} over {limit:.4g})" for name, is_over, norm, limit in rows if is_over]
    return f"step {step}: {key}: gradient norms over their thresholds: {_listed(found)}"


def describe_skips(key: str, context: StepContext, num: int, *, limit: int) -> str:
    """Tell the history of a run that does nothing but skip; waits for the device.

    Args:
        key: What the callback is called.
        context: Of the last step.
        num: How many steps were skipped in a row.
        limit: How many may be.
    """
    steps, rows = context.store.past(5)
    totals = ", ".join(f"{step}: {total:.4g}" for step, total in zip(steps, rows[:, -1].tolist(), strict=True))
    layers = zip(context.store.layer_names, context.store.nonfinite.tolist(), strict=True)
    bad = [name for name, is_bad in layers if is_bad]
    where = f"; layers that are not finite: {_listed(bad)}" if bad else ""
    return (
        f"{key}: {num} steps in a row were skipped up to step {context.step}, more than max_consecutive_skips={limit}: "
        f"the run stands still. Total gradient norms by step: {totals}{where}. Go on from a checkpoint of before, or "
        "raise the limit"
    )


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_MAX_NAMES]) + (f" and {len(texts) - _MAX_NAMES} more" if len(texts) > _MAX_NAMES else "")
