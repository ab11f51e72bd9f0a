"""Custom Scalars and groups of tags, as a run leaves them in its event files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from stabilizer import tags
from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    Chart,
    GradNormCallback,
    LayerClipCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StepContext,
    attach,
)
from tests.event_files import Run, read_run
from tests.tensorboard_runs import LAYER_STEP, PLANT, full_run

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")

PAGES = ["Norms", "Clipping", "Noise & loss windows", "Alarms", "Updates & optimizer", "Rollout & policy"]
LAYER_NORMS = "Norm by layer, before clipping: watch for a line that leaves the others"
TOTAL_NORM = "Total norm, before and after clipping, with its threshold: watch for peaks over it"
RATES = "Share of the last steps that were clipped: should stay near 0"
BAND = "Loss, last {} steps: mean and one standard deviation; watch for a wider band"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a callback of every kind, a bad token and a bad layer."""
    folder = tmp_path_factory.mktemp("run")
    full_run(folder)
    return read_run(folder)


def matching(run: Run, patterns: list[str]) -> set[str]:
    """Tags of a chart, as TensorBoard looks for them."""
    return {tag for tag in run.scalars for pattern in patterns if re.match(pattern, tag)}


def is_band(patterns: list[str]) -> bool:
    """Whether a chart has a band: exact tags, no patterns."""
    return not any(pattern.startswith("^") for pattern in patterns)


def test_the_pages_are_there_in_their_order(everything: Run) -> None:
    assert list(everything.pages) == PAGES
    assert everything.layouts == 1


def test_every_chart_has_lines_unless_it_says_that_it_may_have_none(everything: Run) -> None:
    empty = {
        title
        for page in everything.pages.values()
        for title, patterns in page.items()
        if not matching(everything, patterns) and "empty while all is well" not in title
    }
    assert empty == set()


def test_the_charts_hold_what_their_titles_say(everything: Run) -> None:
    layers = {tag.removeprefix("grad_norm/layer/") for tag in everything.scalars if tag.startswith("grad_norm/layer/")}
    assert {"blocks.0", "blocks.2", "head"} <= layers
    norms, clipping = everything.pages["Norms"], everything.pages["Clipping"]
    assert matching(everything, norms[LAYER_NORMS]) == {f"grad_norm/layer/{layer}" for layer in layers}
    totals = {"grad_norm/total", "grad_norm/total_after", "clip/total_threshold"}
    assert matching(everything, norms[TOTAL_NORM]) == totals
    assert matching(everything, clipping[RATES]) == {"clip/total_rate", "clip/layer_rate"}
    coefficients = clipping["Coefficient by layer: 1 is not clipped, 0.1 left a tenth"]
    assert matching(everything, coefficients) == {f"clip/layer_coefficient/{layer}" for layer in layers}
    skips = clipping["Skipped steps, in all and in a row: every rise is a step without an update"]
    assert matching(everything, skips) == {"skip/count", "skip/consecutive"}


def test_all_alarms_and_findings_are_on_their_page(everything: Run) -> None:
    groups = ("alarm", "finding", "warning", "drill")
    expected = {tag for tag in everything.scalars if tag.partition("/")[0] in groups}
    expected |= {tag for tag in everything.scalars if tag.endswith("/incidents")}
    expected |= {"gradloc/incidents", "checkpoint/good", "checkpoint/bad"}
    assert {"alarm/rollout_shift", "finding/explosion_one", "warning/level", "drill/faults"} <= expected
    alarms = everything.pages["Alarms"]
    assert {tag for patterns in alarms.values() for tag in matching(everything, patterns)} == expected
    assert [patterns for title, patterns in alarms.items() if "4 roll back" in title] == [
        [r"^(opt\d+/)?recovery/rung$"]
    ]


def test_bands_are_drawn(everything: Run) -> None:
    """TensorBoard draws one only if its three tags have points at the same steps, and takes no patterns."""
    page = everything.pages["Noise & loss windows"]
    bands = {title: patterns for title, patterns in page.items() if is_band(patterns)}
    assert set(bands) == {BAND.format(10), BAND.format(30), "Noise scale and its standard error"}
    for value, lower, upper in bands.values():
        points = [everything.scalars[tag] for tag in (value, lower, upper)]
        assert len(points[0]) > 8
        assert points[0].keys() == points[1].keys() == points[2].keys()
        assert all(points[1][step] <= points[0][step] <= points[2][step] for step in points[0])
    # Shown from the last one to the first.
    assert [title for title in page if title in bands][-1] == BAND.format(10)


def test_a_band_is_one_deviation_wide(everything: Run) -> None:
    for window in (10, 30):
        mean, std, lower, upper = (
            everything.scalars[tags.of_window(tag, window)]
            for tag in (tags.LOSS_MEAN, tags.LOSS_STD, tags.LOSS_LOWER, tags.LOSS_UPPER)
        )
        assert std
        for step, width in std.items():
            assert upper[step] - mean[step] == pytest.approx(width, rel=1e-3)
            assert mean[step] - lower[step] == pytest.approx(width, rel=1e-3)
    scale, error, upper = (everything.scalars[tag] for tag in (tags.GNS_NOISE_SCALE, tags.GNS_STDERR, tags.GNS_UPPER))
    known = scale.keys() & error.keys()
    assert known
    assert all(upper[step] - scale[step] == pytest.approx(error[step], rel=1e-3, abs=1e-6) for step in known)


