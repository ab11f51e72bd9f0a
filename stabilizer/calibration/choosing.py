"""Which of a log's series are gradient norms."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stabilizer import tags
from stabilizer.calibration.logs import Run, find_runs, read_run
from stabilizer.calibration.mistakes import CalibrationError

__all__ = ["Chosen", "choose", "newest_with_norms"]

_MAX_TAGS = 20
_START = r"(?P<name>(?:[^/]+/)*?)(?P<optimizer>opt\d+/)?"
_OURS = re.compile(rf"{_START}{tags.GRAD_NORM_TOTAL}")
_LAYER = re.compile(rf"{_START}{tags.GRAD_NORM_LAYER}/(?P<layer>.+)")
# transformers, loops of others; and `lightning.pytorch.utilities.grad_norm`, whose norm type stands in the name.
_OTHERS = (re.compile(r"train/grad_norm"), re.compile(r"(.*/)?grad_norm"), re.compile(r"(.*/)?grad_2(\.0)?_norm_total"))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The series that are to be calibrated.

    Attributes:
        total: Tag of the total; `None` if there is none, or none that may be taken.
        layers: Layer -> tag.
        name: What stands before our tags, without the slash: the `name` of the callback that wrote them.
        notes: What was left out, in sentences.
    """

    total: str | None
    layers: dict[str, str]
    name: str
    notes: list[str]


def newest_with_norms(logdir: Path, *, tag: str | None = None) -> tuple[Run, list[Path]]:
    """Read the newest run of a folder that has a gradient norm, or the wanted series.

    Args:
        logdir: See `find_runs`.
        tag: The wanted series.

    Returns:
        The run, and the other runs of the folder.

    Raises:
        CalibrationError: If there is none; lists the tags that there are.
    """
    runs = find_runs(logdir)
    seen: dict[str, None] = {}
    for number, files in enumerate(runs):
        run = read_run(files)
        if tag in run.series if tag is not None else _has_norms(run.series):
            others = [other for position, other in enumerate(runs) if position != number]
            # A CSV file beside event files is of another logger of the same run.
            paths = dict.fromkeys(map(_path_of, others))
            return run, [path for path in paths if run.path not in (path, path.parent)]
        seen.update(dict.fromkeys(run.series))
    if not seen:
        raise CalibrationError(f"{logdir}: not one number over steps in {_counted(len(runs), 'run')}")
    if tag is not None:
        close = difflib.get_close_matches(tag, seen, n=1, cutoff=0.0)
        raise CalibrationError(f"--tag={tag}: no such series in {logdir}; the closest is {close[0]}; {_listed(seen)}")
    raise CalibrationError(f"{logdir}: no gradient norm among the series; choose one with --tag; {_listed(seen)}")


def choose(series: Sequence[str], *, tag: str | None = None, layers: bool = True) -> Chosen:
    """Find the total and the layers.

    Args:
        series: All tags of a run.
        tag: The series to take for the total, or the series of a layer to take alone.
        layers: Whether the layers are wanted.

    Example:
        >>> found = choose(["grad_norm/total", "grad_norm/layer/head", "loss/mean_100"])
        >>> found.total, found.layers
        ('grad_norm/total', {'head': 'grad_norm/layer/head'})
    """
    if tag is not None:
        if alone := _LAYER.fullmatch(tag):
            return Chosen(None, {alone["layer"]: tag}, alone["name"].rstrip("/"), [])
        ours = _OURS.fullmatch(tag)
        if ours is None:
            return Chosen(tag, {}, "", [])
        return _of_name(series, ours["name"], totals=[tag], layers=layers)
    found = [match for match in map(_OURS.fullmatch, series) if match]
    if not found and not any(map(_LAYER.fullmatch, series)):
        return _of_others(series)
    names = {match["name"] for match in (*found, *filter(None, map(_LAYER.fullmatch, series)))}
    name = min(names, key=lambda name: (len(name), name))
    chosen = _of_name(series, name, totals=[match[0] for match in found if match["name"] == name], layers=layers)
    if left := sorted(names - {name}):
        tags_of = ", ".join(f"{other}{tags.GRAD_NORM_TOTAL}" for other in left)
        chosen.notes.append(f"Norms of other callbacks are left out; --tag takes them: {tags_of}")
    return chosen


def _has_norms(series: Mapping[str, object]) -> bool:
    patterns = (_OURS, _LAYER, *_OTHERS)
    return any(pattern.fullmatch(tag) for tag in series for pattern in patterns)


def _of_others(series: Sequence[str]) -> Chosen:
    matching = [[tag for tag in series if pattern.fullmatch(tag)] for pattern in _OTHERS]
    found = list(dict.fromkeys(tag for group in matching for tag in group))
    notes = [f"Other series are left out; --tag takes one: {', '.join(found[1:])}"] if found[1:] else []
    return Chosen(found[0] if found else None, {}, "", notes)


def _of_name(series: Sequence[str], name: str, *, totals: Sequence[str], layers: bool) -> Chosen:
    notes = []
    total = totals[0] if totals else None
    if len(totals) > 1:
        total = None
        notes.append(
            f"{len(totals)} optimizers have totals of their own ({', '.join(totals)}) and adaptive_clip has one "
            "threshold for all: it is left out; --tag takes one of them"
        )
    by_layer: dict[str, list[str]] = {}
    for match in map(_LAYER.fullmatch, series) if layers else ():
        if match and match["name"] == name:
            by_layer.setdefault(match["layer"], []).append(match[0])
    shared = [layer for layer, found in by_layer.items() if len(found) > 1]
    if shared:
        notes.append(
            f"Layers that several optimizers share have several norms and are left out: {_first(shared)}; they stay "
            "with robust_log"
        )
    single = {layer: found[0] for layer, found in by_layer.items() if len(found) == 1}
    return Chosen(total, single, name.rstrip("/"), notes)


def _path_of(files: Sequence[Path]) -> Path:
    return files[0] if files[0].suffix.lower() == ".csv" else files[0].parent


def _first(names: Sequence[str], *, limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _listed(seen: Mapping[str, object]) -> str:
    return f"there are: {_first(sorted(seen), limit=_MAX_TAGS)}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
