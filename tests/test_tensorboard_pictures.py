"""Pictures for TensorBoard: the heat map with its marks, the card of an incident, and their size."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, attach
from stabilizer.callbacks.pictures import MARKS, SkipRing, norm_heatmap
from stabilizer.drawing import ACCENT, BLUE, png
from stabilizer.localize.card import incident_card
from tests.incidents import make_incident, make_token

NAN, INF = math.nan, math.inf


def pixels(figure: Any) -> Any:
    """The picture as TensorBoard gets it; what matplotlib warns of is an error in a test."""
    return np.asarray(Image.open(io.BytesIO(png(figure))).convert("RGB")).astype(int)


def columns_of(image: Any, colour: str) -> Any:
    """Which columns of pixels have a colour."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return np.flatnonzero((abs(image - wanted) < 8).all(-1).any(0))


def texts(axes: Any) -> list[str]:
    """What is written in axes."""
    return [text.get_text() for text in axes.texts]


def test_marks_stand_above_their_steps() -> None:
    rows = torch.ones(100, 5)
    marks = {"incident": [50], "alarm": [150, 99, 20], "skipped step": [], "mine": [120]}
    figure = norm_heatmap(rows, steps=range(50, 150), layer_names=list("abcde"), marks=marks)
    upper, axes = figure.axes[:2]
    assert [label.get_text() for label in upper.get_yticklabels()] == ["incident (1)", "alarm (1)", "mine (1)"]
    assert [list(line.get_xdata()) for line in upper.lines] == [[50], [99], [120]]
    assert upper.get_shared_x_axes().joined(upper, axes)
    forms = [(line.get_marker(), line.get_color()) for line in upper.lines]
    assert forms[:2] == [MARKS["incident"], MARKS["alarm"]]
    assert len({form for form, _ in MARKS.values()}) == len({colour for _, colour in MARKS.values()}) == len(MARKS)
    assert "bright column is a spike" in upper.get_title()
    assert axes.get_xlabel() == "optimizer step"
    assert "layer" in axes.get_ylabel()
    # In the picture itself: an alarm in the middle, an incident at the left edge, in their own colours.
    image = pixels(figure)
    left, right = columns_of(image, ACCENT), columns_of(image, BLUE)
    assert left.size
    assert right.size
    assert left.max() < right.max()


def test_without_marks_there_is_the_map_alone() -> None:
    figure = norm_heatmap(torch.ones(4, 2), steps=range(4), layer_names=["a", "b"], marks={"alarm": [7]})
    assert len(figure.axes) == 2  # the map and its colour bar
    assert "bright column" in figure.axes[0].get_title()


@pytest.mark.parametrize("value", [0.0, NAN, INF, 1e-30])
def test_norms_of_any_kind(value: float) -> None:
    rows = torch.full((3, 2), value)
    rows[0, 0] = 2.0
    pixels(norm_heatmap(rows, steps=[1, 2, 9], layer_names=["x" * 200, "$y$"], marks={"incident": range(5)}))


def test_a_png_is_small_and_drawn_once() -> None:
    figure = norm_heatmap(torch.rand(512, 40).exp(), steps=range(512), layer_names=[str(n) for n in range(40)])
    content = png(figure)
    assert content[:4] == b"\x89PNG"
    assert len(content) < 70_000
    figure.savefig = None
    assert png(figure) is content


def test_skips_are_remembered_for_as_long_as_the_picture() -> None:
    ring = SkipRing(4, device=torch.device("cpu"))
    for step in range(10):
        ring.see(step, torch.tensor(step in (2, 7, 8)))
    assert ring.flags([2, 6, 7, 8, 9]).tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]


class Scale(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return self.weight * x


def test_a_skipped_step_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def draw(rows: Tensor, **options: Any) -> Any:
        seen.append((rows, options))
        return norm_heatmap(rows, **options)

    monkeypatch.setattr("stabilizer.callbacks.grad_norm.norm_heatmap", draw)
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    callbacks = [AdaptiveClipThreshold(), GradNormCallback(heatmap_every_n_steps=100)]
    with (
        SummaryWriter(str(tmp_path)) as writer,
        attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=writer),
    ):
        for step in range(6):
            model(torch.tensor([INF if step in (1, 4) else 3.0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    [(rows, options)] = seen
    assert options["marks"]["skipped step"] == [1, 4]
    assert list(options["steps"]) == list(range(6))
    assert rows.shape == (6, 1)
    assert rows[0, 0] == pytest.approx(3.0)


def test_a_card_has_what_where_and_the_proof() -> None:
    token = make_token(context="before the >>> sat<<< on the mat")
    incident = make_incident(tokens=(token,), counterfactual_norm=4.7, counterfactual_is_bound=False)
    figure = incident_card(incident, [1.0, 2.0, 812.4], steps=[410, 411, 412])
    words, history, bars = figure.axes
    found = texts(words)
    assert found[0] == "Gradient spike at step 412, optimizer 1: D, data"
    assert "step 412, rank 1, micro-batch 2, row 3, position 77" in found
    assert any("' sat'" in text and "97.0 %" in text for text in found)
    assert "".join(found).find("before the  sat on the mat") >= 0
    assert [label.get_text() for label in bars.get_yticklabels()] == ["the step", "threshold", "without\nthe tokens"]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([812.4, 27.9, 4.7])
    assert "proof" in bars.get_title()
    assert history.get_yscale() == "log"
    assert "gradient norm" in history.get_ylabel()
    assert pixels(figure).shape[:2] == (640, 1000)


@pytest.mark.parametrize("text", ["$x_$", "\u65e5\u672c", "\n\t\x00", "\ud800", "x" * 500, "\U0001f600", "", ">>>|<<<"])
def test_cards_of_any_text(text: str) -> None:
    token = make_token(text=text, context=f"{text}>>>{text}<<<{text}", share=NAN, position=None)
    pixels(incident_card(make_incident(tokens=(token,), summary=text), [], steps=[]))


def test_the_token_is_marked_and_not_what_looks_like_a_mark() -> None:
    token = make_token(text="bad", context=">>> print(1) >>>bad<<< <<<")
    words = incident_card(make_incident(tokens=(token,)), [], steps=[]).axes[0]
    assert [text.get_text() for text in words.texts if text.get_color() == ACCENT][-1] == "bad"


@pytest.mark.parametrize("norm", [NAN, INF, 0.0])
def test_cards_of_any_number(norm: float) -> None:
    incident = make_incident(tokens=(), observed_norm=norm, threshold=norm, counterfactual_norm=None)
    pixels(incident_card(incident, [norm, 1.0], steps=[411, 412]))
    pixels(incident_card(make_incident(tokens=(), origin=None), [norm], steps=[412]))
