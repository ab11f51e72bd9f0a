"""IncidentWriter: incidents in a folder, private and within limits."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from torch import Tensor

from stabilizer.drawing import png
from stabilizer.errors import logger, warn
from stabilizer.localize.entries import batch_of, nested, tensor_entries, unknown_keys
from stabilizer.localize.incident import Incident
from stabilizer.localize.private_files import folder_size, write_file, write_folder
from stabilizer.localize.table import incident_text
from stabilizer.reduction import rank as current_rank

__all__ = ["BATCH_FILE", "INCIDENT_FILE", "IncidentWriter", "load_batch"]

INCIDENT_FILE = "incident.json"
BATCH_FILE = PurePath("batch.safetensors")
#: Positional and keyword arguments of a step function.
Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

_METADATA = "stabilizer"
_STEP_FOLDER = re.compile(r"step_\d+(_\d+)?")
_MEGABYTE = 1_000_000


class IncidentWriter:
    """Writes every incident to a folder `step_<n>` of its own.

    Folders and files are the owner's only. What is in the folder already counts, so that a resumed run has the limits
    of the run before. A disk that is full or cannot be written is told of once and ends nothing.

    Args:
        folder: For all incidents; made when the first one is written.
        max_incidents: Largest number of incidents in the folder; `None` for no limit.
        max_dump_mb: Largest size of the folder in megabytes; `None` for no limit.
        dump_batch: Whether the micro-batch is saved, as safetensors: its tensors, nothing else of it.
        redact: Keys of the batch that are not saved: the last part ("user"), or more of it ("meta.user").

    Raises:
        ValueError: If a limit is not above 0, or `dump_batch` is asked for without safetensors installed.

    Example:
        >>> import tempfile
        >>> incident = Incident(step=7, type="D", observed_norm=9.0, threshold=3.0)
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = IncidentWriter(Path(name)).write(incident)
        ...     print(folder.name, sorted(path.name for path in folder.iterdir()))
        step_7 ['incident.json', 'incident.txt']
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_incidents: int | None = 20,
        max_dump_mb: float | None = 256,
        dump_batch: bool = False,
        redact: Sequence[str] = (),
    ) -> None:
        for name, limit in (("max_incidents", max_incidents), ("max_dump_mb", max_dump_mb)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name}={limit!r}: expected more than 0, or None for no limit")
        if isinstance(redact, str):
            raise ValueError(f"redact={redact!r}: expected a list of keys")
        if dump_batch and importlib.util.find_spec("safetensors") is None:
            raise ValueError(
                "dump_batch=True: micro-batches are saved with safetensors, which is missing: pip install safetensors"
            )
        self.folder = Path(folder)
        self.max_incidents, self.max_dump_mb = max_incidents, max_dump_mb
        self.dump_batch, self.redact = dump_batch, list(redact)
        self._told: set[str] = set()

    @property
    def num_incidents(self) -> int:
        """How many incidents the folder has."""
        try:
            return sum(_STEP_FOLDER.fullmatch(path.name) is not None for path in self.folder.iterdir())
        except OSError:
            return 0

    @property
    def is_full(self) -> bool:
        """Whether the folder takes no further incident."""
        has_many = self.max_incidents is not None and self.num_incidents >= self.max_incidents
        return has_many or self._room() <= 0

    def write(
        self,
        incident: Incident,
        *,
        batch: Arguments | None = None,
        rank: int = 0,
        micro_batch: int = 0,
        figures: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Write an incident: JSON, the table as text, pictures, and with `dump_batch` the micro-batch.

        Args:
            incident: What was found.
            batch: Positional and keyword arguments of the micro-batch's step function.
            rank: Whose micro-batch it is.
            micro_batch: Its index in the step.
            figures: Matplotlib figures by the names of their files, without the ending.

        Returns:
            The folder, or `None` if it was not written.
        """
        contents = {
            INCIDENT_FILE: incident.to_json().encode() + b"\n",
            "incident.txt": incident_text(incident).encode(errors="replace"),
        }
        room = self._room() - sum(map(len, contents.values()))
        if self._is_at_limit(room):
            return None
        extras = self._drawn(figures or {})
        saved = self._saved(batch, room, rank=rank, micro_batch=micro_batch) if batch is not None else None
        if saved is not None:
            extras[BATCH_FILE.name] = saved
        for name, content in extras.items():
            if len(content) <= room:
                contents[name] = content
                room -= len(content)
            else:
                self._tell_no_room(name, len(content))
        try:
            return write_folder(self.folder, f"step_{incident.step}", contents)
        except OSError as error:
            self._tell_unwritten(error)
            return None

    def write_batch(self, folder: Path, batch: Arguments, *, rank: int, micro_batch: int) -> Path | None:
        """Write one more micro-batch, such as another rank's, beside an incident. Without `dump_batch` nothing.

        Args:
            folder: What `write` has returned.
            batch: Positional and keyword arguments of the micro-batch's step function.
            rank: Whose it is.
            micro_batch: Its index in the step.

        Returns:
            The file, or `None` if it was not written.
        """
        content = self._saved(batch, self._room(), rank=rank, micro_batch=micro_batch)
        if content is None:
            return None
        path = folder / f"{BATCH_FILE.stem}_rank{rank}_micro_batch{micro_batch}{BATCH_FILE.suffix}"
        try:
            write_file(path, content)
        except OSError as error:
            self._tell_unwritten(error)
            return None
        return path

    def write_pictures(self, folder: Path, figures: Mapping[str, Any]) -> None:
        """Write pictures into an incident's folder, as far as there is room.

        Args:
            folder: What `write` has returned.
            figures: Matplotlib figures by the names of their files, without the ending.
        """
        for name, content in self._drawn(figures).items():
            if len(content) > self._room():
                self._tell_no_room(name, len(content))
                continue
            try:
                write_file(folder / name, content)
            except OSError as error:
                self._tell_unwritten(error)

    def _room(self) -> float:
        return math.inf if self.max_dump_mb is None else self.max_dump_mb * _MEGABYTE - folder_size(self.folder)

    def _is_at_limit(self, room: float) -> bool:
        if self.max_incidents is not None and self.num_incidents >= self.max_incidents:
            reason = f"has {self.num_incidents} incidents, and max_incidents={self.max_incidents}"
        elif room < 0:
            size = folder_size(self.folder) / _MEGABYTE
            reason = f"has {size:.3g} MB, and max_dump_mb={self.max_dump_mb:g}"
        else:
            return False
        self._tell(
            "full",
            f"{self.folder} {reason}: no further incident is written there; move the old ones or raise the limit",
        )
        return True

    def _saved(self, batch: Arguments, room: float, *, rank: int, micro_batch: int) -> bytes | None:
        """The tensors of a micro-batch as a file, if they are to be saved and fit."""
        if not self.dump_batch:
            return None
        found = batch_of(*batch)
        if unknown := unknown_keys(found, self.redact):
            keys = sorted(tensor_entries(found))
            self._tell("redact", f"redact={unknown}: the batch has no such key, and saves all of {keys}")
        entries = tensor_entries(found, redact=self.redact)
        try:
            size = sum(tensor.nbytes for tensor in entries.values())
            if size > room:
                self._tell_no_room(str(BATCH_FILE), size)
                return None
            return _encoded(entries, {"rank": rank, "micro_batch": micro_batch, "keys": list(entries)})
        except Exception as error:
            self._tell("batch", f"the micro-batch of an incident could not be saved: {error!r}")
            return None

    def _drawn(self, figures: Mapping[str, Any]) -> dict[str, bytes]:
        files = {}
        for name, figure in figures.items():
            try:
                files[f"{name}.png"] = png(figure)
            except Exception as error:
                self._tell("pictures", f"the picture {name} of an incident could not be drawn: {error!r}")
        return files

    def _tell_no_room(self, name: str, size: int) -> None:
        self._tell(
            "room",
            f"{self.folder}: {name} of an incident ({size / _MEGABYTE:.3g} MB) is left out, since the folder would be "
            f"larger than max_dump_mb={self.max_dump_mb:g}; move the old ones or raise it",
        )

    def _tell_unwritten(self, error: OSError) -> None:
        self._tell("disk", f"{self.folder}: an incident could not be written, and training goes on: {error}")

    def _tell(self, about: str, message: str) -> None:
        """Once of each kind, on whichever rank it happens."""
        if about in self._told:
            return
        self._told.add(about)
        if current_rank() == 0:
            warn(message)
        else:
            logger.warning(message)


def load_batch(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read a micro-batch that `IncidentWriter` has saved.

    Args:
        path: Of the file.

    Returns:
        The batch in containers, see `nested`, and its `rank` and `micro_batch`.

    Raises:
        ValueError: If the file is none of these.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            place = json.loads((file.metadata() or {})[_METADATA])
            return nested({key: file.get_tensor(key) for key in place["keys"]}), place
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no micro-batch of an incident ({error})") from None


def _encoded(entries: Mapping[str, Tensor], place: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    tensors = {}
    for key, found in entries.items():
        sharded: Any = found
        local: Tensor = sharded.to_local() if hasattr(found, "to_local") else found
        # A copy of each: two views of one storage cannot be saved.
        tensors[key] = local.detach().to("cpu", copy=True).contiguous()
    return save(tensors, metadata={_METADATA: json.dumps(place)})
