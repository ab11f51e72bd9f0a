"""Which findings a step has, by the reasons for which it is looked into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stabilizer.callbacks.numerics_inquiry import Found, Inquiry
from stabilizer.numerics.hardware import describe_machine
from stabilizer.numerics.wording import SCALE_REMEDIES, SLOW_REMEDY, UNDERFLOW_REMEDY

__all__ = ["GRADIENT_KINDS", "group_of", "look_into"]

#: What a step is run again for, the first that applies.
GRADIENT_KINDS = ("nonfinite_loss", "nonfinite_gradient", "spike")
#: A reason; how the scale is stuck follows.
_STUCK = "stuck_loss_scale/"

Numbers = Mapping[str, float]


def group_of(kind: str) -> str:
    """What a kind of trouble rests with, once it was looked into.

    Args:
        kind: Of a finding, or a reason.

    Example:
        >>> group_of("nonfinite_loss"), group_of("stuck_loss_scale/floor")
        ('nonfinite', 'stuck_loss_scale')
    """
    return "nonfinite" if kind.startswith("nonfinite") or kind == "corrupt_parameter" else kind.partition("/")[0]


def look_into(inquiry: Inquiry, reasons: Mapping[str, Numbers], *, has_tokens: bool) -> list[Found]:
    """Findings of a step; a collective.

    Args:
        inquiry: Of the step, asked.
        reasons: Those of all ranks; "is_bad" among them where the gradient is not finite, whoever's business that is.
        has_tokens: Whether GradLoc is there to be asked.
    """
    found = []
    kind = next((kind for kind in GRADIENT_KINDS if kind in reasons), None)
    stuck = next((reason for reason in reasons if reason.startswith(_STUCK)), None)
    is_suspicious = kind is not None or stuck is not None or "nonfinite_parameter" in reasons
    weights = inquiry.weights() if is_suspicious else None
    if weights is not None:
        found.append(weights)
    elif kind is not None:
        found.append(inquiry.gradient(kind, reasons[kind], has_tokens=has_tokens))
    if stuck is not None:
        runs_again = "is_bad" in reasons and weights is None and kind is None
        found.append(_stuck(inquiry, stuck.removeprefix(_STUCK), reasons[stuck], runs_again=runs_again))
    if "underflow" in reasons:
        numbers = reasons["underflow"]
        text = f"{numbers['share']:.0%} of the gradient's elements are smaller than float16 holds at this loss scale"
        found.append(inquiry.other("underflow", text=text, remedy=UNDERFLOW_REMEDY, evidence=numbers, rank=None))
    if "slow_collective" in reasons:
        found.append(_slow(inquiry, reasons["slow_collective"]))
    return found


def _stuck(inquiry: Inquiry, how: str, numbers: Numbers, *, runs_again: bool) -> Found:
    remedy = SCALE_REMEDIES[how]
    if how == "overflows" and runs_again:
        found = inquiry.gradient("stuck_loss_scale", numbers, has_tokens=False)
        finding = dataclasses.replace(found.finding, remedy=remedy)
        return Found(finding, dataclasses.replace(found.report, remedy=remedy))
    scale = numbers["loss_scale"]
    text = {
        "overflows": f"{numbers['num_overflows']:.0f} steps in a row overflow, down to a loss scale of {scale:g}",
        "floor": f"the loss scale is stuck at {scale:g}, for {numbers['num_steps_at_floor']:.0f} steps in a row",
        "ceiling": f"the loss scale has grown to {scale:g}",
    }[how]
    return inquiry.other("stuck_loss_scale", text=text, remedy=remedy, evidence=numbers, rank=None)


def _slow(inquiry: Inquiry, numbers: Numbers) -> Found:
    """Whoever comes last waits least."""
    waits = [(view.collective_seconds, number) for number, view in enumerate(inquiry.ranks)]
    known = [(seconds, number) for seconds, number in waits if seconds is not None]
    number = min(known)[1] if known else None
    text = (
        f"the collectives of step {numbers['slow_step']:.0f} took {numbers['seconds']:.3g} s, usually "
        f"{numbers['median_seconds']:.3g} s"
    )
    evidence = dict(numbers)
    if inquiry.step_skew is not None:
        evidence["step_seconds_skew"] = inquiry.step_skew
        text += f" (steps differ by {inquiry.step_skew:.3g} s over ranks)"
    if number is not None:
        text += f"; rank {number} waited least: {describe_machine(inquiry.ranks[number].machine)}"
    return inquiry.other("slow_collective", text=text, remedy=SLOW_REMEDY, evidence=evidence, rank=number)
