"""Environments without pip and without a network: chosen packages of the running environment, linked into a new one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["ROOT", "build", "closure", "copy_tree", "install_wheel", "make_environment", "run_pytest", "run_python"]

ROOT = Path(__file__).resolve().parent.parent

#: What is not part of the source tree: hidden folders, environments, builds, what runs leave behind.
_NO_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "venv", "lightning_logs", "docs"
)


def copy_tree(target: Path) -> Path:
    """Copy the source tree, links as links, so that a build finds nothing stale and leaves nothing behind.

    Args:
        target: Folder to make.

    Returns:
        The folder.
    """
    shutil.copytree(ROOT, target, symlinks=True, ignore=_NO_SOURCE)
    return target


def build(source: Path, target: Path, *, kind: str) -> Path:
    """Build a distribution, with the tools that are installed.

    Args:
        source: A source tree.
        target: Folder for the result.
        kind: "sdist", "wheel" or "editable".

    Returns:
        The file built.
    """
    target.mkdir(parents=True, exist_ok=True)
    if kind == "editable":
        code = f"from setuptools.build_meta import build_editable; build_editable({str(target)!r})"
        command = [sys.executable, "-c", code]
    else:
        command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(target), str(source)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that requirements need, directly or through others.

    Args:
        requirements: As in a package's metadata; those for an extra are left out.

    Returns:
        Canonical names.

    Raises:
        importlib.metadata.PackageNotFoundError: A requirement is needed and missing.
    """
    found: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras} - {known for other, known in found if other == name}:
            found.add((name, wanted))
            todo += [(Requirement(text), wanted) for text in importlib.metadata.requires(name) or []]
    return {name for name, _ in found}


def make_environment(path: Path, *, distributions: Iterable[str]) -> Path:
    """Make a virtual environment that has some of the running environment's distributions, as links, and no other.

    Args:
        path: Folder to make.
        distributions: Names.

    Returns:
        Its site-packages folder; its interpreter is what `run_python` starts.
    """
    venv.create(path, with_pip=False, symlinks=True)
    (site,) = (path / "lib").glob("python*/site-packages")
    for name in distributions:
        for file in importlib.metadata.files(name) or []:
            top, home = file.parts[0], Path(str(file.locate())).parents[len(file.parts) - 1]
            link = site / top
            # Scripts lie outside; several distributions may share one folder (google, nvidia).
            if top not in {"..", "__pycache__"} and not link.is_symlink():
                link.symlink_to(home / top)
    return site


def install_wheel(wheel: Path, site: Path) -> None:
    """Unpack a wheel.

    Args:
        wheel: File.
        site: A site-packages folder.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def run_python(environment: Path, code: str, *, cwd: Path) -> str:
    """Run code with an environment's interpreter, warnings as errors.

    Args:
        environment: Folder of a virtual environment.
        code: A program.
        cwd: Working directory; it must not be the source tree, which would be imported instead.

    Returns:
        What it printed.
    """
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-W", "error", "-c", code],
        cwd=cwd,
        env={**settings, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_pytest(*arguments: str, cwd: Path, path: Path, seconds: float) -> str:
    """Run tests in a process of their own, with this interpreter; they must pass.

    Args:
        *arguments: Of pytest.
        cwd: Working directory.
        path: Folder from which modules can be imported.
        seconds: Time limit.

    Returns:
        What it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout
