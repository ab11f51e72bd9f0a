"""What all replays of a step run in: a guard, a host that is quiet, and sensors that see their local norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from stabilizer.localize.guard import Guard
from stabilizer.localize.replaying import Replayer
from stabilizer.localize.tensor_group import SummingSensors
from stabilizer.sensors import Sensors
from stabilizer.store import GradientStore

__all__ = ["guarded"]


@contextlib.contextmanager
def guarded(replayer: Replayer, *, store: GradientStore, sensors: Sensors) -> Iterator[tuple[Guard, Sensors]]:
    """Run micro-batches again inside of this; afterwards everything is what it was.

    Args:
        replayer: The host's.
        store: Holds the step's gradients.
        sensors: Running while training.

    Yields:
        The guard, entered; and these sensors, or others where they cannot be used while training.

    Raises:
        RuntimeError: If no sensors can see a local norm.
    """
    guard = Guard(replayer.model, parameters=list(store.index.parameters), device=store.device)
    # Compiled code has the gate's absence built in, and frees what a second pass needs.
    stance = torch.compiler.set_stance("force_eager")
    with guard, replayer.quiet(), stance:
        searching = _searching(replayer, store, sensors)
        try:
            yield guard, searching
        finally:
            searching.take()
            if searching is not sensors:
                searching.close()


def _searching(replayer: Replayer, store: GradientStore, sensors: Sensors) -> Sensors:
    if sensors.reason is None:
        return sensors
    others = SummingSensors(replayer.model, store.index)
    others.start()
    if others.reason is not None:
        raise RuntimeError(f"no local norms: {others.reason}")
    return others
