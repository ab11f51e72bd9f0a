"""A real TensorBoard in a real, headless browser; `tests.browser_pages` reads what it shows."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["IS_REQUIRED", "NoBrowserError", "browser", "find_browser", "require_browser", "tensorboard", "wait_for"]

T = TypeVar("T")

#: Set by `tox -e browser`: a machine without a browser fails there, and skips elsewhere.
IS_REQUIRED = "STABILIZER_BROWSER_REQUIRED"

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    # So tall that no page of a test scrolls: TensorBoard draws what is in sight only.
    "--window-size=1500,4000",
)

#: What a reader unticks first: a spike is an outlier, and by default the charts end below it.
_SHOW_OUTLIERS = "try { localStorage.setItem('_ignoreYOutliers', 'false'); } catch {}"


class NoBrowserError(RuntimeError):
    """Chromium or its driver is not installed."""


def find_browser() -> tuple[str, str]:
    """Paths of Chromium and of its driver.

    Raises:
        NoBrowserError: If one is missing: says what to install.
    """
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if found is None or driver is None:
        missing = " and ".join(name for name, path in (("chromium", found), ("chromedriver", driver)) if path is None)
        raise NoBrowserError(
            f"{missing} not found on the PATH: install a Chromium and the chromedriver of the same version "
            "(Debian: apt-get install chromium chromium-driver)"
        )
    return found, driver


def require_browser() -> None:
    """Skip a test on a machine without a browser, or fail it where one is required, with the way out."""
    import pytest

    try:
        find_browser()
        return
    except NoBrowserError as error:
        message = str(error)
    if os.environ.get(IS_REQUIRED):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve a folder.

    Args:
        folder: With event files somewhere below.

    Yields:
        The address.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--load_fast=false"], stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}/"
            wait_for(lambda: urllib.request.urlopen(address + "data/plugins_listing", timeout=5).status == 200)
            yield address
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by Selenium, in which charts show outliers.

    Yields:
        The driver.

    Raises:
        NoBrowserError: If there is none.
    """
    from selenium import webdriver

    binary, driver_path = find_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
        try:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _SHOW_OUTLIERS})
            yield driver
        finally:
            driver.quit()


def wait_for(condition: Callable[[], T], *, seconds: float = 60) -> T:
    """Call a condition until it is true.

    Args:
        condition: May raise while it is not.
        seconds: For how long.

    Returns:
        Its true value.
    """
    deadline = time.monotonic() + seconds
    error: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except Exception as caught:
            error = caught
        time.sleep(0.3)
    raise TimeoutError(f"not true within {seconds:g} s") from error
