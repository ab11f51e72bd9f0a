"""Callbacks that keep large-model training stable: gradient statistics by layer, measured on the device.

`import stabilizer` loads torch and nothing else; the callbacks are in `stabilizer.callbacks`.
"""

from stabilizer import rollout, thresholds
from stabilizer.errors import StabilizerWarning, TrainingStoppedError
from stabilizer.functional import gradient_norms
from stabilizer.gating import token_gate
from stabilizer.parameters import ParameterIndex
from stabilizer.store import GradientStore

__version__ = "0.1.0"

__all__ = [
    "GradientStore",
    "ParameterIndex",
    "StabilizerWarning",
    "TrainingStoppedError",
    "__version__",
    "gradient_norms",
    "rollout",
    "thresholds",
    "token_gate",
]
