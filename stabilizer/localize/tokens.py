"""What a batch says of the units that were found: token, text, document, importance ratio, advantage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from stabilizer.errors import logger
from stabilizer.localize.documents import document_places
from stabilizer.localize.entries import batch_of, tensor_entries
from stabilizer.localize.grid import Grid, find_grid
from stabilizer.localize.incident import MARKS, Unit
from stabilizer.localize.ratios import advantage, log_ratios, sequence_mask
from stabilizer.localize.targets import TargetRow, target_row

__all__ = ["can_see_ratios", "describe_units"]

_T = TypeVar("_T")
_AROUND = 8
_FIELDS = (
    *("row", "position", "token_id", "text", "context", "document", "document_position"),
    *("log_ratio", "sequence_log_ratio", "advantage"),
)


def describe_units(
    batch: tuple[Sequence[Any], Mapping[str, Any]],
    units: Sequence[Unit],
    unit_shape: Sequence[int],
    tokenizer: Any = None,
    *,
    values: Tensor | None = None,
    redact: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Find what a batch says of some units. What it does not say, or says in a shape that does not fit, is `None`.

    Args:
        batch: Positional and keyword arguments of the step function.
        units: Row and position of each, as the gate gives them.
        unit_shape: Leading dimensions of the gated tensor, see `find_grid`.
        tokenizer: Anything with `decode(list of ids)`, or such a function; without one there is no text.
        values: What the gate let through, one number a unit of the micro-batch, where that may be log-probs.
        redact: Keys of the batch that are not read.

    Returns:
        For each unit what `FoundToken` has, but for its rank, its micro-batch and its norms.

    Example:
        >>> batch = ({"input_ids": torch.tensor([[72, 105, 33]])},)
        >>> found = describe_units((batch, {}), [(0, 1)], (1, 3), tokenizer=lambda ids: bytes(ids).decode())
        >>> found[0]["token_id"], found[0]["context"]
        (33, 'Hi>>>!<<<')
    """
    entries = _tried(lambda: tensor_entries(batch_of(*batch), redact=redact)) or {}
    grid = _tried(lambda: find_grid(entries, unit_shape)) or Grid(1, None)
    describer = _Describer(entries, grid, _Decoder(tokenizer), values)
    return [describer.describe(unit) for unit in units]


def can_see_ratios(
    batch: tuple[Sequence[Any], Mapping[str, Any]],
    unit_shape: Sequence[int],
    *,
    values: Tensor | None = None,
    redact: Sequence[str] = (),
) -> bool:
    """Whether a batch has what importance ratios come from.

    Args:
        batch: See `describe_units`.
        unit_shape: See `describe_units`.
        values: See `describe_units`.
        redact: See `describe_units`.
    """

    def find() -> bool:
        entries = tensor_entries(batch_of(*batch), redact=redact)
        return log_ratios(entries, find_grid(entries, unit_shape), values) is not None

    return _tried(find) or False


class _Describer:
    """Reads the rows that are asked for; a part that fails leaves `None`, and the others go on."""

    def __init__(self, entries: Mapping[str, Tensor], grid: Grid, decoder: _Decoder, values: Tensor | None) -> None:
        self._entries, self._grid, self._decoder = entries, grid, decoder
        self._ratios = _tried(lambda: log_ratios(entries, grid, values))
        self._mask = _tried(lambda: sequence_mask(entries, grid))

    def describe(self, unit: Unit) -> dict[str, Any]:
        row, position = self._grid.place(unit)
        found: dict[str, Any] = dict.fromkeys(_FIELDS) | {"row": row, "position": position}
        found["advantage"] = _tried(lambda: advantage(self._entries, self._grid, row=row, position=position))
        if position is None:
            return found
        places = _tried(lambda: document_places(self._entries, self._grid, row))
        if places is not None and position < len(places):
            found["document"], found["document_position"] = places[position]
        documents = None if places is None else [document for document, _ in places]
        ratio = _tried(lambda: self._ratio(row, position, documents))
        found["log_ratio"], found["sequence_log_ratio"] = ratio or (None, None)
        tokens = _tried(lambda: target_row(self._entries, self._grid, row))
        if tokens is not None and position < len(tokens.targets):
            found |= self._text(tokens, position, documents)
        return found

    def _ratio(self, row: int, position: int, documents: Sequence[int] | None) -> tuple[float, float] | None:
        if self._ratios is None or position >= self._ratios.shape[1]:
            return None
        ratios = self._ratios[row]
        is_counted = ~torch.isnan(ratios)
        if self._mask is not None:
            length = min(len(ratios), self._mask.shape[1])
            ratios, is_counted = ratios[:length], is_counted[:length] & self._mask[row, :length]
        if documents is not None:
            is_counted = is_counted & (torch.tensor(documents[: len(ratios)]) == documents[position])
        return float(self._ratios[row, position]), float(ratios[is_counted].sum())

    def _text(self, tokens: TargetRow, position: int, documents: Sequence[int] | None) -> dict[str, Any]:
        token_id = tokens.targets[position]
        text = None if token_id is None else self._decoder.decode([token_id])
        if token_id is None or text is None:
            return {"token_id": token_id}

        def around(places: range) -> str:
            own = [p for p in places if documents is None or document(p) == documents[position]]
            return self._decoder.decode([token for p in own if (token := tokens.shown[p]) is not None]) or ""

        def document(place: int) -> int:
            read_at = place if tokens.is_next else place - 1
            assert documents is not None
            return documents[min(max(read_at, 0), len(documents) - 1)]

        here = position + 1
        before = around(range(max(0, here - _AROUND), here))
        after = around(range(here + 1, min(len(tokens.shown), here + 1 + _AROUND)))
        return {"token_id": token_id, "text": text, "context": f"{before}{MARKS[0]}{text}{MARKS[1]}{after}"}


class _Decoder:
    """A tokenizer of any make; one that fails is told of once and gives no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[..., Any] | None = getattr(tokenizer, "decode", tokenizer)
        self._has_failed = False

    def decode(self, ids: list[int]) -> str | None:
        if self._decode is None or not ids:
            return None
        try:
            try:
                text = self._decode(ids, skip_special_tokens=False)
            except TypeError:  # not transformers' kind
                text = self._decode(ids)
        except Exception as error:
            if not self._has_failed:
                logger.warning("the tokenizer fails on %s, so that there is no text: %r", ids, error)
            self._has_failed = True
            return None
        return text if isinstance(text, str) else None


def _tried(function: Callable[[], _T]) -> _T | None:
    """What a function returns; `None` if a batch is not what it seems: a report without it is better than none."""
    try:
        return function()
    except Exception as error:
        logger.debug("the batch could not be read: %r", error)
        return None
