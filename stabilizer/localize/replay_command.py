"""The command `stabilizer replay`: its arguments are the options, its docstring is the help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabilizer.localize.incident import Incident

__all__ = ["ReplayError", "replay"]


class ReplayError(Exception):
    """An incident that cannot be loaded or run again; the message, one line, is all that a user sees."""


def replay(folder: Path, *, model: str | None = None, batch: str = "batch.safetensors") -> None:
    """Show an incident again, with the micro-batch that was saved; with a model, run that micro-batch once more.

    The norm is that of the micro-batch alone, with the weights that the function gives: those of the checkpoint before
    the spike give the norm that was observed, up to dropout, precision and the divisor of an accumulation.

    Args:
        folder: Folder of the incident, such as incidents/step_412, or incident.json in it.
        model: "module:function", of a function without arguments that returns a model and a function of the batch that
            returns the loss; or the model alone, whose output is the loss or has it as `loss`.
        batch: File of the micro-batch in the folder.

    Raises:
        ReplayError: If the folder has no incident, or the model cannot be run.
    """
    from stabilizer.localize.table import print_incident
    from stabilizer.localize.writing import INCIDENT_FILE

    folder = folder.parent if folder.name == INCIDENT_FILE else folder
    incident = _incident(folder)
    print_incident(incident)
    path = folder / batch
    if not path.exists():
        if model is not None:
            others = ", ".join(sorted(one.name for one in folder.glob("*.safetensors"))) or "none"
            raise ReplayError(
                f"{path}: no micro-batch to run (here: {others}); GradLocCallback(dump_batch=True) saves it"
            )
        _say("\nNo micro-batch was saved: GradLocCallback(dump_batch=True) does.")
        return
    loaded, place = _batch(path)
    _say(f"\nMicro-batch {place['micro_batch']} of rank {place['rank']} ({path.name}):")
    _say("\n".join(f"  {line}" for line in _describe(loaded)))
    if model is not None:
        from stabilizer.localize.rerun import run_again

        _compare(run_again(model, loaded), incident, place)


def _incident(folder: Path) -> Incident:
    from stabilizer.localize.incident import Incident
    from stabilizer.localize.writing import INCIDENT_FILE

    path = folder / INCIDENT_FILE
    try:
        return Incident.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = sorted(one.parent.name for one in folder.glob(f"*/{INCIDENT_FILE}")) if folder.is_dir() else []
        hint = f"; give one of the folders in it: {', '.join(found[:5])}" if found else ""
        raise ReplayError(f"{path}: no incident ({error.strerror or error}){hint}") from None
    except ValueError as error:
        raise ReplayError(f"{path}: {error}") from None


def _batch(path: Path) -> tuple[Any, dict[str, Any]]:
    from stabilizer.localize.writing import load_batch

    try:
        return load_batch(path)
    except ImportError:
        raise ReplayError(f"{path} is read with safetensors, which is missing: pip install safetensors") from None
    except (OSError, ValueError) as error:
        raise ReplayError(str(error)) from None


def _describe(loaded: Any) -> list[str]:
    from stabilizer.localize.entries import tensor_entries

    entries = tensor_entries(loaded)
    width = max((len(key) for key in entries), default=0)
    return [
        f"{key:<{width}}  {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for key, tensor in entries.items()
    ] or ["no tensors"]


def _compare(norm: float, incident: Incident, place: dict[str, Any]) -> None:
    observed = [
        one.norm
        for one in incident.micro_batches
        if (one.rank, one.micro_batch) == (place["rank"], place["micro_batch"])
    ]
    then = f"{observed[0]:.6g} was observed for it" if observed else "its own norm was not recorded"
    _say(f"\nGradient norm of this micro-batch: {norm:.6g} now; {then}; {incident.observed_norm:.6g} for the step")


def _say(text: str) -> None:
    """Print lines that nothing wraps or colours, so that they can be copied."""
    from rich.console import Console

    Console().print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
