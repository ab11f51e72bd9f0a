"""Checkpoints: verified without executing anything, marked, kept, and found again."""

from stabilizer.checkpoints.finding import GoodCheckpoint, last_good_checkpoint
from stabilizer.checkpoints.guard_file import Expected, Guard, GuardedFile, Weight, read_guard
from stabilizer.checkpoints.verifying import CheckpointChangedError, verify_checkpoint

__all__ = [
    "CheckpointChangedError",
    "Expected",
    "GoodCheckpoint",
    "Guard",
    "GuardedFile",
    "Weight",
    "last_good_checkpoint",
    "read_guard",
    "verify_checkpoint",
]
