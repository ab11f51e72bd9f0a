"""What NumericsCallback has found in a run, what rests since then, and what GradLoc has found with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.grad_loc import GradLocCallback
from stabilizer.callbacks.numerics_findings import GRADIENT_KINDS, group_of
from stabilizer.callbacks.numerics_inquiry import Found
from stabilizer.callbacks.numerics_reports import NumericsReports
from stabilizer.errors import warn
from stabilizer.numerics.finding import NumericsFinding

__all__ = ["Ledger"]

_MAX_FINDINGS = 100
_RETRY_STEPS = 10
#: Of kinds that are looked into again after this many cooldowns only: nothing about them is urgent.
_RARE = {"underflow": 100}
#: What may be so for a whole run, and shall not use up its incidents.
_NO_INCIDENTS = ("underflow", "slow_collective")


class Ledger:
    """Keeps findings, the same ones on every rank.

    Args:
        reports: Where they are told.
        cooldown_steps: Steps in which the same kind of trouble is not looked into again.
        max_incidents: How many of them a run may have.

    Attributes:
        findings: The last hundred.
        num_incidents: How many of them were incidents: slow collectives and underflow are none.
    """

    def __init__(self, reports: NumericsReports, *, cooldown_steps: int, max_incidents: int) -> None:
        self._reports, self._cooldown_steps, self._max_incidents = reports, cooldown_steps, max_incidents
        self.findings: list[NumericsFinding] = []
        self.num_incidents = 0
        self._looked: dict[str, int] = {}  # "<optimizer>/<group of kinds>" -> step
        self._open: list[tuple[Found, Path | None]] = []  # of the step at hand
        self._has_warned = False

    def is_full(self, callback: StabilizerCallback) -> bool:
        """Whether the run has had as many incidents as it may; says so once.

        Args:
            callback: Whose ledger it is.
        """
        if self.num_incidents < self._max_incidents:
            return False
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{callback.state_key}: {self._max_incidents} incidents in this run: no further step is looked into "
                "(max_incidents=)"
            )
        return True

    def is_resting(self, context: StepContext, kind: str) -> bool:
        """Whether this kind was looked into not long ago.

        Args:
            context: Of the step.
            kind: Of trouble.
        """
        last = self._looked.get(f"{context.optimizer_index}/{group_of(kind)}")
        return last is not None and context.step - last <= self._cooldown_steps * _RARE.get(kind, 1)

    def note(self, callback: StabilizerCallback, context: StepContext, found: Found, reasons: Iterable[str]) -> None:
        """Keep and tell what was found in a step.

        Args:
            callback: Whose ledger it is.
            context: Of the step.
            found: It.
            reasons: Why the step was looked into.
        """
        finding = found.finding
        self.num_incidents += finding.kind not in _NO_INCIDENTS
        # What could not be run again is tried again sooner.
        rest = min(self._cooldown_steps, _RETRY_STEPS) if finding.verdict == "unknown" else self._cooldown_steps
        for kind in (finding.kind, *(reason for reason in reasons if reason in GRADIENT_KINDS)):
            self._looked[f"{context.optimizer_index}/{group_of(kind)}"] = context.step + rest - self._cooldown_steps
        self.keep(finding)
        self._open.append((found, self._reports.tell(callback, context, finding, found.report)))

    def keep(self, finding: NumericsFinding) -> None:
        """Keep a finding.

        Args:
            finding: It.
        """
        self.findings = [*self.findings, finding][-_MAX_FINDINGS:]

    def close_step(self, context: StepContext, searches: Iterable[GradLocCallback]) -> None:
        """Join what repeats with what GradLoc has found at the same step.

        Args:
            context: Of the step.
            searches: Those of the run.
        """
        told, self._open = self._open, []
        if told:
            context.log(tags.NUMERICS_INCIDENTS, float(self.num_incidents))
        here = (context.step, context.optimizer_index)
        for search in searches:
            last = search.incidents[-1] if search.incidents else None
            if last is None or (last.step, last.optimizer_index) != here:
                continue
            folder = search.reports.folder(search, context) / f"step_{context.step}"
            for found, own in told:
                if found.finding.verdict == "repeats":
                    text = f"{found.finding.text}; GradLoc: {last.summary}"
                    finding = dataclasses.replace(found.finding, text=text)
                    self.findings = [finding if one is found.finding else one for one in self.findings]
                    report = dataclasses.replace(
                        found.report, text=text, grad_loc=last.summary, grad_loc_folder=str(folder)
                    )
                    self._reports.link(context, own, finding, report)

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "findings": [finding.to_plain() for finding in self.findings],
            "looked": dict(self._looked),
            "num_incidents": self.num_incidents,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self.findings = [NumericsFinding.from_plain(one) for one in state["findings"]]
        self._looked = {str(key): int(step) for key, step in state["looked"].items()}
        self.num_incidents = int(state["num_incidents"])
