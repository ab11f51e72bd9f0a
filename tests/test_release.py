"""The check before a release finds what would be wrong with one; with `-m slow` it is run as it is."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests import release_check
from tests.environments import ROOT
from tests.release_check import check_metadata, check_versions, source_version
from tests.release_program import Failed, quick_start

RELEASED = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-31\n\n### Added\n\n- This.\n\n## [0.1.0] - 2026-01-01\n"
)
METADATA = {
    "Metadata-Version": "2.4",
    "Name": "torch-stabilizer",
    "Version": "0.2.0",
    "Summary": "Callbacks",
    "License-Expression": "Apache-2.0",
    "Requires-Python": ">=3.10",
    "Classifier": "Typing :: Typed",
    "Description-Content-Type": "text/markdown",
}


def test_the_versions_of_this_tree_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert check_versions(source_version(), changelog, tag=None).startswith(source_version())


@pytest.mark.parametrize(
    ("version", "tag", "said"),
    [
        ("0.2.0", "v0.2.0", "as the tag and CHANGELOG.md say"),
        ("0.2.0", None, "the newest release"),
        ("0.3.0", None, "not released yet"),
    ],
)
def test_versions_that_agree(version: str, tag: str | None, said: str) -> None:
    assert check_versions(version, RELEASED, tag=tag).endswith(said)


@pytest.mark.parametrize(
    ("version", "tag", "old", "new", "message"),
    [
        ("0.2.0", "0.2.0", "", "", "the tag is 0.2.0 and __version__ is 0.2.0: the tag must be v0.2.0"),
        ("0.1.0", "v0.2.0", "", "", "the tag must be v0.1.0"),
        ("0.3.0", "v0.3.0", "", "", "the newest release must be 0.3.0"),
        ("0.2.0", "v0.2.0", "## [Unreleased]\n", "## [Unreleased]\n\n- Forgotten.\n", "left under .Unreleased"),
        ("0.1.0", None, "", "", "CHANGELOG.md has 0.2.0, __version__ is 0.1.0"),
        ("0.2.0", None, " - 2026-01-31", "", "has no date"),
        ("0.2.0", None, "## [Unreleased]\n", "", "must begin with ## .Unreleased"),
        ("0.2.0", None, "[0.1.0]", "[0.2.1]", "in order, the newest first"),
        ("0.2.0", None, "[0.1.0]", "[0.2.0]", "each once"),
    ],
)
def test_versions_that_do_not_agree(version: str, tag: str | None, old: str, new: str, message: str) -> None:
    with pytest.raises(Failed, match=message):
        check_versions(version, RELEASED.replace(old, new) if old else RELEASED, tag=tag)


def _wheel(folder: Path, *, name: str = "torch_stabilizer-0.2.0-py3-none-any.whl", **changed: str) -> Path:
    fields = METADATA | {key.replace("_", "-"): value for key, value in changed.items()}
    text = "".join(f"{key}: {value}\n" for key, value in fields.items() if value) + "\n# stabilizer\n"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("torch_stabilizer-0.2.0.dist-info/METADATA", text)
    return folder / name


def test_metadata_that_an_index_takes(tmp_path: Path) -> None:
    check_metadata(_wheel(tmp_path), "0.2.0")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"Version": "0.3.0"}, "the version is 0.3.0, and not 0.2.0"),
        ({"Name": "stabilizer"}, "the name is stabilizer"),
        ({"Description_Content_Type": "text/plain"}, "would not show README.md as Markdown"),
        ({"License_Expression": "Apache 2"}, "'Apache 2' is invalid for 'license-expression'"),
        ({"License_Expression": ""}, "no license_expression"),
        ({"Classifier": ""}, "no classifiers"),
        ({"Requires_Python": "3.10 or so"}, "requires-python"),
        ({"name": "torch_stabilizer-0.2.0-cp311-cp311-linux_x86_64.whl"}, "a wheel for"),
        ({"name": "wheel.whl"}, "Invalid wheel filename"),
    ],
)
def test_metadata_that_it_does_not(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=message):
        check_metadata(_wheel(tmp_path, **changed), "0.2.0")


def _try(folder: Path, *, site: str, version: str) -> subprocess.CompletedProcess[str]:
    program = folder / "quick_start.py"
    program.write_text(quick_start((ROOT / "README.md").read_text(encoding="utf-8"), site=site, version=version))
    return subprocess.run([sys.executable, str(program)], cwd=folder, capture_output=True, text=True, timeout=100)


def test_the_quick_start_of_readme_trains_and_logs(tmp_path: Path) -> None:
    done = _try(tmp_path, site="/", version=source_version())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "trained and logged 3 steps"


@pytest.mark.parametrize(("site", "version"), [("/nowhere", source_version()), ("/", "0.0.0")])
def test_another_package_than_the_installed_one_is_found(site: str, version: str, tmp_path: Path) -> None:
    done = _try(tmp_path, site=site, version=version)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_readme_without_a_quick_start_is_not_released() -> None:
    with pytest.raises(Failed, match="no block of Python"):
        quick_start("# stabilizer\n```python\nimport torch\n```\n", site="/", version="0.1.0")


def test_what_fails_or_hangs_is_told(tmp_path: Path) -> None:
    steps = release_check.Steps(tmp_path)
    assert steps.run([sys.executable, "-c", "print(1)"], cwd=tmp_path, seconds=50) == "1\n"
    with pytest.raises(Failed, match=r"exit status 3\nwhy"):
        steps.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], cwd=tmp_path, seconds=50)
    start = time.monotonic()
    with pytest.raises(Failed, match="not ready after 1 s"):
        steps.run([sys.executable, "-c", "import time; time.sleep(600)"], cwd=tmp_path, seconds=1)
    assert time.monotonic() - start < 30


def test_nothing_of_this_environment_reaches_what_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ['PIP_CONSTRAINT'])"
    said = release_check.Steps(tmp_path).run([sys.executable, "-c", code], cwd=tmp_path, seconds=50)
    assert said.split() == ["None", str(ROOT / "constraints.txt")]


def test_the_command_says_what_stands_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert release_check.main(["--versions"]) == 0
    assert release_check.main(["--versions", "--tag", "v99.0.0"]) == 1
    assert "Not ready for a release: the tag is v99.0.0" in capsys.readouterr().out


def test_what_is_well_is_kept_and_what_is_not_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, tried = _wheel(tmp_path), []
    monkeypatch.setattr(release_check, "_check_build", lambda steps, version: [wheel])
    monkeypatch.setattr(release_check, "_check_installation", lambda steps, file, version: tried.append(file))
    assert release_check.main(["--keep", str(tmp_path / "dist")]) == 0
    assert tried == [wheel]
    assert [file.name for file in (tmp_path / "dist").iterdir()] == [wheel.name]

    def fails(*arguments: object) -> None:
        raise Failed("it does not install")

    monkeypatch.setattr(release_check, "_check_installation", fails)
    assert release_check.main(["--keep", str(tmp_path / "other")]) == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_this_tree_can_be_released() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.release_check"], cwd=ROOT, capture_output=True, text=True, timeout=2900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("wheel", "sdist"):
        assert f"{kind}: README's quick start  (trained and logged 3 steps)" in done.stdout
