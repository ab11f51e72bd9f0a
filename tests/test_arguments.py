"""One table of arguments: the design's, the signatures, the docstrings and the files say the same.

That the pages say it too is in `tests.test_docs_pages`.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import stabilizer.callbacks
from stabilizer.callbacks import StabilizerCallback
from stabilizer.config import FEATURES
from tests.environments import ROOT
from tests.lightning_models import PACKAGES
from tests.test_config import load, same
from tests.test_lightning_cli import make_cli, ours, write

TABLE = json.loads((ROOT / "tests/data/arguments.json").read_text(encoding="utf-8"))


def public_classes() -> dict[str, type[StabilizerCallback]]:
    """Name -> class of every callback that is exported, the base left out."""
    found = {name: getattr(stabilizer.callbacks, name) for name in stabilizer.callbacks.__all__}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, StabilizerCallback) and value is not StabilizerCallback
    }


CLASSES = public_classes()


def plain(value: Any) -> Any:
    """A default as YAML has it."""
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def expected(name: str) -> dict[str, Any]:
    """The arguments and defaults of a class in the table, in any order."""
    additions = {**TABLE["additions"]["all"], **TABLE["additions"].get(name, {})}
    return {**TABLE["common"], **additions, **TABLE["classes"][name]["arguments"]}


def test_every_exported_class_is_in_the_table_and_in_the_features() -> None:
    keys = {name: TABLE["classes"][name]["key"] for name in CLASSES}
    assert {"GradNormCallback", "LossMeanVarCallback"} <= keys.keys()
    assert {key: path.rpartition(".")[2] for key, path in FEATURES.items()} == {key: name for name, key in keys.items()}


@pytest.mark.parametrize("name", CLASSES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(CLASSES[name]).parameters
    assert {kind.kind for kind in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    found = {argument: plain(parameter.default) for argument, parameter in parameters.items()}
    assert found == expected(name)
    # False == 0 and 2 == 2.0 in Python.
    assert {key: type(value) for key, value in found.items()} == {key: type(v) for key, v in expected(name).items()}


@pytest.mark.parametrize("name", CLASSES)
def test_docstring(name: str) -> None:
    section = re.search(r"\n    Args:\n(.*?)\n\n", CLASSES[name].__doc__ or "", re.DOTALL)
    assert section is not None
    described = re.findall(r"^ {8}(\w+): ", section[1], re.MULTILINE)
    assert described == list(inspect.signature(CLASSES[name]).parameters)


def assert_defaults_change_nothing(name: str, folder: Path) -> None:
    """Compare an argument left out with its default through keywords, a file, and LightningCLI of both packages."""
    kind, key = CLASSES[name], TABLE["classes"][name]["key"]
    for argument, default in expected(name).items():
        assert same([kind(**{argument: default})], [kind()]), argument
        assert same(load(folder, yaml.safe_dump({key: {argument: default}})), [kind()]), argument
    entry = {"class_path": f"stabilizer.callbacks.{name}", "init_args": expected(name)}
    files = write(folder, a=yaml.safe_dump({"trainer": {"callbacks": [entry]}}))
    options = [f"--trainer.callbacks=stabilizer.callbacks.{name}"]
    options += [
        f"--trainer.callbacks.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in expected(name).items()
    ]
    for package in PACKAGES:
        for arguments in (files, options):
            assert same(ours(make_cli(package, arguments)), [kind()]), (package, arguments)
