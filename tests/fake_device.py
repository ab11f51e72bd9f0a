"""The parts of `tests.counting.fake_cuda` that stand for the device itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Event", "HostReadError", "device_guard", "refuse_to_wait"]


class HostReadError(RuntimeError):
    """Under `fake_cuda`: the host would have waited for the device."""


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing runs, so there is nothing to mark."""

    def query(self) -> bool:
        """Never reached."""
        return False

    def synchronize(self) -> None:
        """Refused."""
        refuse_to_wait()


def refuse_to_wait(*args: Any, **kwargs: Any) -> None:
    """Stands for `torch.cuda.synchronize`."""
    raise HostReadError("The host would wait in synchronize(): ask query() and come back a step later.")


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Give a CPU build the do-nothing CUDA guard that torch gives a CUDA build without a device.

    Without it `float(t)`, `t[0]`, `t.copy_(u)` and more fail on a fake CUDA tensor with "PyTorch is not linked with
    support for cuda devices", whether they wait or not. torch installs that guard only in place of one that counts
    no devices: the guard of the lazy device is such a one, and is put there first.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    registry = (ctypes.c_void_p * 18).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, lazy = 1, 17  # c10::DeviceType
    if registry[cuda] is not None:
        yield
        return
    registry[cuda] = registry[lazy]
    torch._C._ensureCUDADeviceGuardSet()
    try:
        yield
    finally:
        registry[cuda] = None
