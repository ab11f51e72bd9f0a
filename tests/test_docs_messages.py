"""Messages that the pages quote are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stabilizer.callbacks import load_callbacks
from tests.environments import ROOT

CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
#: The beginning of a line on the page -> a file that gives it.
MISTAKES = {
    "grad_norm.every_n_steps='often'": "grad_norm: {every_n_steps: often}",
    "grad_norm.every_n_steps=0": "grad_norm: {every_n_steps: 0}",
    "gradnorm: unknown": "gradnorm: true",
    "line 3: key": "grad_norm: true\nloss_mean_var: true\ngrad_norm: true",
}


@pytest.mark.parametrize("beginning", MISTAKES)
def test_mistakes_of_a_file(beginning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [line] = re.findall(rf"^stabilizer\.yaml: {re.escape(beginning)}.*$", CONFIGURATION, re.MULTILINE)
    Path("stabilizer.yaml").write_text(MISTAKES[beginning], encoding="utf-8")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is compared)
        load_callbacks("stabilizer.yaml")
    assert str(caught.value) == line


def test_every_mistake_of_the_page_is_tried() -> None:
    [block] = re.findall(r"^```text\n(stabilizer\.yaml:.*?)^```", CONFIGURATION, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) == len(MISTAKES)


def test_every_key_has_its_link() -> None:
    from stabilizer.config import FEATURES

    linked = re.findall(r"\| `(\w+)` \| \[(\w+)\]\(callbacks/(\w+)\.md#arguments\)", CONFIGURATION)
    assert {key: name for key, name, _ in linked} == {key: path.rpartition(".")[2] for key, path in FEATURES.items()}
    assert all(key == page for key, _, page in linked)
