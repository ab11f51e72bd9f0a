"""Pictures of incidents: what is in them, whatever the numbers and the text."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from stabilizer.localize.incident import Origin
from stabilizer.localize.pictures import norm_history, position_map, top_tokens
from tests.incidents import make_incident, make_token

NAN, INF = math.nan, math.inf


def _image(figure: Any) -> Any:
    """Drawn; anything that matplotlib warns of, such as a character that the font lacks, is an error in a test."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    stream.seek(0)
    return 255 * imread(stream, format="png")


def _is_yellow(image: Any) -> Any:
    """The largest value's colour, but for the colour bar."""
    image = image[:, : image.shape[1] * 8 // 10]
    return (image[..., 0] > 200) & (image[..., 1] > 200) & (image[..., 2] < 100)


def _points(axes: Any) -> set[tuple[float, float]]:
    return {
        (float(x), float(y)) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def test_every_norm_is_there_and_the_spike_stands_out() -> None:
    norms = [1.0, 2.0, NAN, 1.5, 80.0]
    figure = norm_history(norms, step=41, threshold=6.0)
    (axes,) = figure.axes
    points = _points(axes)
    assert {(37.0, 1.0), (38.0, 2.0), (40.0, 1.5), (41.0, 80.0)} <= points
    assert (39.0, 1.0) in points  # at the upper edge
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["step 41", "not finite", "threshold 6"]
    assert axes.get_yscale() == "log"
    assert "optimizer step" in axes.get_xlabel()
    assert "gradient norm" in axes.get_ylabel()
    assert _image(figure).shape[:2] == (400, 800)


def test_steps_may_have_gaps() -> None:
    figure = norm_history([1.0, 2.0, 3.0], step=20, threshold=2.0, steps=[0, 10, 20])
    assert {(0.0, 1.0), (10.0, 2.0), (20.0, 3.0)} <= _points(figure.axes[0])


@pytest.mark.parametrize("norms", [[], [NAN], [INF, INF], [0.0], [5.0], [0.0, 1e-30, 1e30]])
@pytest.mark.parametrize("threshold", [3.0, INF, NAN, 0.0])
def test_histories_of_any_kind(norms: list[float], threshold: float) -> None:
    _image(norm_history(norms, step=7, threshold=threshold))


def test_tokens_by_their_gradient() -> None:
    tokens = tuple(
        make_token(position=position, grad_norm=norm) for position, norm in ((1, 100.0), (2, 10.0), (3, INF))
    )
    figure = top_tokens(make_incident(tokens=tokens))
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [100.0, 10.0, 100.0]
    assert axes.get_yticklabels()[0].get_text() == "rank 1, micro 2, row 3, pos 1  ' sat'"
    assert [text.get_text().strip() for text in axes.texts] == ["97.0 %", "97.0 %", "inf  97.0 %"]
    assert axes.get_xscale() == "log"
    _image(figure)
    many = top_tokens(make_incident(tokens=tokens * 20), num=20)
    assert len(many.axes[0].patches) == 20
    assert "20 of 60" in many.axes[0].get_title()


@pytest.mark.parametrize(
    "text", ["$x_$", "$\\frac$", "\u65e5\u672c", "\n\t\x00", "\ud800", "x" * 500, "\U0001f600", ""]
)
def test_text_of_any_kind(text: str) -> None:
    tokens = (make_token(text=text), make_token(grad_norm=NAN, share=NAN), make_token(grad_norm=0.0, position=None))
    _image(top_tokens(make_incident(tokens=tokens)))


def test_no_tokens() -> None:
    _image(top_tokens(make_incident(tokens=())))


def test_the_map_shows_where_the_gradient_grows() -> None:
    gradients = torch.full((5, 64), 1e-3)
    gradients[:3, 20] = 10.0
    names = ["input", *(f"layers.{number}" for number in range(4))]
    figure = position_map(gradients, names=names, origin=Origin(layer="layers.2", row=0, position=20, value=1e4))
    axes = figure.axes[0]
    shown = axes.images[0].get_array()
    assert np.allclose(shown, gradients)
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert (20.0, 3.0) in _points(axes)
    assert "layers.2 at position 20" in axes.get_title()
    assert "position" in axes.get_xlabel()
    assert "dL/dh" in figure.axes[1].get_ylabel()
    # The input is below, and so is what the gradient has grown to.
    assert axes.get_ylim()[0] < axes.get_ylim()[1]
    rows = np.flatnonzero(_is_yellow(_image(figure)).any(1))
    assert 120 < rows.min() < 300 < rows.max()


def test_one_position_among_very_many_is_still_seen() -> None:
    gradients = torch.full((3, 100_000), 1e-3)
    gradients[1, 77_777] = 10.0
    figure = position_map(gradients, names=["input", "a", f"{'long_name.' * 8}layers.1"])
    shown = figure.axes[0].images[0].get_array()
    assert shown[1].max() == 10.0
    assert _is_yellow(_image(figure)).any()


@pytest.mark.parametrize("value", [0.0, NAN, INF, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (200, 5)])
def test_maps_of_any_kind(value: float, shape: tuple[int, int]) -> None:
    gradients = torch.full(shape, value)
    names = [f"block_{number}" for number in range(shape[0])]
    _image(position_map(gradients, names=names, origin=Origin(layer="gone", position=0)))
    gradients[0, 0] = 2.0
    figure = position_map(gradients.bfloat16(), names=names, origin=Origin(layer="block_0", position=None))
    image = _image(figure)
    red = (image[..., 0] > 200) & (image[..., 1] < 60) & (image[..., 2] < 60)
    has_bad = not math.isfinite(value) and gradients.numel() > 1
    assert red.any() == has_bad


def test_pyplot_is_left_to_the_user() -> None:
    program = (
        "import sys, torch; from stabilizer.localize.pictures import *; from tests.incidents import make_incident;"
        "norm_history([1.0], step=0, threshold=1.0); top_tokens(make_incident());"
        "position_map(torch.ones(1, 1), names=['a']).savefig(sys.stderr.buffer);"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert done.stdout.strip() == b"False", done.stderr[-500:]
