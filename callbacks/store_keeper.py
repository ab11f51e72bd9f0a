"""The store of one optimizer's gradients, made for what the callbacks will read, and anew when layers are unfrozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Selection
from stabilizer.callbacks.missing import MissingGradients
from stabilizer.errors import warn
from stabilizer.parameters import ParameterIndex, named_parameters
from stabilizer.store import GradientStore

__all__ = ["StoreKeeper"]


class StoreKeeper:
    """Makes the store at the first step, which is a collective.

    Args:
        callbacks: All of ours, in the order of their numbers.
        model: As it trains, wrapped.
        optimizer_index: Position of the optimizer.
        groups: See `ParameterIndex`.
        known_names: Names of parameters that `layers=` may mean though they do not train at this optimizer's steps.
        num_flags: See `GradientStore`.

    Attributes:
        store: The store; `None` before the first step.
        selections: The layers that each callback looks at.
        missing: Watches for parameters without a gradient.
    """

    missing: MissingGradients

    def __init__(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        model: nn.Module,
        optimizer_index: int,
        groups: Mapping[str, Any] | None,
        known_names: Sequence[str],
        num_flags: int,
    ) -> None:
        self.store: GradientStore | None = None
        self.selections: list[Selection] = []
        self._callbacks, self._model, self._groups = callbacks, model, groups
        self._optimizer_index, self._known_names, self._num_flags = optimizer_index, known_names, num_flags
        self._parameters: list[Tensor] = []
        self._has_said_nothing = False

    def current(self, optimizer: torch.optim.Optimizer, *, step: int) -> GradientStore | None:
        """The store, made anew when the optimizer's trainable parameters have changed (gradual unfreezing).

        Args:
            optimizer: Whose parameters are measured.
            step: The optimizer step.

        Returns:
            `None` if there is nothing to measure.
        """
        parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        is_same = len(parameters) == len(self._parameters) and all(
            new is old for new, old in zip(parameters, self._parameters, strict=True)
        )
        if not parameters:
            if not self._has_said_nothing:
                self._has_said_nothing = True
                warn(
                    f"optimizer {self._optimizer_index} ({type(optimizer).__name__}) has no parameter that "
                    "requires a gradient at its step: there is nothing to measure"
                )
            return None
        if self.store is None or not is_same:
            self.store, self._parameters = self._make(parameters, step), parameters
        return self.store

    def _make(self, parameters: list[Tensor], step: int) -> GradientStore:
        index = ParameterIndex(self._model, parameters=parameters, groups=self._groups)
        intervals = {callback.max_abs_every_n_steps for callback in self._callbacks}
        store = GradientStore(
            index,
            granularities=[
                one for callback in self._callbacks for one in (callback.granularity, *callback.more_granularities)
            ],
            norm_types={callback.norm_type for callback in self._callbacks},
            ring=max(callback.history for callback in self._callbacks),
            max_abs_every_n_steps=[interval for interval in intervals if interval is not None],
            num_flags=self._num_flags,
        )
        store.agree_on_step(step)
        # A layer of another optimizer, or of another rank, may be asked for too: it is no mistake.
        known = [*self._known_names, *(name for _, name in named_parameters(self._model))]
        names = list(dict.fromkeys([*known, *store.names]))
        self.selections = []
        for callback in self._callbacks:
            view = store.view(callback.granularity, callback.norm_type)
            callback.attach_view(self._optimizer_index, view)
            more = [store.view(granularity, callback.norm_type) for granularity in callback.more_granularities]
            callback.attach_more_views(self._optimizer_index, more)
            self.selections.append(Selection(view, callback.choose(names)))
        self.missing = MissingGradients(index)
        return store
