"""`stabilizer calibrate` on logs that are written by hand: what is found in them, and what comes out."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.calibrate_tools import command_in, expected, norms, write_events


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return command_in(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize(
    "tag",
    [
        "grad_norm/total",
        "vision/grad_norm/total",
        "opt1/grad_norm/total",
        "train/grad_norm",
        "grad_norm",
        "grad_2.0_norm_total",
        "grad_norm/grad_2.0_norm_total",
    ],
)
def test_totals_of_all_hosts_are_found(tag: str, as_tensors: bool, run: Any, tmp_path: Path) -> None:
    points = norms(spread=0.5)
    others = {"train/loss": norms(seed=1), "grad_norm/total_after": norms(seed=2), "grad_2.0_norm/w": norms(seed=3)}
    content, _ = run(write_events(tmp_path / "logs", {**others, tag: points}, as_tensors=as_tensors))
    rule = content["adaptive_clip"]["rule"]
    assert rule["name"] == "fixed"
    assert rule["threshold"] == expected(points, first=150)
    assert set(rule["calibrated_for"].values()) == {None}
    assert "layer_clip" not in content


@pytest.mark.parametrize(
    ("spread", "quantile", "margin", "is_median"),
    [(0.5, 0.999, 1.5, False), (0.05, 0.999, 1.5, True), (0.5, 0.5, 3.5, False), (0.3, 1.0, 2.0, False)],
)
def test_the_threshold_is_the_larger_of_both(
    spread: float, quantile: float, margin: float, is_median: bool, run: Any, tmp_path: Path
) -> None:
    points = norms(spread=spread)
    kept = [value for step, value in points.items() if step >= 150]
    assert (np.quantile(kept, quantile) * margin < 3 * np.median(kept)) == is_median
    options = ("--quantile", str(quantile), "--margin", str(margin))
    content, printed = run(write_events(tmp_path / "logs", {"grad_norm/total": points}), *options)
    threshold = content["adaptive_clip"]["rule"]["threshold"]
    assert threshold == expected(points, first=150, quantile=quantile, margin=margin)
    assert threshold >= 3 * np.median(kept)
    [row] = [line.split() for line in printed.splitlines() if line.startswith("total ")]
    share = 100 * np.mean(np.array(kept) > threshold)
    median, high = np.median(kept), np.quantile(kept, quantile)
    assert row[1:5] == ["1350", f"{median:.4g}", f"{high:.4g}", f"{threshold:.4g}"]
    assert row[5:] == [f"{threshold / median:.2f}", f"{share:.3g}", "%"]


def test_what_is_no_norm_does_not_count_and_is_told(run: Any, tmp_path: Path) -> None:
    good = norms(spread=0.5)
    points = {**good, 200: math.nan, 201: math.inf, 202: 0.0, 203: -1.0, 204: 0.0, 50: math.nan}
    content, printed = run(write_events(tmp_path / "logs", {"grad_norm/total": points}))
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(points, first=150)
    assert "2 norms that are not finite and 3 that are zero" in printed


@pytest.mark.parametrize(("options", "first"), [((), 120), (("--skip-steps", "7"), 27), (("--skip_steps=0",), 20)])
def test_the_warm_up_is_left_out(options: tuple[str, ...], first: int, run: Any, tmp_path: Path) -> None:
    """Early norms are ten times as large here; the log starts at step 20."""
    points = {step + 20: value * (10 if step < 90 else 1) for step, value in norms(number=600).items()}
    content, printed = run(write_events(tmp_path / "logs", {"grad_norm/total": points}), *options)
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(points, first=first)
    assert f"Steps from {first} on count" in printed


def test_of_a_step_that_was_repeated_the_later_norm_counts(run: Any, tmp_path: Path) -> None:
    first, second = norms(seed=0), norms(seed=1)
    folder = write_events(tmp_path / "logs", {"grad_norm/total": {step: 50 * value for step, value in first.items()}})
    [path] = folder.iterdir()
    path.rename(folder / "events.out.tfevents.1000000000.host")
    write_events(folder, {"grad_norm/total": second})
    content, _ = run(folder)
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(second, first=150)


def _layers(prefix: str = "") -> dict[str, dict[int, float]]:
    names = ["embed", "blocks.0", "blocks.10", "1e3", "head"]
    return {f"{prefix}grad_norm/layer/{name}": norms(level=0.1 * (n + 1), seed=n) for n, name in enumerate(names)}


def test_layers_have_thresholds_of_their_own(run: Any, tmp_path: Path) -> None:
    """A layer with few norms stays with the rule that follows it; "blocks.0" must not speak for "blocks.10"."""
    series = {"grad_norm/total": norms(), **_layers()}
    few = {
        "grad_norm/layer/rare": norms(number=20, every=75),
        "grad_norm/layer/frozen": dict.fromkeys(range(1500), 0.0),
    }
    content, printed = run(write_events(tmp_path / "logs", {**series, **few}))
    assert content["layer_clip"]["rule"] == "robust_log"
    found = content["layer_clip"]["rules"]
    assert list(found) == ["embed", "blocks.0", "blocks.10", "1e3", "head"]
    for name, rule in found.items():
        assert rule == {"name": "fixed", "threshold": expected(series[f"grad_norm/layer/{name}"], first=150)}
    assert "2 layers (rare and others) without a threshold of their own" in printed
    content, _ = run(tmp_path / "logs", "--no-layers")
    assert list(content) == ["adaptive_clip"]


def test_a_series_can_be_chosen(run: Any, tmp_path: Path) -> None:
    series = {"grad_norm/total": norms(), "a/grad_norm/total": norms(level=9.0), **_layers(), **_layers("a/")}
    folder = write_events(tmp_path / "logs", {**series, "mine/norm": norms(level=5.0)})
    _, printed = run(folder)
    assert "--tag takes them: a/grad_norm/total" in printed
    for tag, has_layers in (("a/grad_norm/total", True), ("mine/norm", False)):
        content, _ = run(folder, "--tag", tag)
        points = {**series, "mine/norm": norms(level=5.0)}[tag]
        assert content["adaptive_clip"]["rule"]["threshold"] == expected(points, first=150)
        assert ("layer_clip" in content) == has_layers
    content, _ = run(folder, "--tag", "grad_norm/layer/head", "--batch", "8")
    assert list(content) == ["layer_clip"]
    rule = content["layer_clip"]["rules"].pop("head")
    assert not content["layer_clip"]["rules"]
    assert rule["calibrated_for"]["batch"] == 8, "no total speaks for it"


def test_two_optimizers_have_no_one_total(run: Any, tmp_path: Path) -> None:
    both = {"grad_norm/total": norms(), "opt1/grad_norm/total": norms(level=7.0)}
    layers = {"grad_norm/layer/a": norms(), "opt1/grad_norm/layer/b": norms(level=3.0)}
    shared = {"grad_norm/layer/shared": norms(), "opt1/grad_norm/layer/shared": norms(level=8.0)}
    folder = write_events(tmp_path / "logs", {**both, **layers, **shared})
    content, printed = run(folder)
    assert list(content) == ["layer_clip"]
    assert list(content["layer_clip"]["rules"]) == ["a", "b"]
    assert content["layer_clip"]["rules"]["b"]["threshold"] == expected(norms(level=3.0), first=150)
    assert re.search(r"2 optimizers have totals of their own", printed)
    assert re.search(r"several optimizers share .*: shared", printed)
    content, _ = run(folder, "--tag", "opt1/grad_norm/total")
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(norms(level=7.0), first=150)


@pytest.mark.parametrize("step_name", ["step", "Step", "global_step", "iteration"])
def test_a_csv_file_is_read(step_name: str, run: Any, tmp_path: Path) -> None:
    """With cells that are empty, as Lightning's CSVLogger leaves them, and words."""
    points = norms(spread=0.5)
    lines = [f"{step_name},epoch,grad_norm,note"]
    for step, value in points.items():
        lines += [f"{step},0,{value!r},fine", f"{step},0,,"]
    path = tmp_path / "logs" / "log.csv"
    path.parent.mkdir()
    path.write_text("\n".join(lines))
    content, _ = run(path.parent, "--num-params", "12", "--precision", "no", "--world-size", "2")
    rule = content["adaptive_clip"]["rule"]
    assert rule["threshold"] == expected(points, first=150)
    told = {"num_params": 12, "world_size": 2, "accumulation": None, "batch": None, "precision": "no"}
    assert rule["calibrated_for"] == told


