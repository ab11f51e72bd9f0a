"""A suite whose model lives on a fake accelerator, where any wait of the host raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.suite import Suite
from tests.counting import host_may_wait
from tests.models import TinyTransformer

__all__ = ["SilentSink", "fake_suite"]


class SilentSink:
    """A logger that takes nothing: no copy ever arrives on a fake device."""

    is_logging = True

    def scalars(self, *args: Any) -> None:
        """Fail."""
        raise AssertionError("a copy without values has arrived")

    show = picture = charts = text = arguments = scalars


def fake_suite(callbacks: Sequence[StabilizerCallback], **options: Any) -> Suite:
    """A suite after its first step, which builds the index: constants are copied to the device then.

    Args:
        callbacks: All of them.
        **options: Of `Suite`.
    """
    with host_may_wait():
        with torch.device("cuda"):
            model = TinyTransformer()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sink: Any = SilentSink()
        suite = Suite(callbacks, model=model, optimizer=optimizer, sink=sink, **options)
        suite.run()
        suite.finish()
    return suite
