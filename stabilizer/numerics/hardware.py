"""What a machine says of itself: name, temperature and memory errors of a device, where NVML can be read."""

from __future__ import annotations

import dataclasses
import importlib
import socket
from typing import Any

import torch

__all__ = ["Machine", "describe_machine", "read_machine"]

_NOT_READABLE = "not readable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A rank's machine and device.

    Attributes:
        host: Name of the machine.
        device: Name of the device.
        temperature: In degrees Celsius; `None` where it cannot be read.
        ecc_corrected: Memory errors that were corrected since the driver was loaded.
        ecc_uncorrected: Those that were not.
        note: Why something cannot be read.
    """

    host: str
    device: str = ""
    temperature: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    note: str = ""


def read_machine(device: torch.device) -> Machine:
    """Ask the host and, of a CUDA device, NVML (the package nvidia-ml-py, if it is installed); never raises.

    Args:
        device: Of this rank.

    Example:
        >>> read_machine(torch.device("cpu")).note
        'ECC and temperature are not readable: no CUDA device'
    """
    host = socket.gethostname()
    if device.type != "cuda":
        return Machine(host=host, device=device.type, note=f"ECC and temperature are {_NOT_READABLE}: no CUDA device")
    try:
        nvml: Any = importlib.import_module("pynvml")
    except Exception as error:
        note = f"ECC and temperature are {_NOT_READABLE}: {type(error).__name__}: {error} (pip install nvidia-ml-py)"
        return Machine(host=host, device=str(device), note=note)
    try:
        nvml.nvmlInit()
        try:
            return _asked(nvml, host, device)
        finally:
            nvml.nvmlShutdown()
    except Exception as error:
        note = f"ECC and temperature are {_NOT_READABLE}: {type(error).__name__}: {error}"
        return Machine(host=host, device=str(device), note=note)


def describe_machine(machine: Machine) -> str:
    """One line.

    Args:
        machine: Of a rank.

    Example:
        >>> describe_machine(Machine(host="n7", device="H200", temperature=91.0, ecc_corrected=3, ecc_uncorrected=1))
        'host n7 (H200): 91 C, 1 ECC errors that were not corrected, 3 that were'
    """
    if machine.temperature is None and machine.ecc_uncorrected is None:
        return f"host {machine.host}" + (f" ({machine.note})" if machine.note else "")
    heat = "temperature not readable" if machine.temperature is None else f"{machine.temperature:.0f} C"
    ecc = "ECC not readable"
    if machine.ecc_uncorrected is not None:
        corrected = _NOT_READABLE if machine.ecc_corrected is None else str(machine.ecc_corrected)
        ecc = f"{machine.ecc_uncorrected} ECC errors that were not corrected, {corrected} that were"
    return f"host {machine.host} ({machine.device}): {heat}, {ecc}"


def _asked(nvml: Any, host: str, device: torch.device) -> Machine:
    handle = _handle(nvml, device)
    name: Any = nvml.nvmlDeviceGetName(handle)
    notes: list[str] = []

    def tried(what: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, what)(handle, *arguments)
        except Exception as error:  # a device without ECC, a driver without the call
            notes.append(f"{what}: {error}")
            return None

    heat = tried("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    volatile = nvml.NVML_VOLATILE_ECC
    corrected = tried("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile)
    uncorrected = tried("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile)
    return Machine(
        host=host,
        device=name.decode() if isinstance(name, bytes) else str(name),
        temperature=None if heat is None else float(heat),
        ecc_corrected=None if corrected is None else int(corrected),
        ecc_uncorrected=None if uncorrected is None else int(uncorrected),
        note="; ".join(notes),
    )


def _handle(nvml: Any, device: torch.device) -> Any:
    """By its UUID where torch knows it: numbers differ where CUDA_VISIBLE_DEVICES hides some."""
    given: Any = device.index
    index = torch.cuda.current_device() if given is None else given
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return nvml.nvmlDeviceGetHandleByIndex(index)
