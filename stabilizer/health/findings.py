"""Findings: what they are, and which of them are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

__all__ = ["KINDS", "SEVERITIES", "Finding", "FindingLog", "Kind", "Severity"]

Kind: TypeAlias = Literal[
    "exponential_decay",
    "vanishing",
    "explosion_all",
    "explosion_shallow",
    "explosion_one",
    "explosion_some",
    "parts_apart",
    "no_gradient",
    "total_drift",
    "loss_plateau",
]
Severity: TypeAlias = Literal["info", "warning", "alarm"]

KINDS: tuple[Kind, ...] = (
    "exponential_decay",
    "vanishing",
    "explosion_all",
    "explosion_shallow",
    "explosion_one",
    "explosion_some",
    "parts_apart",
    "no_gradient",
    "total_drift",
    "loss_plateau",
)
#: The number of a severity is its position plus 1; 0 is none.
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "alarm")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that the norms, or the losses, of a run say.

    Attributes:
        kind: What it is.
        severity: "info": good to know. "warning": look at it. "alarm": part of the model does not train.
        step: The step that it was found at; of an explosion, the step of the worst one.
        layers: Those concerned, at most eight, the most telling ones.
        evidence: Plain numbers, by name.
        text: One line, with what to check next.
    """

    kind: Kind
    severity: Severity
    step: int
    layers: tuple[str, ...]
    evidence: Mapping[str, float]
    text: str

    @property
    def level(self) -> int:
        """Number of the severity, 1 to 3."""
        return SEVERITIES.index(self.severity) + 1


class FindingLog:
    """Keeps findings, and says which of them have not been told lately.

    Args:
        cooldown_steps: Steps in which a kind is not told again, unless it gets worse.
        max_findings: How many are kept, the last ones.

    Attributes:
        findings: Those that were told.

    Example:
        >>> log = FindingLog(cooldown_steps=100)
        >>> find = lambda step: Finding("vanishing", "warning", step, (), {}, "small")
        >>> [bool(log.see(step, [find(step)])) for step in (0, 50, 100)]
        [True, False, True]
        >>> log.findings[-1].text
        'small (found 1 time more since step 0)'
    """

    def __init__(self, *, cooldown_steps: int, max_findings: int = 100) -> None:
        self._cooldown_steps, self._max_findings = cooldown_steps, max_findings
        self.findings: list[Finding] = []
        # Kind -> step and level when it was told, and how often it was found since.
        self._told: dict[str, list[int]] = {}

    def see(self, step: int, findings: Sequence[Finding]) -> list[Finding]:
        """Take what was found at a step.

        Args:
            step: At which it was looked.
            findings: At most one of each kind.

        Returns:
            Those to tell, with the number of times that they were found since they were told last.
        """
        found = []
        for finding in findings:
            told = self._told.get(finding.kind)
            if told is not None and step - told[0] < self._cooldown_steps and finding.level <= told[1]:
                told[2] += 1
                continue
            if told is not None and told[2]:
                times = f"{told[2]} time{'s' if told[2] > 1 else ''}"
                finding = dataclasses.replace(finding, text=f"{finding.text} (found {times} more since step {told[0]})")
            self._told[finding.kind] = [step, finding.level, 0]
            found.append(finding)
        self.findings = [*self.findings, *found][-self._max_findings :]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        findings = [{**dataclasses.asdict(one), "layers": list(one.layers)} for one in self.findings]
        return {"findings": findings, "told": {kind: list(told) for kind, told in self._told.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self.findings = [Finding(**{**one, "layers": tuple(one["layers"])}) for one in state["findings"]]
        self._told = {kind: list(told) for kind, told in state["told"].items()}
