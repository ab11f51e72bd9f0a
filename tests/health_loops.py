"""For what optimizers do: a callback that is nothing but OptimizerHealth, and a loop with a twin that nobody clips."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks import StabilizerCallback, StepContext
from stabilizer.callbacks.optimizer_health import OptimizerHealth
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.optimizer_health import OptimizerLimits
from stabilizer.view import LayerView
from tests.clip_loops import HandLoop

__all__ = ["OPTIMIZERS", "HealthCallback", "TwinLoop"]

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, betas=(0.9, 0.95)),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_tensor_rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "two_groups": lambda p: torch.optim.AdamW(_two_groups(list(p)), lr=1e-3),
}


def _two_groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]


class HealthCallback(StabilizerCallback):
    """Hands its hooks on, and keeps what is told.

    Args:
        every_n_steps: Of OptimizerHealth.
        warmup_steps: Of OptimizerHealth.
        cooldown_steps: Of OptimizerHealth.
        limits: Arguments of OptimizerLimits.
        **options: Of StabilizerCallback.
    """

    is_gated = False

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        warmup_steps: int = 0,
        cooldown_steps: int = 1000,
        limits: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(strict=True, **options)
        self.health = OptimizerHealth(
            self,
            every_n_steps=every_n_steps,
            warmup_steps=warmup_steps,
            cooldown_steps=cooldown_steps,
            limits=OptimizerLimits(**(limits or {})),
        )
        self.findings: list[NumericsFinding] = []

    @property
    def kinds(self) -> list[str]:
        """Of the findings."""
        return [finding.kind for finding in self.findings]

    def join_run(self, host: Any) -> None:
        """Hand on."""
        self.health.join_run(host)

    def on_gradients(self, context: StepContext) -> None:
        """Hand on."""
        self.health.begin_step(context)

    def on_step_end(self, context: StepContext) -> None:
        """Hand on."""
        self.health.end_step(context)
        self.findings += self.health.tell(context.step)

    def on_run_end(self, context: StepContext) -> None:
        """Hand on."""
        self.findings += self.health.tell()

    def attach_view(self, optimizer_index: int, view: LayerView) -> None:
        """Hand on."""
        super().attach_view(optimizer_index, view)
        self.health.forget_layers(optimizer_index)

    def detach_view(self, optimizer_index: int) -> None:
        """Hand on."""
        self.health.forget_layers(optimizer_index)
        super().detach_view(optimizer_index)

    def extra_state(self) -> dict[str, Any]:
        """Hand on."""
        return {"health": self.health.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Hand on."""
        self.health.load_state_dict(state["health"])


class TwinLoop(HandLoop):
    """A loop with, at every step, what its optimizer would have done without the callback."""

    def __enter__(self) -> TwinLoop:
        """Attach."""
        super().__enter__()
        return self

    def weight(self, name: str) -> Tensor:
        """The parameter of a layer.

        Args:
            name: Of the layer.
        """
        layer: Any = self.model[name]
        weight: Tensor = layer.weight
        return weight

    def twin_step(self, **norms: float | Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Parameters before the step, after a step that nobody clips, and as they are now."""
        before = self.weights
        model: Any = copy.deepcopy(self.model)
        # An optimizer that goes on from the same state with the parameters of the copy.
        other = copy.deepcopy(self.optimizer.state_dict())
        groups = [{**group, "params": list(group["params"])} for group in self.optimizer.param_groups]
        places = {id(layer.weight): name for name, layer in self.model.items()}
        for group in groups:
            group["params"] = [model[places[id(p)]].weight for p in group["params"]]
        kind: Any = type(self.optimizer)
        twin = kind(groups)
        twin.load_state_dict(other)
        received = self.step(**norms)
        for name, gradient in received.items():
            model[name].weight.grad = None if gradient is None else gradient.clone()
        twin.step()
        return before, {name: layer.weight.detach() for name, layer in model.items()}, self.weights
