"""A real TensorBoard in a real, headless browser."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["TEXTS", "browser", "tensorboard", "wait_for"]

T = TypeVar("T")

#: All texts of a page, through the shadow roots that TensorBoard is made of.
TEXTS = """
const texts = [];
const walk = (node) => {
  if (node.nodeType === Node.TEXT_NODE && node.textContent.trim()) texts.push(node.textContent.trim());
  if (node.shadowRoot) walk(node.shadowRoot);
  if (!["SCRIPT", "STYLE"].includes(node.nodeName)) node.childNodes.forEach(walk);
};
walk(document.body);
return texts;
"""

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
    "--window-size=1500,1100",
)


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
    """Debian's Chromium, driven by Selenium.

    Yields:
        The driver.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService("/usr/bin/chromedriver")
        driver = webdriver.Chrome(options=options, service=service)
        try:
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
