"""Reads what a run wrote for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["Run", "read_run"]


class Run:
    """All that the event files of one run hold.

    Attributes:
        scalars: Tag -> {step: value}.
        pictures: Tag -> steps.
        layouts: Number of Custom Scalars layouts.
        num_bytes: Size of the event files.
    """

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        everything = {"scalars": 0, "images": 0, "tensors": 0}
        events: Any = EventAccumulator(str(folder), size_guidance=everything)
        events.Reload()
        tags = events.Tags()
        self.scalars: dict[str, dict[int, float]] = {}
        for tag in tags["scalars"]:
            points = [(event.step, event.value) for event in events.Scalars(tag)]
            assert len({step for step, _ in points}) == len(points), f"{tag} has two points at one step: {points}"
            assert points == sorted(points, key=lambda point: point[0]), f"{tag} goes back in time"
            self.scalars[tag] = dict(points)
        self.pictures = {tag: [image.step for image in events.Images(tag)] for tag in tags["images"]}
        self.layouts = (
            len(events.Tensors("custom_scalars__config__")) if "custom_scalars__config__" in tags["tensors"] else 0
        )
        self.num_bytes = sum(path.stat().st_size for path in Path(folder).glob("events.out.tfevents.*"))

    def ours(self) -> dict[str, dict[int, float]]:
        """The scalars of the package."""
        return {tag: points for tag, points in self.scalars.items() if "grad_norm/" in tag}


def read_run(folder: str | Path) -> Run:
    """Read a run.

    Args:
        folder: Where its event files are.
    """
    return Run(folder)
