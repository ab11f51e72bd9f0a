"""Threshold rules: from the norms of a run so far to what the next one is held against.

A rule works on a vector of layers at once, on the device, and never makes the host wait. `LayerThresholds` puts rules
together over named layers.

Example:
    >>> import torch
    >>> from stabilizer import thresholds
    >>> rule = thresholds.make_rule("mean_multiple")
    >>> rule.start(1, device="cpu")
    >>> for _ in range(50):
    ...     rule.update(torch.tensor([0.2]))
    >>> rule.thresholds(torch.tensor([53.7]))
    tensor([1.])
"""

from stabilizer.thresholds.fixed import Fixed
from stabilizer.thresholds.layered import LayerThresholds
from stabilizer.thresholds.making import RULES, RuleSpec, make_rule
from stabilizer.thresholds.mean_multiple import MeanMultiple
from stabilizer.thresholds.quantile import Quantile
from stabilizer.thresholds.robust_log import RobustLog
from stabilizer.thresholds.rule import ThresholdRule
from stabilizer.thresholds.zscore import ZScore

__all__ = [
    "RULES",
    "Fixed",
    "LayerThresholds",
    "MeanMultiple",
    "Quantile",
    "RobustLog",
    "RuleSpec",
    "ThresholdRule",
    "ZScore",
    "make_rule",
]
