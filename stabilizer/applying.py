"""The one place that changes gradients: it does what a `StepPlan` says, once, and waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.parameters import ParameterIndex
from stabilizer.plan import StepPlan

__all__ = ["apply_plan_", "clip_values_", "without_parts"]


@torch.no_grad()
def apply_plan_(plan: StepPlan, gradients: Sequence[Tensor | None], unit_ids: Sequence[int]) -> None:
    """Multiply gradients, or set them to zero, in one pass. On a CPU those whose coefficient is 1 are not touched.

    Args:
        plan: What to do.
        gradients: This rank's elements, dense or sparse; changed in place.
        unit_ids: Unit of every gradient.
    """
    found = _found(gradients, unit_ids)
    if plan.squares.device.type == "cpu" and all(gradient.device.type == "cpu" for _, gradient in found):
        _apply_on_host_(plan, found)
        return
    if plan.zeroed is not None:
        zeroed = _Sent(plan.zeroed)
        for unit, gradient in found:
            # Not a product: 0 * NaN is NaN.
            gradient.masked_fill_(zeroed.at(unit, gradient.device), 0.0)
    if plan.has_coefficients:
        coefficients = _Sent(plan.coefficients.to(torch.float32))
        groups: dict[tuple[int, torch.device], list[Tensor]] = {}
        for unit, gradient in found:
            groups.setdefault((0 if plan.is_uniform else unit, gradient.device), []).append(gradient)
        for (unit, device), group in groups.items():
            torch._foreach_mul_(group, coefficients.at(unit, device))


@torch.no_grad()
def clip_values_(
    plan: StepPlan, gradients: Sequence[Tensor | None], unit_ids: Sequence[int], *, grad_scale: Tensor | None = None
) -> None:
    """Clip elements of gradients as planned; does nothing if nobody has asked.

    Args:
        plan: What to do.
        gradients: This rank's elements; changed in place. Not parts of sums: their elements say nothing.
        unit_ids: Unit of every gradient.
        grad_scale: What the gradients are still multiplied by, shape (): limits are in units without it.
    """
    if plan.limits is None:
        return
    limits = plan.limits if grad_scale is None else plan.limits * grad_scale.to(plan.limits.device, plan.limits.dtype)
    # Numbers on a CPU can be read at no cost: only what has a limit is touched.
    known = limits.tolist() if limits.device.type == "cpu" else None
    sent = _Sent(limits.to(torch.float32))
    for unit, gradient in _found(gradients, unit_ids):
        if known is None or known[unit] != torch.inf:
            # The parts of a complex number are numbers.
            elements = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            limit = sent.at(unit, gradient.device).to(elements.dtype)
            elements.clamp_(-limit, limit)


def _found(gradients: Sequence[Tensor | None], unit_ids: Sequence[int]) -> list[tuple[int, Tensor]]:
    """What there is, each with its unit: what holds the elements."""
    result = []
    for unit, gradient in zip(unit_ids, gradients, strict=True):
        if gradient is not None:
            # Repeated rows of a sparse gradient scale like their sum.
            dense = gradient._values() if gradient.layout == torch.sparse_coo else gradient
            # What is multiplied with is real: the same for a conjugate view and what it is a view of.
            result.append((unit, dense.conj() if dense.is_conj() else dense))
    return result


def _apply_on_host_(plan: StepPlan, found: Sequence[tuple[int, Tensor]]) -> None:
    """Numbers on a CPU can be read at no cost: only what changes is touched."""
    zeroed = [] if plan.zeroed is None else plan.zeroed.tolist()
    coefficients = plan.coefficients.tolist() if plan.has_coefficients else []
    by_coefficient: dict[float, list[Tensor]] = {}
    for unit, gradient in found:
        if zeroed and zeroed[unit]:
            gradient.zero_()
        elif coefficients and coefficients[unit] != 1.0:
            by_coefficient.setdefault(coefficients[unit], []).append(gradient)
    for coefficient, group in by_coefficient.items():
        torch._foreach_mul_(group, coefficient)


class _Sent:
    """Values by unit, sent to every device that asks, once."""

    def __init__(self, values: Tensor) -> None:
        self._by_device = {values.device: values.unbind()}
        self._values = values

    def at(self, unit: int, device: torch.device) -> Tensor:
        if device not in self._by_device:
            self._by_device[device] = self._values.to(device, non_blocking=device.type != "cpu").unbind()
        return self._by_device[device][unit]


def without_parts(
    index: ParameterIndex, gradients: Sequence[Tensor | None], is_limited: Sequence[bool]
) -> tuple[list[Tensor | None], list[str]]:
    """Gradients whose elements are those of the model: not parts of sums over ranks or over repeated rows.

    Args:
        index: The parameters.
        gradients: This rank's elements of each.
        is_limited: Which of them are clipped by value.

    Returns:
        `None` for those that are left out, and the names of these.
    """
    kept, left_out = list(gradients), []
    for position, gradient in enumerate(index.gradients()):
        if gradient is None or not is_limited[position]:
            continue
        is_part = any(placement.is_partial() for placement in index.placements(position, gradient))
        if is_part or gradient.layout != torch.strided:
            kept[position] = None
            left_out.append(index.names[position])
    return kept, left_out
