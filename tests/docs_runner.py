"""Runs the Python and YAML blocks of a page, as a reader would from top to bottom."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stabilizer.callbacks import load_callbacks
from stabilizer.errors import StabilizerWarning
from tests.docs_blocks import Block, program, read_blocks
from tests.docs_setups import SETUPS, TRAINER
from tests.environments import ROOT
from tests.launcher import run_distributed

__all__ = ["NUM_RANKS", "run_page"]

NUM_RANKS = 2


class _Errors(logging.Handler):
    """Keeps what is logged as an error: a callback that failed goes on in silence otherwise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextlib.contextmanager
def _as_a_reader() -> Iterator[None]:
    """The reader's modules can be imported, alarms may be told, and no failure is passed over.

    Raises:
        AssertionError: Something was logged as an error.
    """
    errors, logger = _Errors(), logging.getLogger("stabilizer")
    logger.addHandler(errors)
    try:
        with (
            mock.patch.dict(os.environ, TRAINER),
            mock.patch.object(sys, "path", [_MODULES, *sys.path]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", StabilizerWarning)
            yield
    finally:
        logger.removeHandler(errors)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1:
            torch.distributed.destroy_process_group()
    assert not errors.found, "\n".join(errors.found)


_MODULES = str(ROOT / "tests" / "docs_modules")


def run_page(page: Path) -> int:
    """Run a page's blocks in the working directory.

    Args:
        page: The file.

    Returns:
        How many blocks were run.
    """
    names: dict[str, Any] = {"__name__": "page"}
    blocks = [block for block in read_blocks(page) if block.language in ("python", "yaml")]
    last = ""
    for is_spread, group in itertools.groupby(blocks, key=lambda block: block.setup == "ranks"):
        together = list(group)
        if is_spread:
            lines = [block.line for block in together]
            run_distributed(run_on_rank, str(page), lines, world_size=NUM_RANKS, timeout=100)
            last = "ranks"
            continue
        with _as_a_reader():
            for block in together:
                if block.setup != last or block.own_setup in SETUPS:
                    names.update(SETUPS[block.setup]())
                    last = block.setup
                _run(block, names)
    return len(blocks)


def run_on_rank(rank: int, world_size: int, page: str, lines: Sequence[int]) -> None:
    """Run blocks on one of several ranks.

    Args:
        rank: Not used: the launcher gives it.
        world_size: How many there are.
        page: The file.
        lines: Where its blocks begin.
    """
    with _as_a_reader(), mock.patch.dict(os.environ, PL_TRAINER_DEVICES=str(world_size)):
        names = {"__name__": "page", **SETUPS["ranks"]()}
        for block in read_blocks(Path(page)):
            if block.line in lines:
                _run(block, names)


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.language == "python":
        exec(compile(program([block]), str(block.page), "exec"), names)  # noqa: S102 (our own page)
    elif block.own_setup == "lightning-cli":
        _run_cli(block)
    else:
        _load(block)


def _load(block: Block) -> None:
    """A stabilizer.yaml, which later blocks find in the folder."""
    named = re.match(r"# ([\w-]+\.yaml)\b", block.code)
    path = Path(named[1] if named else "stabilizer.yaml")
    path.write_text(block.code, encoding="utf-8")
    assert load_callbacks(path), f"{block}: no callback"


def _run_cli(block: Block) -> None:
    """A configuration of LightningCLI, of both packages."""
    from tests.lightning_models import PACKAGES
    from tests.test_lightning_cli import make_cli, ours, write

    for package in PACKAGES:
        assert ours(make_cli(package, write(Path(), config=block.code))), f"{block}: no callback of ours"
