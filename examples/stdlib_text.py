"""Text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

__all__ = ["RandomWindows", "load_stdlib_text"]

# Installed packages differ from machine to machine, and tests are more data than language.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


def load_stdlib_text(max_bytes: int = 8_000_000) -> Tensor:
    """Read the standard library's `*.py` files, in the order of their paths.

    Args:
        max_bytes: Where to stop.

    Returns:
        The bytes of the files, one after the other, uint8, at most `(max_bytes,)`.

    Raises:
        FileNotFoundError: If this Python has no source files on disk (an embedded Python keeps them in a zip archive).

    Example:
        >>> text = load_stdlib_text(max_bytes=1000)
        >>> text.shape, text.dtype
        (torch.Size([1000]), torch.uint8)
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _source_files(root):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no *.py file of the standard library under {root}: use a Python that has its source")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        # In place: `os.walk` then visits the subfolders that are left, in this order.
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


class RandomWindows(IterableDataset[Tensor]):
    """An endless stream of random windows of a text.

    Args:
        text: Token numbers, (length,).
        window: Tokens in one window: the context and the one token after it.
        seed: Seed of the stream.
        rank: Number of the process: each rank reads its own windows.

    Raises:
        ValueError: If the text is shorter than one window.

    Example:
        >>> windows = RandomWindows(torch.arange(100, dtype=torch.uint8), window=4, seed=0, rank=0)
        >>> first = next(iter(windows))
        >>> (first - first[0]).tolist()
        [0, 1, 2, 3]
    """

    def __init__(self, text: Tensor, *, window: int, seed: int, rank: int) -> None:
        super().__init__()
        if len(text) < window:
            raise ValueError(f"the text has {len(text)} tokens and window={window}: give more text or a smaller window")
        self.text = text
        self.window = window
        self.seed = seed
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        """Start the stream from its beginning."""
        # A large odd stride keeps the streams of (seed, rank) and (seed + 1, rank - 1) apart.
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.rank)
        while True:
            start = int(torch.randint(len(self.text) - self.window + 1, (), generator=generator))
            yield self.text[start : start + self.window].long()
