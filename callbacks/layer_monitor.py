"""The layers of one optimizer for LayerHealthCallback: what is kept of a step, and numbers on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.context import StepContext
from stabilizer.health import Examiner, HealthHistory, Limits, Reading, Row, examine, make_layout, reading_shapes
from stabilizer.late import HostCopy
from stabilizer.reduction import accumulation_dtype
from stabilizer.view import LayerView

__all__ = ["LateReading", "LayerMonitor"]


class LateReading:
    """Numbers of an examination, on their way to the host in one piece.

    Args:
        reading: With values on the device.

    Attributes:
        levels: Of every kind of finding, on the device, shape (kinds,).
    """

    def __init__(self, reading: Reading) -> None:
        values = reading.values
        self.levels = values["levels"]
        dtype = accumulation_dtype(self.levels.device)
        self._copy = HostCopy(torch.cat([value.reshape(-1).to(dtype) for value in values.values()]))
        self._reading = reading
        self._shapes = reading_shapes(reading.layout, reading.limits)
        assert list(self._shapes) == list(values)

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self._copy.is_ready

    def read(self) -> Reading:
        """The same with values on the host; waits for them if it must."""
        sizes = [torch.Size(shape).numel() for shape in self._shapes.values()]
        pieces = self._copy.read().split(sizes)
        values = {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}
        one = self._reading
        return Reading(step=one.step, steps=one.steps, layout=one.layout, limits=one.limits, values=values)


class LayerMonitor:
    """Keeps steps, and examines them.

    Args:
        context: Of any step: its layers are looked at.
        modules: The modules of the same store.
        limits: What norms are held against.
    """

    def __init__(self, context: StepContext, modules: LayerView, *, limits: Limits) -> None:
        store, chosen = context.store, set(context.selected_names)
        # Modules of the layers that are looked at.
        layers = [store.layer_names[layer] for layer in store.unit_layers]
        wanted = sorted({module for layer, module in zip(layers, modules.unit_layers, strict=True) if layer in chosen})
        places = {module: place for place, module in enumerate(wanted)}
        names = [modules.layer_names[module] for module in wanted]
        layout = make_layout(context.selected_names, modules=names)
        device = store.ring.device
        self._history = HealthHistory(
            layout,
            unit_modules=[places.get(module, -1) for module in modules.unit_layers],
            limits=limits,
            device=device,
        )
        self._examiner = Examiner(layout, device=device)

    def append(self, context: StepContext) -> None:
        """Keep a step.

        Args:
            context: Of the step, at its end.
        """
        store, outcome = context.store, context.outcome
        is_left_out: Tensor = context.is_bad
        if outcome is not None:
            is_left_out = is_left_out | outcome.skipped | outcome.overflowed
        self._history.append(
            Row(
                step=context.step,
                norms=context.select(store.norms),
                total=store.total_norm,
                squares=store.measurement.squares,
                is_left_out=is_left_out,
                loss=None if context.loss is None else context.loss.numbers,
            )
        )

    def examine(self, step: int) -> LateReading | None:
        """Examine what has been kept.

        Args:
            step: The step at hand.

        Returns:
            `None` if there is nothing new.
        """
        history = self._history
        history.flush()
        if not history.num_new:
            return None
        steps = history.steps[-history.num_new :]
        values = examine(history, self._examiner)
        history.num_new = 0
        return LateReading(Reading(step=step, steps=steps, layout=history.layout, limits=history.limits, values=values))

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self._history.load_state_dict(state)
