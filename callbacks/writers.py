"""What goes into the loggers that take more than numbers: TensorBoard's writers, above all. No host is imported."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from stabilizer.callbacks.charts import Layout
from stabilizer.drawing import png

__all__ = ["WriterSink", "add_scalars", "is_summary_writer"]

# After the eight bytes of a PNG's signature and the head of its first part.
_PNG_SIZE = slice(16, 24)
_RGB = 3
#: `SummaryWriter.add_hparams` would make a run of its own; these are in every run.
_SESSION, _EXPERIMENT = "_hparams_/session_start_info", "_hparams_/experiment"
_PLUGIN = "hparams"


def is_summary_writer(writer: Any) -> bool:
    """Whether a writer is torch's own, so that whole summaries may be given to it.

    Args:
        writer: Of any kind.
    """
    module = sys.modules.get("torch.utils.tensorboard.writer")  # slow to import, and there is none without it
    if module is None or type(writer) is not module.SummaryWriter:
        return False
    return not {"add_scalar", "add_figure"} & vars(writer).keys()


def add_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write numbers of one step: to a writer of torch in one record, which is less than half as large as one for each.

    Args:
        writer: A `SummaryWriter`, or what looks like one.
        values: By tag.
        step: The optimizer step.
    """
    if not is_summary_writer(writer):
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        return
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    writer._get_file_writer().add_summary(summary, step)


class WriterSink:
    """Base of the sinks: what they write where a logger takes it. A host says which loggers there are."""

    def writers(self) -> list[Any]:
        """What the host's loggers write with, of any kind."""
        raise NotImplementedError

    def step_of(self, step: int) -> int:
        """What the host calls a step of ours.

        Args:
            step: Ours.
        """
        return step

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a matplotlib figure where a logger takes one."""
        for writer in self.writers():
            if is_summary_writer(writer):
                _add_png(writer, tag, png(figure), self.step_of(step))
            elif hasattr(writer, "add_figure"):
                writer.add_figure(tag, figure, self.step_of(step))

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text where a logger takes it."""
        for writer in self.writers():
            if hasattr(writer, "add_text"):
                writer.add_text(tag, text, self.step_of(step))

    def charts(self, layout: Layout) -> None:
        """Arrange TensorBoard's Custom Scalars page."""
        for writer in self.writers():
            if hasattr(writer, "add_custom_scalars"):
                writer.add_custom_scalars(layout)

    def arguments(self, values: Mapping[str, bool | float | str]) -> Callable[[bool], None]:
        """Show arguments as columns of TensorBoard's HParams page, beside those that somebody else shows of the run.

        TensorBoard reads the first ones of a run only. So ours are put into those that somebody writes from now on,
        until the function that is returned is called. It takes whether to write them if nobody has.
        """
        shown = [_Arguments(writer, values) for writer in self.writers() if is_summary_writer(writer)]

        def end(is_written: bool) -> None:
            for one in shown:
                one.end(is_written=is_written)

        return end


class _Arguments:
    """Puts arguments into the first ones of a run.

    Args:
        writer: Of torch.
        values: The arguments.
    """

    def __init__(self, writer: Any, values: Mapping[str, bool | float | str]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # Experiment, start of the session, and its end, which says that it was a success: nobody knows that yet.
        self._experiment, self._session, _ = hparams(dict(values), {})
        self._writer = writer._get_file_writer()
        self._missing = {_EXPERIMENT, _SESSION}
        self._add_summary = self._writer.add_summary
        self._writer.add_summary = self._merge

    def end(self, *, is_written: bool) -> None:
        """Let go of the writer.

        Args:
            is_written: Whether to write them if nobody has.
        """
        if vars(self._writer).get("add_summary") == self._merge:
            del self._writer.add_summary
        if is_written and len(self._missing) == 2:
            self._add_summary(self._experiment)
            self._add_summary(self._session)

    def _merge(self, summary: Any, *args: Any, **kwargs: Any) -> None:
        for value in getattr(summary, "value", ()):
            if value.tag in self._missing and value.metadata.plugin_data.plugin_name == _PLUGIN:
                self._missing.discard(value.tag)
                _put_into(value.metadata.plugin_data, self._session if value.tag == _SESSION else self._experiment)
        self._add_summary(summary, *args, **kwargs)


def _put_into(theirs: Any, ours: Any) -> None:
    """Add what is ours to the content of another's plugin data; a name that both have stays theirs."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]

    found = HParamsPluginData.FromString(theirs.content)
    own = HParamsPluginData.FromString(ours.value[0].metadata.plugin_data.content)
    for name, value in own.session_start_info.hparams.items():
        if name not in found.session_start_info.hparams and found.HasField("session_start_info"):
            found.session_start_info.hparams[name].CopyFrom(value)
    if found.HasField("experiment"):
        known = {info.name for info in found.experiment.hparam_infos}
        found.experiment.hparam_infos.extend(info for info in own.experiment.hparam_infos if info.name not in known)
    theirs.content = found.SerializeToString()


def _add_png(writer: Any, tag: str, content: bytes, step: int) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", content[_PNG_SIZE])
    image = Summary.Image(height=height, width=width, colorspace=_RGB, encoded_image_string=content)
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
