"""SkipKeeper: reads the skip list of a run for all ranks alike, and keeps it beside the checkpoints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer.callbacks.hosting import stand_before
from stabilizer.callbacks.run_host import RunHost
from stabilizer.checkpoints.shelves import shelf_of
from stabilizer.errors import logger, warn
from stabilizer.recovery.skip_files import FILE_NAME, load_skip_text, read_skip_list, write_skip_list
from stabilizer.recovery.skip_list import SkipEntry, SkipList
from stabilizer.reduction import Reducer, rank, world_size

__all__ = ["SkipKeeper"]


class SkipKeeper:
    """A skip list and its files.

    Args:
        file: The one file; by default one beside every checkpoint that a run has gone on from.
        max_skips: Micro-batches of a rank that the list may have.

    Attributes:
        skips: The list.
        file: As given.
    """

    def __init__(self, file: Path | None, *, max_skips: int) -> None:
        self.file, self.max_skips = file, max_skips
        self.skips = SkipList()
        self._folders: list[Path] = []
        self._read: set[Path] = set()
        self._host: RunHost | None = None

    def forget(self) -> None:
        """Another run's list, and where that had its checkpoints, are not this one's."""
        if self.skips.entries:
            logger.info("another run begins: the skip list of the one before (%d entries) is not its", len(self.skips))
        self.skips.clear()
        self._folders = []

    def join(self, host: RunHost) -> None:
        """Read the list of a run that begins, and those of checkpoints that it loads; on every rank.

        Args:
            host: Of the run.

        Raises:
            ValueError: If the list is none.
        """
        self.skips.renumber(world_size())
        self._read, self._host = set(), host
        self.read_resumed()
        if host.kind == "accelerate" and self.file is None:
            host.undo.append(stand_before(host.engine, "load_state", self._before_load))
        host.undo.append(self._leave)

    def read_resumed(self) -> None:
        """Read the list beside the checkpoint that a Trainer resumes from; sharded strategies name it late."""
        is_trainer = self._host is not None and self._host.kind == "lightning"
        resumed_from = self._host.engine.ckpt_path if self._host is not None and is_trainer else None
        self.read(Path(str(resumed_from)) if resumed_from else None)

    def read(self, checkpoint: Path | None) -> None:
        """Read the list on the first rank, for all of them; a collective.

        Args:
            checkpoint: That the run goes on from.

        Raises:
            ValueError: If it is none, or leaves out too much; on every rank.
        """
        file = self.file if self.file is not None else checkpoint and self._folder_of(checkpoint) / FILE_NAME
        if file is None or file in self._read:
            return
        self._read.add(file)
        text: str | None = None
        failure = ""
        if rank() == 0:
            try:
                text = load_skip_text(file)
            except ValueError as error:
                failure = str(error)
        if world_size() > 1:
            text, failure = Reducer(torch.device("cpu")).objects((text, failure))[0]
        if failure:
            raise ValueError(failure)
        if text is not None:
            self._take(file, read_skip_list(file, text))

    def room_for(self, entries: Sequence[SkipEntry]) -> str:
        """Why entries may not be added; empty if they may.

        Args:
            entries: More of them.
        """
        num = SkipList([*self.skips.entries, *entries], num_ranks=world_size()).num_batches
        return f"{num} micro-batches would be left out, more than max_skips={self.max_skips}" * (num > self.max_skips)

    def add(self, entries: Sequence[SkipEntry], checkpoints: Iterable[Path]) -> None:
        """Add entries, and note where the list is to be written.

        Args:
            entries: More of them.
            checkpoints: That a run may go on from.
        """
        self.skips.extend(entries)
        self._folders = list(dict.fromkeys([*self._folders, *map(self._folder_of, checkpoints)]))

    def write(self) -> None:
        """Write the list on the first rank.

        Raises:
            OSError: If a file cannot be written.
        """
        files = [folder / FILE_NAME for folder in self._folders] if self.file is None else [self.file]
        for file in files if rank() == 0 else ():
            write_skip_list(file, self.skips.entries)

    def state_dict(self) -> list[dict[str, Any]]:
        """The list, plain types and tensors: a checkpoint may be moved away from its file."""
        found = [dataclasses.asdict(entry) for entry in self.skips.entries]
        return [
            {**one, "sample_ids": [torch.tensor(ids, dtype=torch.int64) for ids in one["sample_ids"]]} for one in found
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Add what another one knew.

        Args:
            state: Of `state_dict`.
        """
        samples = [tuple(tuple(ids.tolist()) for ids in one["sample_ids"]) for one in state]
        self.skips.extend(SkipEntry(**{**one, "sample_ids": ids}) for one, ids in zip(state, samples, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # A copy takes part in no run.
        return {**self.__dict__, "_host": None}

    def _before_load(
        self, original: Callable[..., Any], input_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Stands before the accelerator's `load_state`."""
        result = original(input_dir, *args, **kwargs)
        if input_dir is None and self._host is not None:
            input_dir = os.path.join(self._host.engine.project_dir, "checkpoints", "newest")
        self.read(None if input_dir is None else Path(input_dir))
        return result

    def _folder_of(self, checkpoint: Path) -> Path:
        """Where the list of a checkpoint is: beside it, whichever folder that waits in."""
        folder = shelf_of(checkpoint)
        host = self._host
        if host is None or host.kind != "accelerate":
            return folder
        # It takes everything in there for a checkpoint with a number in its name, and fails where there is none.
        is_numbered = host.engine.project_configuration.automatic_checkpoint_naming
        return folder.parent if is_numbered and folder.name == "checkpoints" else folder

    def _leave(self) -> None:
        self._host = None

    def _take(self, file: Path, entries: Sequence[SkipEntry]) -> None:
        if reason := self.room_for(entries):
            raise ValueError(f"{file}: {reason}. Mend the file, delete it to train on all of them, or raise max_skips")
        self._folders = list(dict.fromkeys([*self._folders, file.parent]))
        self.skips.extend(entries)
        others = sorted({entry.num_ranks for entry in entries} - {world_size()})
        if others:
            warn(
                f"{file} has entries of runs with {', '.join(map(str, others))} ranks, and there are {world_size()}: a "
                "micro-batch is another one now. Of those entries only the samples that they name are left out, in "
                "later epochs"
            )
