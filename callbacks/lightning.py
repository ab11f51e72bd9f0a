"""Lightning: one driver for each Trainer runs all of our callbacks as one suite for each optimizer.

The first of our callbacks that Lightning calls at a step runs the suite; the others find it done. Trainers of both
packages (`lightning.pytorch` and `pytorch_lightning`) look the same from here, so that neither is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks._bases import register_lightning
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.hosting import (
    arrange_charts,
    check_selections,
    is_disabled,
    refuse_optimizers,
    scale_still_in,
    stand_before,
    warn_of_two_clips,
)
from stabilizer.callbacks.lightning_replay import LightningReplayer
from stabilizer.callbacks.lightning_setting import is_overridden, lightning_setting
from stabilizer.callbacks.preflight import preflight
from stabilizer.callbacks.run_host import RunHost, join_all
from stabilizer.callbacks.saving import save_with_trainer
from stabilizer.callbacks.sinks import LightningSink
from stabilizer.callbacks.suite import Suite
from stabilizer.callbacks.suites import Suites
from stabilizer.errors import logger, warn

__all__ = ["LightningDriver"]


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
        self._suites = Suites(self.callbacks, sink=LightningSink(trainer))
        self._steps_at_run: dict[int, int] = {}
        self._num_backwards, self._has_moved, self._batch_index = 0, False, -1
        self._has_warned_of_optimizer = self._has_warned_of_clips = False
        self._undo: list[Callable[[], None]] = []
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
        self.is_closed = is_disabled(self.callbacks)
        if not self.is_closed:
            _refuse_strategy(self._trainer.strategy)

    def fit_start(self) -> None:
        """Check what can be checked before the first step, and arrange the charts."""
        refuse_optimizers(self._trainer.optimizers)
        if _groups_of(self._trainer) is None:
            self._suites.known_names = check_selections(self.callbacks, self._trainer.lightning_module)
        arrange_charts(self._suites, num_optimizers=len(self._trainer.optimizers))
        # In manual optimization a user clips before the optimizer step, and so before Lightning calls us: whoever clips
        # through Lightning passes here, and the raw gradients are measured first.
        limit, module = self._trainer.gradient_clip_val, self._trainer.lightning_module
        if limit and module.automatic_optimization:
            self._has_warned_of_clips = warn_of_two_clips(self.callbacks, f"Trainer(gradient_clip_val={limit})")
        if self._suites.replays.is_on:
            self._suites.replays.replayer = LightningReplayer(self._trainer)
            self._suites.replays.drops_unused = True  # training_step returned None
            self._undo.append(stand_before(self._trainer.strategy, "training_step", self._training_step))
            self._undo.append(self._suites.replays.follow_broadcasts(self._trainer.strategy.model))
        plugin = self._trainer.precision_plugin
        self._suites.facts.precision = str(plugin.precision)
        self._undo.append(stand_before(plugin, "clip_gradients", self._clip))
        # A skip comes after the hooks of others, who may look at gradients that the step no longer has then; under a
        # scaler it comes when that has looked for infinities.
        if _scaler_of(plugin) is None and hasattr(plugin, "_after_closure"):
            self._undo.append(stand_before(plugin, "_after_closure", self._after_closure))
        else:
            hooks = [o.register_step_pre_hook(self._before_torch_step) for o in self._trainer.optimizers]
            self._undo += [hook.remove for hook in hooks]
        trainer, replays = self._trainer, self._suites.replays
        model = trainer.lightning_module if trainer.strategy.model is None else trainer.strategy.model
        join_all(self.callbacks, RunHost("lightning", trainer, model, list(trainer.optimizers), replays, self._undo))

    def train_start(self) -> None:
        """Show what there is to know before the first step."""
        preflight(lambda: lightning_setting(self._trainer, self.callbacks))

    def train_batch_start(self, batch: Any, batch_index: int) -> None:
        """Note a micro-batch: its size weighs its loss."""
        self._batch_index = batch_index
        self._suites.tally.begin(batch)
        self._suites.facts.see_batch(batch)

    def before_backward(self, loss: Tensor) -> None:
        """Take the loss, and count: a step without any backward pass (training_step returned None) is no step."""
        self._num_backwards += 1
        # Lightning has divided it by the number of micro-batches and multiplied it by the scaler's scale.
        scale: Any = getattr(_scaler_of(self._trainer.precision_plugin), "_scale", None)
        divisor = self._divisor()
        if divisor > 1:
            scale = 1.0 / divisor if scale is None else scale / divisor
        self._suites.tally.add(loss, scale=scale)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the suite of an optimizer, unless a clip in manual optimization has done so for this step."""
        self._run(optimizer)

    def train_batch_end(self) -> None:
        """Close the steps of this batch; a clip without a step after it was none."""
        self.settle()
        if self._has_moved:
            self._has_moved, self._num_backwards = False, 0
        for _, suite in self._suites:
            if suite.is_open:
                suite.abandon()

    def settle(self) -> None:
        """Close the steps whose optimizer has moved."""
        for number, suite in self._suites:
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
            callback.driver = callback.host = None
        while self._undo:
            self._undo.pop()()
        try:
            self.settle()
        except Exception:
            if not after_exception:
                raise
            logger.exception("closing a step after an exception failed as well")
        self._suites.close(after_exception=after_exception)
        self._suites.replays.stop()

    def save_checkpoint(self, name: str) -> str:
        """See `save_with_trainer`."""
        return save_with_trainer(self._trainer, name)

    def _is_done(self, number: int, suite: Suite) -> bool:
        """Whether a step is open whose optimizer has moved since it was measured."""
        return suite.is_open and bool(self._trainer.global_step > self._steps_at_run[number])

    def _run(self, optimizer: torch.optim.Optimizer) -> Suite | None:
        suite = self._suite(optimizer)
        if suite is None:
            return None
        self.settle()  # one more step of this optimizer within a batch of manual optimization
        if not suite.is_open and (self._num_backwards or _has_gradients(optimizer)):
            plugin = self._trainer.precision_plugin
            number = self._number_of(optimizer)
            self._steps_at_run[number] = self._trainer.global_step
            scaler = _scaler_of(plugin)
            suite.run(
                grad_scale=scale_still_in(scaler, optimizer),
                is_scaled=scaler is not None,
                losses=self._suites.tally.take(number),
                position=Position(
                    self._batch_index, self._num_backwards, self._divisor(), epoch=int(self._trainer.current_epoch)
                ),
            )
        return suite

    def _divisor(self) -> int:
        """What Lightning divides every loss by; it leaves losses of manual optimization alone."""
        trainer = self._trainer
        return int(trainer.accumulate_grad_batches) if trainer.lightning_module.automatic_optimization else 0

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
        module = trainer.lightning_module
        model = module if trainer.strategy.model is None else trainer.strategy.model
        return self._suites.get(number, model=model, optimizer=optimizer, groups=_groups_of(trainer))

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands before the strategy's `training_step`: the latest moment before a micro-batch draws random numbers."""
        replays = self._suites.replays
        if not self.is_closed and not replays.is_running:
            replays.begin(args, kwargs, device=self._trainer.strategy.root_device)
        return original(*args, **kwargs)

    def _after_closure(self, original: Callable[..., None], model: Any, optimizer: Any) -> None:
        """Stands where Lightning has run all hooks and clipped; torch's own step goes on from here."""
        original(model, optimizer)
        self._before_torch_step(getattr(optimizer, "_optimizer", optimizer))

    def _before_torch_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        suite = None if self.is_closed else self._suites.existing(self._number_of(optimizer))
        if suite is not None:
            suite.before_step()

    def _clip(
        self,
        original: Callable[..., None],
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Stands before the precision plugin's `clip_gradients`."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        module = self._trainer.lightning_module
        suite = self._suite(inner) if module.automatic_optimization else self._run(inner)
        if clip_val and clip_val > 0 and not self._has_warned_of_clips:
            self._has_warned_of_clips = warn_of_two_clips(self.callbacks, f"clip_gradients(..., {clip_val})")
        original(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
        if suite is not None and suite.is_open and clip_val and clip_val > 0:
            # Hooks of the module's own may have changed the gradients before they came here.
            hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
            is_plain = gradient_clip_algorithm == "norm" and not any(is_overridden(module, hook) for hook in hooks)
            suite.after_clip(max_norm=float(clip_val) if is_plain else None)


def _groups_of(trainer: Any) -> Any:
    return getattr(trainer.lightning_module, "stabilizer_groups", None)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _scaler_of(plugin: Any) -> Any:
    return getattr(plugin, "scaler", None)


def _refuse_strategy(strategy: Any) -> None:
    if "DeepSpeedStrategy" in {kind.__name__ for kind in type(strategy).__mro__}:
        raise ValueError(
            f"strategy={type(strategy).__name__}: DeepSpeed ZeRO keeps gradients in partitions of its own, where no "
            "callback can see them. Use FSDPStrategy or ModelParallelStrategy (FSDP2), or set STABILIZER_DISABLE=1 to "
            "train without the stabilizer callbacks."
        )


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
