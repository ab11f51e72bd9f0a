"""What an optimizer does to the parameters, and what its state says of the steps to come."""

from __future__ import annotations

from stabilizer.optimizer_health.embeddings import Embedding, find_embeddings
from stabilizer.optimizer_health.layers import OptimizerLayers
from stabilizer.optimizer_health.moments import (
    Moments,
    first_step,
    largest_step,
    moment_sums,
    moments_of,
    steps_until_back,
    whole_way,
)
from stabilizer.optimizer_health.readings import (
    OPTIMIZER_KINDS,
    OptimizerHistory,
    OptimizerLimits,
    OptimizerReading,
)
from stabilizer.optimizer_health.rows import NUM_DECILES, ROW_FIGURES, RowBook, row_sums
from stabilizer.optimizer_health.swallowing import is_low_precision, swallowed_parts, swallowed_updates
from stabilizer.optimizer_health.updates import (
    Rate,
    copies,
    learning_rates,
    per_rate,
    shrink_updates_,
    update_coefficients,
    update_norms,
)

__all__ = [
    "NUM_DECILES",
    "OPTIMIZER_KINDS",
    "ROW_FIGURES",
    "Embedding",
    "Moments",
    "OptimizerHistory",
    "OptimizerLayers",
    "OptimizerLimits",
    "OptimizerReading",
    "Rate",
    "RowBook",
    "copies",
    "find_embeddings",
    "first_step",
    "is_low_precision",
    "largest_step",
    "learning_rates",
    "moment_sums",
    "moments_of",
    "per_rate",
    "row_sums",
    "shrink_updates_",
    "steps_until_back",
    "swallowed_parts",
    "swallowed_updates",
    "update_coefficients",
    "update_norms",
    "whole_way",
]
