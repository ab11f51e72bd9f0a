"""CONTRIBUTING.md is true: its diagrams, its names, and the callback that it builds."""

from __future__ import annotations

import configparser
import importlib
import importlib.util
import inspect
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tomllib

import stabilizer.callbacks
from stabilizer.callbacks import StabilizerCallback
from tests.environments import ROOT, run_pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
#: Makes the class of the page one of the package's, as its second step says.
PLUGIN = """
import stabilizer.callbacks
from stabilizer import tags
from layer_share import LAYER_SHARE, LayerShareCallback

stabilizer.callbacks.LayerShareCallback = LayerShareCallback
stabilizer.callbacks.__all__ = [*stabilizer.callbacks.__all__, "LayerShareCallback"]
tags.ALL_TAGS = tags.ALL_TAGS | {LAYER_SHARE}
"""
CLASS, OWN_TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _settings() -> dict[str, list[set[str]]]:
    """Container -> its floors, from above to below, as import-linter has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [set(re.findall(r"\w+", floor)) for floor in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
    }


FLOORS = _settings()


def _diagram(title: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Labels of a diagram by their ids, and its arrows."""
    block = PAGE.partition(f"<!-- {title} -->")[2].partition("```mermaid")[2].partition("```")[0]
    labels = dict(re.findall(r'(\w+)\["(.*?)"\]', block, re.DOTALL))
    bare = re.sub(r'\[".*?"\]', "", block, flags=re.DOTALL)
    return labels, re.findall(r"(\w+) --> (\w+)", bare)


def _modules(label: str) -> set[str]:
    """The modules that a label names; what follows a colon is said about them."""
    return set(re.findall(r"\w+", label.partition(":")[0])) - {"..."}


@pytest.mark.parametrize("container", FLOORS)
def test_the_floors_of_the_house_are_those_that_are_kept(container: str) -> None:
    labels, arrows = _diagram(f"layers of {container}")
    floor_of = {module: number for number, floor in enumerate(FLOORS[container]) for module in floor}
    floors = {name: {floor_of[module] for module in _modules(label)} for name, label in labels.items()}
    assert len(arrows) == len(labels) - 1 > 4
    for above, below in arrows:
        assert max(floors[above]) < min(floors[below]), (labels[above], labels[below])
    assert set(labels) == {name for arrow in arrows for name in arrow}


def test_no_part_of_the_house_is_left_out() -> None:
    labels, _ = _diagram("layers of stabilizer")
    shown = {module for label in labels.values() for module in _modules(label)}
    core = FLOORS["stabilizer"][-1]
    above = {module for floor in FLOORS["stabilizer"][:-1] for module in floor} - {"__main__"}
    assert above <= shown
    assert len(shown & core) > 10
    assert [module for module in sorted(shown) if importlib.util.find_spec(f"stabilizer.{module}") is None] == []


def test_the_rooms_of_a_step_exist() -> None:
    labels, arrows = _diagram("one step")
    named = [name for label in labels.values() for name in re.findall(r"stabilizer(?:\.\w+)+", label)]
    assert len(named) == 8
    assert [name for name in named if pydoc.locate(name) is None] == []
    assert {name for arrow in arrows for name in arrow} == set(labels)


def test_every_script_environment_and_marker_is_described() -> None:
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    scripts = {f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.is_file()}
    assert set(re.findall(r"^\| `(scripts/\w+)`", PAGE, re.MULTILINE)) == scripts
    assert set(re.findall(r"scripts/\w+", PAGE)) == scripts
    environments = {name.partition(":")[2] for name in tox.sections() if name.startswith("testenv:")}
    in_passing = {".pkg", "lint", "types", "imports"}  # what scripts/lint does, and what builds the package
    assert set(re.findall(r"tox -e (\w+)", PAGE)) == environments - in_passing
    markers = {marker.partition(":")[0].partition("(")[0] for marker in project["markers"]}
    assert {marker for marker in markers if f"`{marker}`" not in PAGE} == set()


def test_every_file_that_is_named_exists() -> None:
    paths = set(re.findall(r"`((?:tests|callbacks|stabilizer|docs|benchmarks)/[\w./*]+)`", PAGE))
    assert len(paths) > 10
    paths -= {"callbacks/layer_share.py"}  # the one that the page makes
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []


def test_the_changelog_names_every_callback() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    values = {name: getattr(stabilizer.callbacks, name) for name in stabilizer.callbacks.__all__}
    classes = {name for name, kind in values.items() if inspect.isclass(kind) and issubclass(kind, StabilizerCallback)}
    assert len(classes) > 10
    assert sorted(name for name in classes if f"`{name}`" not in changelog) == []


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's callback, as a module."""
    (tmp_path / "layer_share.py").write_text(CLASS, encoding="utf-8")
    (tmp_path / "layer_share_plugin.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("layer_share")
    sys.modules.pop("layer_share")


def test_the_test_of_the_worked_example_passes(module: ModuleType) -> None:
    names = {"LayerShareCallback": module.LayerShareCallback}
    exec(OWN_TEST, names)  # noqa: S102 (our own page)
    [test] = [value for name, value in names.items() if name.startswith("test_")]
    test()


def _contract(folder: Path, chosen: str) -> str:
    selection = ["-m", "", "-k", f"LayerShareCallback and ({chosen})", "tests/test_contract.py"]
    return run_pytest("-p", "layer_share_plugin", "--durations=0", *selection, cwd=ROOT, path=folder, seconds=550)


@pytest.mark.timeout(300)
def test_the_worked_example_keeps_the_contract(module: ModuleType, tmp_path: Path) -> None:
    """On one host, and what is said of all of them."""
    said = _contract(tmp_path, "plain or arguments or both_packages or same_numbers or two_processes")
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= 15, said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_worked_example_keeps_the_contract_everywhere(module: ModuleType, tmp_path: Path) -> None:
    passed = re.search(r"(\d+) passed", _contract(tmp_path, "LayerShareCallback"))
    assert passed is not None
    assert int(passed[1]) >= 60
