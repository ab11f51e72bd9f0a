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
from stabilizer.errors import logger, warn

__all__ = ["LightningDriver", "LightningSink"]

_PACKAGES = ("lightning", "pytorch_lightning")


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
        for writer in self._trainer.loggers:
            writer.log_metrics(values, step=step)

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
        experiments = (getattr(writer, "experiment", None) for writer in self._trainer.loggers)
        return [experiment for experiment in experiments if hasattr(experiment, method)]


class LightningDriver:
    """Serves the hooks of one fit.

    Args:
        trainer: Of either package.
        leader: The callback that called first; it speaks for all.
    """

    def __init__(self, trainer: Any, leader: StabilizerCallback) -> None:
        self._trainer = weakref.proxy(trainer)
        self._trainer_id = id(trainer)
        listed = [callback for callback in trainer.callbacks if isinstance(callback, StabilizerCallback)]
        # A callback that another one hands its hooks to is in no list.
        self.callbacks = listed if leader in listed else [leader]
        self.is_closed = False
        self._sink = LightningSink(trainer)
        self._suites: dict[int, Suite] = {}
        self._steps_at_run: dict[int, int] = {}
        self._num_backwards, self._has_moved = 0, False
        self._names: tuple[str, ...] = ()
        self._has_warned_of_optimizer = False
        self._clip_gradients: Callable[..., None] | None = None
        for callback in self.callbacks:
            callback.driver = self

    def serves(self, callback: StabilizerCallback, trainer: Any) -> bool:
        """Whether a hook of this trainer and this callback is to be acted on.

        Args:
            callback: Whose hook it is.
            trainer: Who calls it.
        """
        return not self.is_closed and self._trainer_id == id(trainer) and callback is self.callbacks[0]

    def setup(self) -> None:
        """Before the model is set up: refuse what cannot work."""
        if _is_disabled():
            self.is_closed = True
            names = sorted({type(callback).__name__ for callback in self.callbacks})
            warn(f"STABILIZER_DISABLE is set: {', '.join(names)} do nothing in this run")
        else:
            _refuse_strategy(self._trainer.strategy)

    def fit_start(self) -> None:
        """Check what can be checked before the first step, and arrange the charts."""
        _refuse_optimizers(self._trainer.optimizers)
        if _groups_of(self._trainer) is None:
            self._names = check_selections(self.callbacks, self._trainer.lightning_module)
        self._arrange_charts()
        # In manual optimization a user clips before the optimizer step, and so before Lightning calls us: whoever clips
        # through Lightning passes here, and the raw gradients are measured first.
        plugin = self._trainer.precision_plugin
        self._clip_gradients, plugin.clip_gradients = plugin.clip_gradients, self._clip

    def before_backward(self) -> None:
        """Count: a step without any backward pass (training_step returned None) is no step."""
        self._num_backwards += 1

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the suite of an optimizer, unless a clip in manual optimization has done so for this step."""
        self._run(optimizer)

    def train_batch_end(self) -> None:
        """Close the steps of this batch; a clip without a step after it was none."""
        self.settle()
        if self._has_moved:
            self._has_moved, self._num_backwards = False, 0
        for suite in self._suites.values():
            if suite.is_open:
                suite.abandon()

    def settle(self) -> None:
        """Close the steps whose optimizer has moved."""
        for number, suite in self._suites.items():
            if self._is_done(number, suite):
                suite.finish()
                self._has_moved = True

    def train_end(self, *, after_exception: bool = False) -> None:
        """Write everything and give Lightning its method back.

        Args:
            after_exception: Whether the run breaks off: its exception is the one to show, not one of ours.
        """
        self.is_closed = True
        for callback in self.callbacks:
            callback.driver = None
        if self._clip_gradients is not None:
            del self._trainer.precision_plugin.clip_gradients
            self._clip_gradients = None
        suites, self._suites = self._suites, {}  # a suite holds the model
        for number, suite in suites.items():
            try:
                if self._is_done(number, suite):
                    suite.finish()
                suite.close()
            except Exception:
                if not after_exception:
                    raise
                logger.exception("closing after an exception failed as well")

    def _is_done(self, number: int, suite: Suite) -> bool:
        """Whether a step is open whose optimizer has moved since it was measured."""
        return suite.is_open and bool(self._trainer.global_step > self._steps_at_run[number])

    def _arrange_charts(self) -> None:
        if not self._sink.is_logging:
            return
        try:
            charts = {title: tags for callback in self.callbacks for title, tags in callback.charts().items()}
            if charts:
                self._sink.charts(charts)
        except Exception:
            logger.exception("arranging the charts of TensorBoard failed; training goes on without them")

    def _run(self, optimizer: torch.optim.Optimizer) -> Suite | None:
        suite = self._suite(optimizer)
        if suite is None:
            return None
        self.settle()  # one more step of this optimizer within a batch of manual optimization
        if not suite.is_open and (self._num_backwards or _has_gradients(optimizer)):
            plugin = self._trainer.precision_plugin
            self._steps_at_run[self._number_of(optimizer)] = self._trainer.global_step
            suite.run(grad_scale=_scale_still_in(plugin, optimizer), is_scaled=_scaler_of(plugin) is not None)
        return suite

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        optimizers = enumerate(self._trainer.optimizers)
        return next((number for number, candidate in optimizers if candidate is optimizer), -1)

    def _suite(self, optimizer: torch.optim.Optimizer) -> Suite | None:
        trainer, number = self._trainer, self._number_of(optimizer)
        if number < 0:
            if not self._has_warned_of_optimizer:
                self._has_warned_of_optimizer = True
                warn(
                    f"an optimizer ({type(optimizer).__name__}) that configure_optimizers did not return is used: its "
                    "gradients are not measured"
                )
            return None
        if number not in self._suites:
            module = trainer.lightning_module
            self._suites[number] = Suite(
                self.callbacks,
                model=module if trainer.strategy.model is None else trainer.strategy.model,
                optimizer=optimizer,
                sink=self._sink,
                optimizer_index=number,
                groups=_groups_of(trainer),
                known_names=self._names,
            )
        # Some strategies and callbacks make the optimizers anew within a fit.
        self._suites[number].optimizer = optimizer
        return self._suites[number]

    def _clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Stands before the precision plugin's `clip_gradients`."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        module = self._trainer.lightning_module
        suite = self._suite(inner) if module.automatic_optimization else self._run(inner)
        assert self._clip_gradients is not None
        self._clip_gradients(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
        if suite is not None and suite.is_open and clip_val and clip_val > 0:
            # Hooks of the module's own may have changed the gradients before they came here.
            hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
            is_plain = gradient_clip_algorithm == "norm" and not any(_is_overridden(module, hook) for hook in hooks)
            suite.after_clip(max_norm=float(clip_val) if is_plain else None)


def _is_overridden(module: Any, hook: str) -> bool:
    """Whether a LightningModule has a hook of its own (neither package is imported to ask)."""
    owner = next((kind for kind in type(module).__mro__ if hook in vars(kind)), None)
    return hook in vars(module) or (owner is not None and owner.__module__.split(".")[0] not in _PACKAGES)


def _groups_of(trainer: Any) -> Any:
    return getattr(trainer.lightning_module, "stabilizer_groups", None)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _scaler_of(plugin: Any) -> Any:
    return getattr(plugin, "scaler", None)


def _scale_still_in(plugin: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The loss scale, if the gradients have not been divided by it yet (fused optimizers do it in their step)."""
    scale: Tensor | None = getattr(scaler := _scaler_of(plugin), "_scale", None)
    if scale is None:
        return None
    # The scaler's own note of what it has done for this optimizer since its last update.
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scale if stage.name == "READY" else None


def _refuse_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
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
    """Hand a hook to the driver of the trainer's fit."""
    if hook == "setup":
        listed = [other for other in trainer.callbacks if isinstance(other, StabilizerCallback)]
        if args != ("fit",) or callback is not next(iter(listed), callback):
            return
        if callback.driver is not None:  # of a fit that never came to its end
            callback.driver.train_end(after_exception=True)
        LightningDriver(trainer, callback).setup()
    elif callback.driver is not None and callback.driver.serves(callback, trainer):
        if hook == "exception":
            callback.driver.train_end(after_exception=True)
        else:
            getattr(callback.driver, hook)(*args)


register_lightning(_serve)
