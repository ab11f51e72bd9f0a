"""What all pictures have in common: colours, figures without pyplot, small PNG files. Matplotlib is imported late."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["ACCENT", "BLUE", "DPI", "GREEN", "MAP", "can_draw", "drawable", "drawn", "new_figure", "png"]

# Okabe and Ito's colours, which people with any colour vision tell apart; and a map whose lightness rises throughout.
BLUE, ACCENT, GREEN = "#0072B2", "#D55E00", "#009E73"
MAP = "viridis"
DPI = 100


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure, without pyplot, which keeps every figure for ever and belongs to the user.

    Args:
        width: In inches of `DPI` pixels.
        height: In inches of `DPI` pixels.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


@contextlib.contextmanager
def drawn(figures: Iterable[Any]) -> Iterator[None]:
    """Take figures apart in the end: they refer to themselves in many places, and hold megabytes for long else.

    Args:
        figures: Of matplotlib.
    """
    try:
        yield
    finally:
        for figure in figures:
            figure.clear()
            # The canvas that it was drawn on holds all its pixels, and the figure.
            figure.set_canvas(None)


def png(figure: Any) -> bytes:
    """A figure as a PNG of at most 256 colours, a third of the size of one with all of them; drawn once.

    Args:
        figure: Of matplotlib.

    Returns:
        The file. A figure that was drawn before and not changed is not drawn again.
    """
    from PIL import Image

    known: bytes | None = getattr(figure, "_stabilizer_png", None)
    if known is not None:
        return known
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    # This method keeps rare colours as they are: marks have few pixels.
    image = Image.open(stream).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    stream = io.BytesIO()
    image.save(stream, format="png", optimize=True)
    figure._stabilizer_png = stream.getvalue()
    return stream.getvalue()


def drawable(text: str, *, family: str = "sans-serif") -> str:
    """Text in the characters that the font has; matplotlib warns of any other one.

    Args:
        text: Any.
        family: Of the font.
    """
    return "".join(char if ord(char) in _characters(family) else "?" for char in text)


@functools.cache
def _characters(family: str) -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=[family]))).get_charmap())
