"""Lightning: one driver for each Trainer runs all of our callbacks as one suite for each optimizer.

The first of our callbacks that Lightning calls at a step runs the suite; the others find it done. Trainers of both
packages (`lightning.pytorch` and `pytorch_lightning`) look the same from here, so that neither is imported.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks._bases import register_lightning
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.suite import Suite, check_selections
from stabilizer.errors import warn

__all__ = ["LightningDriver", "LightningSink"]


class LightningSink:
    """Writes to all loggers of a Trainer, on the process that logs.

    Args:
        trainer: Of either package.
    """

    def __init__(self, trainer: Any) -> None:
        # Weak: a callback that outlives its trainer must not keep it.
        self._trainer = weakref.proxy(trainer)
        self.is_logging = bool(trainer.is_global_zero)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=step)

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure where a logger takes one."""
        for experiment in self._experiments("add_figure"):
            experiment.add_figure(tag, figure, step)

    def show(self, values: dict[str, float]) -> None:
        """Show numbers on the progress bar."""
        for tag, value in values.items():
            self._trainer.lightning_module.log(tag, value, prog_bar=True, logger=False, rank_zero_only=True)

    def charts(self, charts: dict[str, list[str]]) -> None:
        """Arrange TensorBoard's Custom Scalars page."""
        layout = {"stabilizer": {title: ["Multiline", patterns] for title, patterns in charts.items()}}
        for experiment in self._experiments("add_custom_scalars"):
            experiment.add_custom_scalars(layout)

    def _experiments(self, method: str) -> list[Any]:
        candidates = [getattr(logger, "experiment", None) for logger in self._trainer.loggers]
        return [experiment for experiment in candidates if hasattr(experiment, method)]


class LightningDriver:
    """Serves the hooks of one fit.

    Args:
        trainer: Of either package.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        self.callbacks = [callback for callback in trainer.callbacks if isinstance(callback, StabilizerCallback)]
        self.is_closed = False
        self._sink = LightningSink(trainer)
        self._suites: dict[int, Suite] = {}
        self._has_stepped: set[int] = set()
        self._num_backwards = 0
        self._names: tuple[str, ...] = ()
        self._clip_gradients: Callable[..., None] | None = None

    def setup(self, stage: str) -> None:
        """Before the model is set up: refuse what cannot work."""
        if stage != "fit":
            self.is_closed = True
        elif _is_disabled():
            self.is_closed = True
            names = sorted({type(callback).__name__ for callback in self.callbacks})
            warn(f"STABILIZER_DISABLE is set: {', '.join(names)} do nothing in this run")
        else:
            _refuse_strategy(self._trainer.strategy)

    def fit_start(self) -> None:
        """Check what can be checked before the first step, and arrange the charts."""
        trainer = self._trainer
        _refuse_optimizers(trainer.optimizers)
        self._names = check_selections(self.callbacks, trainer.lightning_module)
        charts = {title: tags for callback in self.callbacks for title, tags in callback.charts().items()}
        if charts and self._sink.is_logging:
            self._sink.charts(charts)
        # In manual optimization a user clips before the optimizer step, and so before Lightning calls us: whoever clips
        # through Lightning passes here, and the raw gradients are measured first.
        plugin = trainer.precision_plugin
        self._clip_gradients = plugin.clip_gradients
        plugin.clip_gradients = self._clip

    def before_backward(self) -> None:
        """Count: a step without any backward pass (training_step returned None) is no step."""
        self._num_backwards += 1

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the suite of an optimizer, unless a clip in manual optimization has done so for this step."""
        self._run(optimizer)
        self._has_stepped.add(id(optimizer))

    def train_batch_end(self) -> None:
        """Close the steps of this batch."""
        for suite in self._suites.values():
            if suite.is_open:
                suite.finish()
                self._num_backwards = 0
        self._has_stepped.clear()

    def train_end(self) -> None:
        """Write everything and give Lightning its method back."""
        self.is_closed = True
        if self._clip_gradients is not None:
            del self._trainer.precision_plugin.clip_gradients
            self._clip_gradients = None
        for suite in self._suites.values():
            suite.close()
        self._suites.clear()  # a suite holds the model

    def _run(self, optimizer: torch.optim.Optimizer) -> Suite:
        suite = self._suite(optimizer)
        if suite.is_open and id(optimizer) in self._has_stepped:
            suite.finish()  # one more step of this optimizer within a batch of manual optimization
            self._has_stepped.discard(id(optimizer))
        if not suite.is_open and (self._num_backwards or _has_gradients(optimizer)):
            plugin = self._trainer.precision_plugin
            suite.run(grad_scale=_scale_still_in(plugin, optimizer), is_scaled=_scaler_of(plugin) is not None)
        return suite

    def _suite(self, optimizer: torch.optim.Optimizer) -> Suite:
        trainer = self._trainer
        number = next(number for number, candidate in enumerate(trainer.optimizers) if candidate is optimizer)
        if number not in self._suites:
            module = trainer.lightning_module
            self._suites[number] = Suite(
                self.callbacks,
                model=module if trainer.strategy.model is None else trainer.strategy.model,
                optimizer=optimizer,
                sink=self._sink,
                optimizer_index=number,
                groups=getattr(module, "stabilizer_groups", None),
                known_names=self._names,
            )
        return self._suites[number]

    def _clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Stands before the precision plugin's `clip_gradients`."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        is_automatic = self._trainer.lightning_module.automatic_optimization
        suite = self._suite(inner) if is_automatic else self._run(inner)
        assert self._clip_gradients is not None
        self._clip_gradients(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
        if clip_val and clip_val > 0:
            total = suite.total_norm() if gradient_clip_algorithm == "norm" else None
            suite.after_clip(None if total is None else _clip_coefficient(total, clip_val))


def _clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """What `torch.nn.utils.clip_grad_norm_` multiplies by."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _scaler_of(plugin: Any) -> Any:
    return getattr(plugin, "scaler", None)


def _scale_still_in(plugin: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The loss scale, if the gradients have not been divided by it yet (fused optimizers do it in their step)."""
    scaler = _scaler_of(plugin)
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if scale is None:
        return None
    # The scaler's own note of what it has done for this optimizer since its last update.
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scale if stage.name == "READY" else None


def _refuse_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "optimizer LBFGS evaluates the loss up to max_iter times a step, so that a step has no one gradient; "
                "use a first-order optimizer or remove the stabilizer callbacks"
            )


def _refuse_strategy(strategy: Any) -> None:
    if "DeepSpeedStrategy" in {kind.__name__ for kind in type(strategy).__mro__}:
        raise ValueError(
            f"strategy={type(strategy).__name__}: DeepSpeed ZeRO keeps gradients in partitions of its own, where no "
            "callback can see them. Use FSDPStrategy or ModelParallelStrategy (FSDP2), or set STABILIZER_DISABLE=1 to "
            "train without the stabilizer callbacks."
        )


def _is_disabled() -> bool:
    return os.environ.get("STABILIZER_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def _serve(callback: StabilizerCallback, trainer: Any, hook: str, *args: Any) -> None:
    """Hand a hook to the driver, which the first of our callbacks keeps: it speaks for all."""
    if callback is not next(other for other in trainer.callbacks if isinstance(other, StabilizerCallback)):
        return
    if hook == "setup":
        callback.driver = LightningDriver(trainer)
    if callback.driver is not None and not callback.driver.is_closed:
        getattr(callback.driver, hook)(*args)


register_lightning(_serve)
