"""The callbacks. Each works in a Lightning Trainer of either package, in an Accelerate loop and in a plain one.

See `attach` for loops, and `StabilizerCallback` for a callback of your own.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import stabilizer.callbacks.lightning  # noqa: F401  (registers what serves Lightning's hooks)
from stabilizer.callbacks.adaptive_clip import AdaptiveClipThreshold
from stabilizer.callbacks.attachment import attach
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart
from stabilizer.callbacks.checkpoint_guard import CheckpointGuardCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.drill import DrillCallback
from stabilizer.callbacks.early_warning import EarlyWarningCallback
from stabilizer.callbacks.grad_loc import GradLocCallback
from stabilizer.callbacks.grad_noise_scale import GradNoiseScaleCallback
from stabilizer.callbacks.grad_norm import GradNormCallback, NormHistory
from stabilizer.callbacks.layer_clip import LayerClipCallback
from stabilizer.callbacks.layer_health import LayerHealthCallback
from stabilizer.callbacks.loss_mean_var import LossMeanVarCallback
from stabilizer.callbacks.numerics import NumericsCallback
from stabilizer.callbacks.rollout_mismatch import RolloutMismatchCallback
from stabilizer.callbacks.update_clip import UpdateClipCallback
from stabilizer.checkpoints import last_good_checkpoint
from stabilizer.config import load_callbacks, recommended

if TYPE_CHECKING:
    from stabilizer.callbacks.transformers import StabilizerTrainerCallback

__all__ = [
    "AdaptiveClipThreshold",
    "Chart",
    "CheckpointGuardCallback",
    "DrillCallback",
    "EarlyWarningCallback",
    "GradLocCallback",
    "GradNoiseScaleCallback",
    "GradNormCallback",
    "LayerClipCallback",
    "LayerHealthCallback",
    "LossMeanVarCallback",
    "NormHistory",
    "NumericsCallback",
    "RolloutMismatchCallback",
    "StabilizerCallback",
    "StabilizerTrainerCallback",
    "StepContext",
    "UpdateClipCallback",
    "attach",
    "last_good_checkpoint",
    "load_callbacks",
    "recommended",
]

if importlib.util.find_spec("transformers") is None:
    # A star import shall not fail. Type checkers understand `remove`, and would take the name from everybody.
    del __all__[__all__.index("StabilizerTrainerCallback")]


def __getattr__(name: str) -> Any:
    # transformers is slow to import, and need not be there.
    if name != "StabilizerTrainerCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from stabilizer.callbacks.transformers import StabilizerTrainerCallback
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "accelerate"):
            raise
        raise ImportError(
            f'{name} needs {error.name}, which is not installed: pip install "torch-stabilizer[transformers]"',
            name=error.name,
        ) from error
    return StabilizerTrainerCallback
