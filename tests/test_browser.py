"""What a person sees: the pages of a real TensorBoard on a real run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from stabilizer import tags
from stabilizer.callbacks import GradNormCallback, load_callbacks
from tests import browser_pages as pages
from tests.browser import browser, require_browser, tensorboard
from tests.browser_run import ALARM_STEP, LAYERS, SKIPPED_STEP, STEPS, TOKEN, WINDOWS, make_callbacks, train
from tests.event_files import Run, read_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

#: Groups of tags that are not ours: of the module and of Lightning itself.
THEIRS = {"train", "epoch"}
OURS = {
    *("alarm", "clip", "drill", "finding", "gns", "grad_norm", "gradloc", "loss", "numerics", "optimizer", "skip"),
    *("update_clip", "warning"),
}


def test_the_pages_of_a_run(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One server and one browser for all pages: they take longer to start than to look."""
    require_browser()
    callbacks = train(tmp_path)
    assert not any(callback.has_failed for callback in callbacks)
    logged = read_run(tmp_path / "run")
    with tensorboard(tmp_path) as address, browser() as driver:
        for check in (_custom_scalars, _timeseries, _scalars, _images, _text, _hparams):
            name = check.__name__.removeprefix("_")
            with subtests.test(name):
                driver.get_log("browser")  # of the page before, which has failed by itself
                pages.open_page(driver, address, name)
                check(driver, logged)
                assert driver.get_log("browser") == []


def tags_of(chart: pages.Chart) -> set[str]:
    """Tags of the curves of a chart, which are named "tag (run)"."""
    assert all(name.endswith(" (run)") for name in chart.points)
    return {name.removesuffix(" (run)") for name in chart.points}


def _custom_scalars(driver: Any, logged: Run) -> None:
    charts = pages.charts(driver)
    assert list(dict.fromkeys(chart.page for chart in charts)) == [
        *("Norms", "Clipping", "Noise & loss windows", "Alarms", "Updates & optimizer")
    ]
    _all_curves_are_drawn(charts)
    _the_page_of_norms([chart for chart in charts if chart.page == "Norms"])
    _the_page_of_clips([chart for chart in charts if chart.page == "Clipping"])
    _the_page_of_windows([chart for chart in charts if chart.page == "Noise & loss windows"])
    _the_page_of_alarms([chart for chart in charts if chart.page == "Alarms"], logged)


def _all_curves_are_drawn(charts: list[pages.Chart]) -> None:
    for chart in charts:
        assert chart.message == "", chart
        assert chart.points, chart
        assert chart.num_lines == sum(number > 1 for number in chart.points.values()), chart
        assert chart.num_dots >= len(chart.points), chart
        assert len(chart.title) < 100, "two lines"
    assert len({chart.title for chart in charts}) == len(charts)


def _the_page_of_norms(charts: list[pages.Chart]) -> None:
    curves = [tags_of(chart) for chart in charts]
    assert {f"{tags.GRAD_NORM_LAYER}/{layer}" for layer in LAYERS} in curves
    assert {tags.GRAD_NORM_TOTAL, tags.GRAD_NORM_TOTAL_AFTER, tags.CLIP_TOTAL_THRESHOLD} in curves
    [total] = [chart for chart in charts if tags.GRAD_NORM_TOTAL in tags_of(chart)]
    # Step 60 has none: it is not a number.
    assert total.points[f"{tags.GRAD_NORM_TOTAL} (run)"] >= STEPS - 1


def _the_page_of_clips(charts: list[pages.Chart]) -> None:
    curves = [tags_of(chart) for chart in charts]
    assert {f"{tags.CLIP_LAYER_COEFFICIENT}/{layer}" for layer in LAYERS} in curves
    assert {tags.CLIP_TOTAL_RATE, tags.CLIP_LAYER_RATE} in curves
    assert {tags.SKIP_COUNT, tags.SKIP_CONSECUTIVE} in curves


