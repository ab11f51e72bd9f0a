"""Whether this tree can be released: what is built installs elsewhere and does there what README begins with.

scripts/release                     # all of it: ten minutes, most of them for installing
scripts/release --tag v0.2.0        # and everything says that this is 0.2.0
scripts/release --versions          # only that versions agree: a second
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from benchmarks.limited import run_limited
from tests.environments import ROOT, copy_tree
from tests.release_program import Failed, quick_start

__all__ = ["Steps", "check_metadata", "check_versions", "main", "source_version"]

#: What is installed of each file that was built: what README's quick start needs.
_EXTRAS = "[lightning]"
_HEADING = re.compile(r"^## \[(?P<version>[^]]+)\](?: - (?P<day>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def source_version(root: Path = ROOT) -> str:
    """The version that the source says, read as the build reads it.

    Args:
        root: Of the tree.
    """
    text = (root / "stabilizer" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise Failed('stabilizer/__init__.py has no line __version__ = "...".')
    return found[1]


def check_versions(version: str, changelog: str, *, tag: str | None) -> str:
    """Compare the version of the source with the changelog's and with the tag.

    Args:
        version: `__version__`.
        changelog: CHANGELOG.md.
        tag: Of the commit that is released, such as "v0.2.0"; `None` between releases.

    Returns:
        What was found, in a line.

    Raises:
        Failed: They do not agree; the message says what to change.
    """
    headings = [(found["version"], found["day"]) for found in _HEADING.finditer(changelog)]
    if not headings or headings[0][0] != "Unreleased":
        raise Failed("CHANGELOG.md must begin with ## [Unreleased]; a release goes under it: ## [0.2.0] - 2026-01-31.")
    released = headings[1:]
    if undated := [name for name, day in released if day is None]:
        raise Failed(f"CHANGELOG.md: ## [{undated[0]}] has no date, as in ## [{undated[0]}] - 2026-01-31.")
    numbers = [Version(name) for name, _ in released]
    if numbers != sorted(set(numbers), reverse=True):
        raise Failed(f"CHANGELOG.md: releases must stand in order, the newest first, each once: {released}.")
    if tag is None:
        if numbers and numbers[0] > Version(version):
            raise Failed(f"CHANGELOG.md has {numbers[0]}, __version__ is {version}: raise __version__.")
        return f"{version}, not released yet" if version not in map(str, numbers) else f"{version}, the newest release"
    if tag != f"v{version}":
        raise Failed(f"the tag is {tag} and __version__ is {version}: the tag must be v{version}.")
    if not numbers or numbers[0] != Version(version):
        raise Failed(f"CHANGELOG.md: the newest release must be {version}: put its heading under [Unreleased].")
    between = changelog.partition("## [Unreleased]")[2].partition(f"## [{version}]")[0]
    if between.strip():
        raise Failed(f"CHANGELOG.md: something is left under [Unreleased]: {between.split()[0:8]}.")
    return f"{version}, as the tag and CHANGELOG.md say"


def check_metadata(path: Path, version: str) -> None:
    """Read the metadata of a built file as an index does.

    Args:
        path: A wheel or an sdist.
        version: That it must have.

    Raises:
        Failed: Something is missing or not valid.
    """
    try:
        if path.suffix == ".whl":
            name, number, _, tags = parse_wheel_filename(path.name)
            with zipfile.ZipFile(path) as archive:
                [member] = [inside for inside in archive.namelist() if inside.endswith(".dist-info/METADATA")]
                text = archive.read(member)
            if {str(tag) for tag in tags} != {"py3-none-any"}:
                raise Failed(f"{path.name}: a wheel for {sorted(map(str, tags))}, and not for every Python 3.")
        else:
            name, number = parse_sdist_filename(path.name)
            with tarfile.open(path) as archive:
                [info] = [inside for inside in archive.getnames() if re.fullmatch("[^/]+/PKG-INFO", inside)]
                file = archive.extractfile(info)
                text = b"" if file is None else file.read()
        metadata = Metadata.from_email(text, validate=True)
    except Failed:
        raise
    except Exception as error:  # whatever is wrong with a file, and all of it in a group
        raise Failed(f"{path.name}: {error!r}") from error
    if name != "torch-stabilizer" or metadata.name != "torch-stabilizer":
        raise Failed(f"{path.name}: the name is {metadata.name}, and not torch-stabilizer.")
    if number != Version(version) or metadata.version != Version(version):
        raise Failed(f"{path.name}: the version is {metadata.version}, and not {version}.")
    for field in ("summary", "description", "license_expression", "requires_python", "classifiers"):
        if not getattr(metadata, field):
            raise Failed(f"{path.name}: the metadata has no {field}.")
    if metadata.description_content_type != "text/markdown":
        raise Failed(f"{path.name}: an index would not show README.md as Markdown.")


@dataclasses.dataclass
class Steps:
    """Runs what is to be run, with time limits, and tells how long it took."""

    folder: Path

    def step(self, what: str, action: Callable[[], object]) -> None:
        start = time.monotonic()
        told = action()
        note = f"  ({told})" if isinstance(told, str) and told else ""
        sys.stdout.write(f"{time.monotonic() - start:6.0f} s  {what}{note}\n")
        sys.stdout.flush()

    def run(self, command: Sequence[str | Path], *, cwd: Path, seconds: float) -> str:
        """What it printed."""
        # Neither the tree nor the environment that this runs in may serve what is installed.
        settings = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        settings |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "1"}
        shown = " ".join(map(str, command))
        try:
            done = run_limited(command, cwd=cwd, environment=settings, seconds=seconds)
        except TimeoutError as error:
            raise Failed(f"{shown}: {error}") from None
        if done.returncode:
            raise Failed(f"{shown}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout


def _check_build(steps: Steps, version: str) -> list[Path]:
    tree, dist = copy_tree(steps.folder / "tree"), steps.folder / "dist"
    command = [sys.executable, "-m", "build", "--outdir", dist, tree]
    steps.step("built, the wheel from the sdist", lambda: steps.run(command, cwd=steps.folder, seconds=600) and None)
    files = sorted(dist.iterdir(), key=lambda file: file.suffix, reverse=True)
    if [file.suffix for file in files] != [".whl", ".gz"]:
        raise Failed(f"{dist} holds {[file.name for file in files]}, and not one wheel and one sdist.")
    for file in files:
        steps.step(f"metadata of {file.name}", lambda file=file: check_metadata(file, version))  # type: ignore[misc]
    return files


def _check_installation(steps: Steps, file: Path, version: str) -> None:
    kind = "wheel" if file.suffix == ".whl" else "sdist"
    environment, empty = steps.folder / f"environment-{kind}", steps.folder / f"empty-{kind}"
    venv.create(environment, with_pip=True)
    empty.mkdir()
    python, (site,) = environment / "bin" / "python", (environment / "lib").glob("python*/site-packages")

    def run(*command: str | Path, seconds: float = 120) -> str:
        return steps.run(command, cwd=empty, seconds=seconds).strip()

    def says_version() -> None:
        if (said := run(environment / "bin" / "stabilizer", "--version")).split()[-1:] != [version]:
            raise Failed(f"stabilizer --version says {said!r}, and not {version}.")

    def quick() -> str:
        program = empty / "quick_start.py"
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        program.write_text(quick_start(readme, site=str(site), version=version), encoding="utf-8")
        return run(python, program).splitlines()[-1]

    install = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{file}{_EXTRAS}")
    steps.step(f"{kind}: installed with {_EXTRAS}", lambda: run(*install, seconds=1200) and None)
    steps.step(f"{kind}: its requirements agree", lambda: run(python, "-m", "pip", "check") and None)
    imports = (python, "-W", "error", "-c", "import stabilizer.callbacks")
    steps.step(f"{kind}: imports without a warning", lambda: run(*imports) and None)
    steps.step(f"{kind}: stabilizer --version", says_version)
    steps.step(f"{kind}: README's quick start", quick)
    demo = (environment / "bin" / "stabilizer", "demo", "--steps", "5")
    steps.step(f"{kind}: stabilizer demo --steps 5", lambda: run(*demo, seconds=300) and None)
    shutil.rmtree(environment)


def _tag_of_head() -> str | None:
    command = ["git", "describe", "--tags", "--exact-match", "--match", "v*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Check.

    Args:
        arguments: Of the command line.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="scripts/release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="what the release will be tagged, as v0.2.0; default: the tag of HEAD, if any")
    parser.add_argument("--versions", action="store_true", help="only compare the versions")
    parser.add_argument("--keep", type=Path, help="folder for the wheel and the sdist, if all is well with them")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            steps, version = Steps(Path(folder)), source_version()
            changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
            tag = options.tag or _tag_of_head()
            steps.step("versions", lambda: check_versions(version, changelog, tag=tag))
            files = [] if options.versions else _check_build(steps, version)
            for file in files:
                _check_installation(steps, file, version)
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                for file in files:
                    shutil.copy2(file, options.keep)
    except Failed as failed:
        sys.stdout.write(f"Not ready for a release: {failed}\n")
        return 1
    sys.stdout.write(f"All is well after {time.monotonic() - start:.0f} s.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
