"""DrillCallback: faults put into a training on purpose, to hear whether the alarms ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.drill_running import Drilling
from stabilizer.errors import logger
from stabilizer.faults import Fault, FaultSpec, parse_faults
from stabilizer.names import Granularity
from stabilizer.reduction import rank
from stabilizer.thresholds.arguments import check_whole

__all__ = ["DrillCallback"]


class DrillCallback(StabilizerCallback):
    """Drills the alarm: breaks something at a step that you name, and says so. Without faults it does nothing.

    A fault is a mapping of its `kind` and `step`, and of where it is: `nan_gradient`, `inf_gradient`, `layer_spike`,
    `token_loss`, `bit_flip`, `corrupted_batch`, `stuck_loss_scale`, `dead_rank` or `learning_rate_jump`; see
    `stabilizer.faults.Fault` for the fields. docs/callbacks/drill.md has what each alarm should say. Faults of a layer
    are put into a rank's own gradient before any reduction, and come again when the micro-batch is run again, unless
    told otherwise. What a fault changes beside gradients is put back when its step is over: the batch, weights,
    learning rates and loss scale. What training makes of it stays.

    Args:
        faults: What is to happen.
        seed: Of what a fault leaves open: the layer, the parameter, the element, the tokens.
        every_n_steps: Interval of `drill/faults` in the logs, in optimizer steps: how many faults were due at a step.
        layers: Means nothing here; faults have layers of their own.
        exclude: Means nothing here.
        granularity: Means nothing here.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If a fault is none.

    Example:
        >>> drill = DrillCallback(faults=[{"kind": "nan_gradient", "step": 200, "layer": "layers.3"}])
        >>> drill.faults[0].repeats
        'always'
    """

    is_gated = False
    #: Whether it says what it breaks. False where the alarms alone shall say it.
    is_announced = True

    def __init__(
        self,
        *,
        faults: Sequence[FaultSpec] = (),
        seed: int = 0,
        every_n_steps: int = 1,
        layers: list[int | str] | None = None,
        exclude: Sequence[str] = (),
        granularity: Granularity = "block",
        name: str = "",
        strict: bool = False,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            layers=layers,
            exclude=exclude,
            granularity=granularity,
            name=name,
            strict=strict,
        )
        self.faults: tuple[Fault, ...] = parse_faults(faults)
        self.seed = check_whole("seed", seed, low=0)
        self._drilling: Drilling | None = None

    def join_run(self, host: Any) -> None:
        """Hang the faults into a run."""
        self._drilling = None
        if self.faults:
            if rank() == 0:
                logger.warning("%s: %d faults will be put into this run on purpose", self.state_key, len(self.faults))
            self._drilling = Drilling(
                self.faults,
                seed=self.seed,
                host=host,
                next_step=self.next_step,
                console=self.console,
                is_announced=self.is_announced,
            )
            host.undo.append(self._end_run)

    def on_gradients(self, context: StepContext) -> None:
        """Before anything is run again."""
        if self._drilling is not None and not context.optimizer_index:
            self._drilling.close_gradients()

    def on_step_end(self, context: StepContext) -> None:
        """The faults of the step are over."""
        if self._drilling is None or context.optimizer_index:
            return
        self._drilling.end_step(context.step)
        if context.step % self.every_n_steps == 0:
            context.log(tags.DRILL_FAULTS, float(sum(fault.is_in(context.step) for fault in self.faults)))

    def charts(self) -> list[Chart]:
        """Faults, to see what they did."""
        return [Chart(ChartPage.ALARMS, "Faults of the drill, on purpose", lines=(tags.DRILL_FAULTS,))]

    def limitations(self, setting: Any) -> list[str]:
        """The faults themselves: nobody shall overlook them."""
        return [f"faults[{number}], on purpose: {fault}" for number, fault in enumerate(self.faults)]

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        return {**super().hyperparameters(), "faults": [fault.as_dict() for fault in self.faults], "seed": self.seed}

    def _end_run(self) -> None:
        self._drilling = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_drilling": None}
