"""NumericsReport: all that is known of one finding, and its JSON, which any parser reads."""

from __future__ import annotations

import dataclasses
import json

from stabilizer.localize.plain_json import from_plain, to_plain
from stabilizer.numerics.finding import NumericsFinding, Verdict
from stabilizer.numerics.hardware import Machine
from stabilizer.numerics.tracing import Producer

__all__ = ["SCHEMA", "Evidence", "NumericsReport", "ParameterCount", "RankReport"]

#: Version of the JSON; it rises when a reader of the old one would read something wrong.
SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """A number."""

    name: str
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """A parameter whose gradient, or whose values, are not finite.

    Attributes:
        name: Its clean name.
        num_nan: How many elements are NaN.
        num_inf: How many are infinite.
    """

    name: str
    num_nan: int
    num_inf: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank at a finding.

    Attributes:
        rank: Its number.
        verdict: Of its own replays; `None` where it has none.
        is_suspect: Whether its own gradient was out of the ordinary.
        step_norm: Norm of its own gradient of the micro-batch in the step.
        replay_norms: The same in every replay.
        unscaled_norm: The same in a replay with a very low loss scale; small parts of it are lost.
        step_seconds: How long its last step has taken.
        collective_seconds: How long this package's collectives have taken in it.
        machine: What the machine says.
    """

    rank: int
    verdict: Verdict | None = None
    is_suspect: bool = False
    step_norm: float | None = None
    replay_norms: tuple[float, ...] = ()
    unscaled_norm: float | None = None
    step_seconds: float | None = None
    collective_seconds: float | None = None
    machine: Machine | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsReport:
    """A finding with everything around it.

    Attributes:
        step: As of `NumericsFinding`, and so are the next ones.
        micro_batch: Likewise.
        optimizer_index: Likewise.
        evidence: Likewise.
        parameters: Gradients that are not finite, or parameters, in the order of a backward pass.
        producer: Who made the first value that is not finite in the replay.
        ranks: All of them.
        notes: What a reader should know.
        errors: What ranks have failed with.
        grad_loc: What GradLoc has found at the same step, in one line.
        grad_loc_folder: Where its incident lies.
        schema: Version of this form.

    Example:
        >>> report = NumericsReport(step=7, kind="spike", text="ten times its threshold", verdict="repeats")
        >>> NumericsReport.from_json(report.to_json()) == report
        True
    """

    step: int
    kind: str
    text: str
    remedy: str = ""
    verdict: Verdict | None = None
    rank: int | None = None
    host: str | None = None
    layer: str | None = None
    layers: tuple[str, ...] = ()
    micro_batch: int | None = None
    optimizer_index: int = 0
    evidence: tuple[Evidence, ...] = ()
    parameters: tuple[ParameterCount, ...] = ()
    producer: Producer | None = None
    ranks: tuple[RankReport, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    grad_loc: str | None = None
    grad_loc_folder: str | None = None
    schema: int = SCHEMA

    @classmethod
    def of(cls, finding: NumericsFinding) -> NumericsReport:
        """The report of a finding, as far as that goes.

        Args:
            finding: What was found.
        """
        names = [field.name for field in dataclasses.fields(finding) if field.name != "evidence"]
        evidence = tuple(Evidence(name=name, value=float(value)) for name, value in finding.evidence.items())
        return cls(**{name: getattr(finding, name) for name in names}, evidence=evidence)

    def to_json(self) -> str:
        """As JSON; numbers that are not finite are text."""
        return json.dumps(to_plain(self), indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> NumericsReport:
        """Read what `to_json` has written.

        Args:
            text: JSON of any origin; nothing in it is executed.

        Raises:
            ValueError: If it is none, or a value is of another type, or it is of a newer version.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no report of NumericsCallback: {error}") from None
        report = from_plain(cls, found, path="report")
        if report.schema > SCHEMA:
            raise ValueError(f"report.schema={report.schema}: this version of stabilizer reads up to {SCHEMA}")
        return report