def test_all_tags_are_in_the_groups(everything: Run) -> None:
    names = [*everything.scalars, *everything.pictures, *everything.texts]
    found = {name.partition("/")[0] for name in names}
    assert found <= tags.GROUPS
    # No trouble that recovery would do something about, and no checkpoint: else it is all that there is.
    assert tags.GROUPS - found == {"recovery"}
    for tag in everything.scalars:
        assert any(tag == known or tag.startswith((f"{known}/", f"{known}_")) for known in tags.ALL_TAGS), tag


def test_the_fault_is_in_the_charts(everything: Run) -> None:
    assert everything.scalars["gradloc/incidents"][PLANT.step] == 2.0
    assert [step for step, num in everything.scalars["drill/faults"].items() if num] == [LAYER_STEP]


def _loop(folder: Path, callbacks: list[StabilizerCallback], *, num_optimizers: int = 1) -> Run:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    parts = [model.parameters()] if num_optimizers == 1 else [part.parameters() for part in model]
    optimizers = [torch.optim.SGD(part, lr=0.01) for part in parts]
    with (
        SummaryWriter(str(folder)) as writer,
        attach(None, model=model, optimizer=optimizers, callbacks=callbacks, log=writer) as handle,
    ):
        for _ in range(4):
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            handle.record_loss(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return read_run(folder)


def test_there_are_charts_of_the_callbacks_in_the_run_only(tmp_path: Path) -> None:
    run = _loop(tmp_path / "norm", [GradNormCallback(heatmap_every_n_steps=None)])
    assert {page: list(charts) for page, charts in run.pages.items()} == {"Norms": [TOTAL_NORM, LAYER_NORMS][::-1]}
    quiet = GradNormCallback(layer_every_n_steps=None, heatmap_every_n_steps=None)
    assert list(_loop(tmp_path / "quiet", [quiet]).pages["Norms"]) == [TOTAL_NORM]
    observing = LayerClipCallback(mode="observe")
    assert not any("Skipped" in title for title in _loop(tmp_path / "observe", [observing]).pages["Clipping"])


def test_names_and_a_second_optimizer(tmp_path: Path) -> None:
    callbacks = [
        GradNormCallback(name="a.b", layer_every_n_steps=1, heatmap_every_n_steps=None),
        GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None),
        LossMeanVarCallback(windows=(2,), every_n_steps=1, name="a.b"),
    ]
    run = _loop(tmp_path, callbacks, num_optimizers=2)
    both = {"grad_norm/layer/0", "opt1/grad_norm/layer/1"}
    assert matching(run, run.pages["Norms"][LAYER_NORMS]) == both
    assert matching(run, run.pages["Norms"][f"{LAYER_NORMS} (a.b)"]) == {f"a.b/{tag}" for tag in both}
    for number, start in ((0, "a.b/"), (1, "a.b/opt1/")):
        band = run.pages["Noise & loss windows"][f"{BAND.format(2)} (a.b), optimizer {number}"]
        assert band == [f"{start}loss/{name}_2" for name in ("mean", "lower", "upper")]
        assert run.scalars[band[0]].keys() == run.scalars[band[1]].keys() == run.scalars[band[2]].keys()


def test_one_chart_has_the_lines_of_all_callbacks(tmp_path: Path) -> None:
    """The threshold is in the chart of the total, with whatever callback logs that."""
    callbacks = [AdaptiveClipThreshold(), GradNormCallback()]
    run = _loop(tmp_path, callbacks)
    lines = [r"^(opt\d+/)?grad_norm/total(_after)?$", r"^(opt\d+/)?clip/total_threshold$"]
    assert run.pages["Norms"][TOTAL_NORM] == lines
    alone = _loop(tmp_path / "alone", [AdaptiveClipThreshold()])
    assert matching(alone, alone.pages["Norms"][TOTAL_NORM]) >= {"grad_norm/total", "clip/total_threshold"}


class Mine(StabilizerCallback):
    """A user's own callback with a page of its own, and lines in one of ours."""

    def on_gradients(self, context: StepContext) -> None:
        """Log."""
        context.log_many(dict.fromkeys(("mine/now", "mine/low", "mine/high"), context.store.total_norm))

    def charts(self) -> list[Chart]:
        """Both."""
        return [
            Chart("Mine", "Mine", band=("mine/now", "mine/low", "mine/high")),
            Chart("Alarms", "M", lines=("mine/n.*",)),
        ]


def test_a_user_s_own_charts(tmp_path: Path) -> None:
    run = _loop(tmp_path, [Mine(name="x"), GradNormCallback(heatmap_every_n_steps=None)])
    assert list(run.pages) == ["Norms", "Alarms", "Mine"]
    assert run.pages["Mine"] == {"Mine (x)": ["x/mine/now", "x/mine/low", "x/mine/high"]}
    assert matching(run, run.pages["Alarms"]["M (x)"]) == {"x/mine/now"}


@pytest.mark.parametrize("options", [{}, {"lines": ("a",), "band": ("a", "b", "c")}, {"band": ("a", "b")}])
def test_a_chart_of_nothing_is_an_error(options: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="chart 'T': "):
        Chart("P", "T", **options)