def _the_page_of_windows(charts: list[pages.Chart]) -> None:
    bands = [tags_of(chart) for chart in charts if chart.num_bands]
    means = [{tags.of_window(tags.LOSS_MEAN, window)} for window in WINDOWS]
    assert sorted(bands, key=str) == sorted([*means, {tags.GNS_NOISE_SCALE}], key=str)
    assert {tags.GNS_RATIO_TO_BATCH} in [tags_of(chart) for chart in charts]


def _the_page_of_alarms(charts: list[pages.Chart], logged: Run) -> None:
    shown = set().union(*map(tags_of, charts))
    rung = {tag for tag in logged.scalars if tag.startswith((f"{tags.ALARM}/", f"{tags.FINDING}/"))}
    assert f"{tags.ALARM}/jump" in rung
    assert shown == rung | {
        *(tags.WARNING_LEVEL, tags.GRADLOC_INCIDENTS, tags.NUMERICS_INCIDENTS, tags.DRILL_FAULTS),
    }


def _timeseries(driver: Any, logged: Run) -> None:
    assert pages.groups(driver) == OURS | THEIRS


def _scalars(driver: Any, logged: Run) -> None:
    assert pages.categories(driver) == OURS | THEIRS


def _images(driver: Any, logged: Run) -> None:
    found = {picture.tag: picture for picture in pages.pictures(driver)}
    incident = {f"{tags.GRADLOC_PICTURES}/{name}" for name in ("card", "position_map", "norm_history", "top_tokens")}
    assert found.keys() == {tags.GRAD_NORM_HEATMAP} | incident
    for picture in found.values():
        assert picture.width >= 700, picture
        assert picture.height >= 200, picture
    assert found[tags.GRAD_NORM_HEATMAP].step == STEPS - 1
    assert {found[tag].step for tag in incident} == {TOKEN["step"]}


def _text(driver: Any, logged: Run) -> None:
    found = {(text.tag.removesuffix("/text_summary"), text.step): text for text in pages.texts(driver)}
    _the_incident(found[tags.GRADLOC_INCIDENT, TOKEN["step"]])
    _the_configuration(found["stabilizer/config", 0])
    assert (tags.GRADLOC_INCIDENT, SKIPPED_STEP) in found
    assert ALARM_STEP <= max(step for tag, step in found if tag == tags.ALARM_TEXT) <= ALARM_STEP + 3


def _the_incident(text: pages.Text) -> None:
    assert text.headings[0] == f"Gradient spike at step {TOKEN['step']}: D, data"
    assert {"Tokens (1)", "Their context", "Layers"} <= set(text.headings)
    tokens, context = text.tables[:2]
    assert _places(tokens) == _places(context) == [str(TOKEN[name]) for name in ("micro_batch", "row", "position")]
    [layers] = [rows for rows in text.tables if rows[0][0] == "layer"]
    assert {row[0] for row in layers[1:]} <= set(LAYERS)


def _places(rows: list[list[str]]) -> list[str]:
    """Of the first token in a table."""
    row = dict(zip(*rows[:2], strict=True))
    assert row["rank"] == "0"
    return [row[name] for name in ("micro", "row", "pos")]


def _the_configuration(text: pages.Text) -> None:
    [code] = text.code
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stabilizer.yaml")
        path.write_text(code, encoding="utf-8")
        callbacks = load_callbacks(path)
    assert {type(callback) for callback in callbacks} == {type(callback) for callback in make_callbacks()}
    [norms] = [callback for callback in callbacks if isinstance(callback, GradNormCallback)]
    assert norms.layer_every_n_steps == 2


def _hparams(driver: Any, logged: Run) -> None:
    row = pages.hparams(driver)
    assert row["Trial ID"] == "run"
    assert float(row["grad_norm.layer_every_n_steps"]) == 2
    assert float(row["grad_noise_scale.min_samples"]) == 20
    assert row["update_clip.mode"] == "observe"
    assert row["world_size"].startswith("1")
