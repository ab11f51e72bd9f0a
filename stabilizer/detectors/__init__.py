"""Detectors of what a loss should not do: jump, drift upwards, scatter more. On the host, in plain numbers."""

from __future__ import annotations

from stabilizer.detectors.detection import Detection, DetectionKind
from stabilizer.detectors.detector import LossDetector
from stabilizer.detectors.folding import AlarmFolder

__all__ = ["AlarmFolder", "Detection", "DetectionKind", "LossDetector"]
