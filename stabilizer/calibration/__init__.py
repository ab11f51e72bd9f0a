"""Fixed thresholds from a recorded run: what `stabilizer calibrate` does."""

from __future__ import annotations

from stabilizer.calibration.block import block
from stabilizer.calibration.mistakes import CalibrationError
from stabilizer.calibration.running import Calibration, calibrate_log

__all__ = ["Calibration", "CalibrationError", "block", "calibrate_log"]
