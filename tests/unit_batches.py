"""A small batch and what is said of its units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stabilizer.localize.tokens import describe_units

ROWS, LENGTH, VOCABULARY = 3, 6, 50
IDS = torch.tensor([[10 * row + position + 1 for position in range(LENGTH)] for row in range(ROWS)])
NEXT = torch.roll(IDS, -1, dims=1)
NEXT[:, -1] = 99


class Letters:
    """Decodes 1 to 26 as letters and anything else as its number."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + number) if 0 < number < 27 else f"<{number}>" for number in ids)


def described(
    batch: Any,
    *units: tuple[int, int | None],
    shape: Sequence[int] = (ROWS, LENGTH),
    tokenizer: Any = None,
    **options: Any,
) -> list[dict[str, Any]]:
    return describe_units(((batch, 7), {}), list(units), shape, tokenizer, **options)
