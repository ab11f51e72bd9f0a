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
        pages: Of the last one: page -> title -> regular expressions of its lines, or the tags of its band.
        texts: Tag -> {step: text}; without the ending that the writer adds.
        arguments: Name -> value, as the HParams page shows them.
        columns: Names of its columns.
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
        self.pages = _pages(events) if self.layouts else {}
        self.texts = {
            tag.removesuffix("/text_summary"): {
                event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)
            }
            for tag in tags["tensors"]
            if tag.endswith("/text_summary")
        }
        self.arguments, self.columns = _arguments(events)
        self.num_bytes = sum(path.stat().st_size for path in Path(folder).glob("events.out.tfevents.*"))

    def ours(self) -> dict[str, dict[int, float]]:
        """The scalars of the package."""
        return {tag: points for tag, points in self.scalars.items() if "grad_norm/" in tag}


def _pages(events: Any) -> dict[str, dict[str, list[str]]]:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    content = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    pages: dict[str, dict[str, list[str]]] = {}
    for category in Layout.FromString(content).category:
        page = pages.setdefault(category.title, {})
        for chart in category.chart:
            assert chart.title not in page, f"two charts {chart.title}"
            page[chart.title] = list(chart.multiline.tag)
            for series in chart.margin.series:
                page[chart.title] += [series.value, series.lower, series.upper]
    return pages


def _arguments(events: Any) -> tuple[dict[str, Any], set[str]]:
    from google.protobuf.json_format import MessageToDict
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found: dict[str, Any] = {}
    columns: set[str] = set()
    for tag in ("_hparams_/session_start_info", "_hparams_/experiment"):
        if tag in events.summary_metadata:
            content = events.SummaryMetadata(tag).plugin_data.content
            data = HParamsPluginData.FromString(content)
            found |= {name: MessageToDict(value) for name, value in data.session_start_info.hparams.items()}
            columns |= {info.name for info in data.experiment.hparam_infos}
    return found, columns


def read_run(folder: str | Path) -> Run:
    """Read a run.

    Args:
        folder: Where its event files are.
    """
    return Run(folder)
