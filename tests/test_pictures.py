"""The pictures of the pages: all are there, none is left over; without a browser one is told what to install."""

from __future__ import annotations

import configparser
import fnmatch
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import IS_REQUIRED, NoBrowserError, find_browser, require_browser
from tests.environments import ROOT

IMAGES = ROOT / "docs" / "images"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
SCRIPT = (ROOT / "scripts" / "pictures").read_text(encoding="utf-8")
#: As Markdown and as HTML write them; not those that are on the web.
_REFERENCES = re.compile(r"!\[[^\]]*\]\((?!https?:)([^)\s]+)[^)]*\)|<img[^>]+src=\"(?!https?:)([^\"]+)\"")


def _references() -> list[tuple[Path, Path]]:
    """Page and picture, for every picture that is referred to."""
    found = []
    for page in PAGES:
        for match in _REFERENCES.finditer(page.read_text(encoding="utf-8")):
            found.append((page, (page.parent / (match[1] or match[2])).resolve()))
    return found


def test_every_picture_that_a_page_shows_is_there() -> None:
    references = _references()
    assert len(references) > 5
    missing = [f"{page.relative_to(ROOT)}: {picture}" for page, picture in references if not picture.is_file()]
    assert not missing


def test_no_picture_is_left_over_and_the_script_names_what_makes_each() -> None:
    shown = {picture for _, picture in _references()}
    patterns = set(re.findall(r"[\w*]+\.png", SCRIPT))
    for picture in IMAGES.iterdir():
        assert any(fnmatch.fnmatch(picture.name, pattern) for pattern in patterns), f"what makes {picture.name}?"
        assert picture in shown or picture.name in patterns, f"{picture.name} is on no page, and nothing makes it"


def test_pictures_are_small() -> None:
    for picture in IMAGES.iterdir():
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG"), picture
        assert len(content) <= 150_000, f"{picture.name}: {len(content)} bytes"
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 600, f"{picture.name} is {width} x {height}"


def test_without_a_browser_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoBrowserError, match=r"chromium and chromedriver not found on the PATH: .*apt-get install"):
        find_browser()


def test_without_a_browser_the_script_begins_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "pictures")]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("scripts/pictures: chromium and chromedriver not found on the PATH"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_required", [False, True])
def test_without_a_browser_a_test_skips_or_fails(
    is_required: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(IS_REQUIRED, raising=False)
    if is_required:
        monkeypatch.setenv(IS_REQUIRED, "1")
    # Either is caught: a skip where a failure is due would skip this test as well.
    outcomes = (pytest.fail.Exception, pytest.skip.Exception)
    with pytest.raises(outcomes, match="apt-get install chromium chromium-driver") as caught:
        require_browser()
    assert caught.type is outcomes[not is_required]


def test_tox_requires_a_browser() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini", encoding="utf-8")
    assert f"{IS_REQUIRED} = 1" in config["testenv:browser"]["set_env"]
