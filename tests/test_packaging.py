"""What is built has all of the tree's modules once each, and is imported under the right names."""

from __future__ import annotations

import email
import os
import re
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.environments import ROOT, build, closure, copy_tree, install_wheel, make_environment, run_python

#: Folder of the tree -> folder of the wheel.
PACKAGES = {"stabilizer": "stabilizer", "callbacks": "stabilizer/callbacks", "examples": "stabilizer/examples"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("wheel"), kind="wheel")


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("sdist"), kind="sdist")


def source_files() -> dict[str, Path]:
    """Path inside a wheel -> path in the tree of all that belongs to the packages; no pages, no links."""
    files = {}
    for folder, package in PACKAGES.items():
        for path, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = Path(path).relative_to(ROOT / folder)
            files.update(
                {(package / inside / name).as_posix(): Path(path) / name for name in names if not name.endswith(".md")}
            )
    return files


def unpack_counted(names: list[str]) -> set[str]:
    """The names, none of which may appear twice."""
    double = [name for name, count in Counter(names).items() if count > 1]
    assert not double
    return set(names)


def test_links_are_links() -> None:
    for package in ("callbacks", "examples"):
        assert (ROOT / "stabilizer" / package).readlink() == Path("..") / package


def test_wheel_is_the_tree(wheel: Path) -> None:
    sources = source_files()
    with zipfile.ZipFile(wheel) as archive:
        names = unpack_counted([name for name in archive.namelist() if ".dist-info/" not in name])
        assert names == set(sources)
        assert [name for name, path in sources.items() if archive.read(name) != path.read_bytes()] == []
    assert {"stabilizer/py.typed", "stabilizer/callbacks/base.py", "stabilizer/examples/gpt.py"} <= names


def test_sdist_is_the_tree(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        names = unpack_counted([member.name.partition("/")[2] for member in archive if member.isfile()])
    sources = {path.relative_to(ROOT).as_posix() for path in source_files().values()}
    generated = {name for name in names if name in {"PKG-INFO", "setup.cfg"} or ".egg-info/" in name}
    beside = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert names - generated == sources | beside


def test_wheel_from_the_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = build(source, tmp_path / "again", kind="wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        assert [name for name in first.namelist() if first.read(name) != second.read(name)] == []


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = "torch_stabilizer-{}.dist-info".format(wheel.name.split("-")[1])
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert b"stabilizer = stabilizer.cli:main" in archive.read(f"{folder}/entry_points.txt")
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "stabilizer" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    assert metadata["Name"] == "torch-stabilizer"
    assert metadata["Version"] == found[1]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    base = {re.split(r"[^\w-]", text)[0] for text in metadata.get_all("Requires-Dist") if "extra ==" not in text}
    assert base == {"torch", "torchmetrics", "jsonargparse", "PyYAML", "rich", "tensorboard"}
    extras = {"accelerate", "all", "dev", "docs", "lightning", "plots", "transformers"}
    assert set(metadata.get_all("Provides-Extra")) == extras


IMPORTS = """
import stabilizer.callbacks, stabilizer.callbacks.base, stabilizer.examples.gpt
from stabilizer.callbacks import StabilizerCallback
import sys
assert StabilizerCallback.__module__ == "stabilizer.callbacks.base", StabilizerCallback.__module__
assert "callbacks" not in sys.modules and "examples" not in sys.modules
print(stabilizer.callbacks.__file__)
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_imports_from_an_installation(kind: str, tree: Path, wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    site = make_environment(environment, distributions=closure(["torch", "numpy", "torchmetrics"]))
    empty.mkdir()
    install_wheel(wheel if kind == "wheel" else build(tree, tmp_path / "built", kind=kind), site)
    where = Path(run_python(environment, IMPORTS, cwd=empty).strip())
    assert where.is_relative_to(site if kind == "wheel" else tree)
