"""Makes the context of a step for one callback."""

from __future__ import annotations

from typing import Any

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Selection, StepContext
from stabilizer.late import LateLog
from stabilizer.plan import LayerPlan, StepPlan
from stabilizer.store import GradientStore
from stabilizer.tags import prefix
from stabilizer.view import LayerView

__all__ = ["make_context"]


def make_context(
    callback: StabilizerCallback,
    number: int,
    *,
    store: GradientStore,
    plan: StepPlan,
    selection: Selection,
    late: LateLog,
    optimizer_index: int,
    **what: Any,
) -> StepContext:
    """The step as a callback sees it.

    Args:
        callback: Whose context it is.
        number: Of the callback in its suite.
        store: Holds the gradients.
        plan: Of the step.
        selection: The layers that the callback looks at.
        late: Takes what it logs.
        optimizer_index: Position of the optimizer.
        **what: See `StepContext`.
    """
    view: LayerView = store.view(callback.granularity, callback.norm_type)
    rights = LayerPlan(
        plan,
        view,
        may_act=callback.acts,
        may_skip=callback.may_skip,
        may_stop=callback.may_stop,
        localizes=callback.localizes,
        lowers_lr=callback.lowers_lr,
        owner=number,
    )
    return StepContext(
        store=view,
        plan=rights,
        selection=selection,
        late=late,
        tag_prefix=prefix(callback.name, optimizer_index),
        optimizer_index=optimizer_index,
        owner=number,
        **what,
    )