def test_of_several_runs_the_newest_with_norms_is_taken(run: Any, tmp_path: Path) -> None:
    logs, ages = tmp_path / "logs", {"old": 3000, "new": 2000, "hparams": 1000}
    for name, age in ages.items():
        tag = "hp_metric" if name == "hparams" else "train/grad_norm"
        folder = write_events(logs / name, {tag: norms(level=float(age))})
        for path in folder.iterdir():
            os.utime(path, (10**9 - age, 10**9 - age))
    content, printed = run(logs)
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(norms(level=2000.0), first=150)
    [line] = [line for line in printed.splitlines() if "newest" in line]
    assert "2 other runs" in line
    content, printed = run(logs / "old")
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(norms(level=3000.0), first=150)
    assert "newest" not in printed
    (logs / "old" / "metrics.csv").write_text("step,grad_norm\n1,1")  # of another logger of that run
    content, printed = run(logs)
    assert content["adaptive_clip"]["rule"]["threshold"] == expected(norms(level=3000.0), first=150)
    assert "2 other runs" in printed


def test_the_picture_is_drawn_without_a_display(run: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    folder = write_events(tmp_path / "logs", {"grad_norm/total": norms(number=24_000), **_layers()})
    path = tmp_path / "made" / "norms.png"
    _, printed = run(folder)
    assert not path.exists()
    assert "matplotlib is missing" in printed
    _, printed = run(folder, draws=True)
    assert f"Picture: {path}" in printed
    pixels = image.imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 400
    # The orange of the threshold goes across the picture.
    orange = np.abs(pixels - np.array([0xD5, 0x5E, 0x00]) / 255).max(axis=-1) < 0.02
    assert orange.any(axis=0).mean() > 0.5


def test_a_log_that_breaks_off_is_read_up_to_there(run: Any, tmp_path: Path) -> None:
    """A run that was killed, or is still going on, leaves half a record."""
    folder = write_events(tmp_path / "logs", {"grad_norm/total": norms()})
    [path] = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    _, printed = run(folder)
    assert 500 < int(re.search(r"^total +(\d+)", printed, re.MULTILINE)[1]) < 800  # type: ignore[index]
