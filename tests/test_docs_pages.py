"""The pages of the callbacks have one form, and say what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import stabilizer.callbacks
from stabilizer import tags
from stabilizer.callbacks import attach
from stabilizer.config import FEATURES
from tests.docs_blocks import pages
from tests.docs_pages import HEADINGS, KNOWN_TAGS, is_tag, page_of, read_arguments, read_tags, section
from tests.docs_setups import SETUPS
from tests.environments import ROOT
from tests.event_files import read_run

KEYS = list(FEATURES)
#: What says nothing in a short run on one rank, without checkpoints and without faults.
SILENT = {"grad_noise_scale", "checkpoint_guard", "drill"}
#: Names of values that are no longer than another one, which they are not: `total` is not `total_after`.
_WHOLE = ("grad_norm/total", "grad_norm/layer", "loss/slope", "loss/max")


def class_of(key: str) -> Any:
    return getattr(stabilizer.callbacks, FEATURES[key].rpartition(".")[2])


def text_of(key: str) -> str:
    return page_of(key).read_text(encoding="utf-8")


def plain(value: Any) -> Any:
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_every_callback_has_its_page_and_no_page_is_over() -> None:
    assert sorted(path.stem for path in (ROOT / "docs/callbacks").glob("*")) == sorted(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_the_form(key: str) -> None:
    text = re.sub(r"^```.*?^```", "", text_of(key), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^# (.*)$", text, re.MULTILINE) == [class_of(key).__name__]
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == HEADINGS
    for title in HEADINGS:
        assert len(section(text, title).split()) > 8, f"'## {title}' is empty"


@pytest.mark.parametrize("key", KEYS)
def test_arguments_are_those_of_the_constructor(key: str) -> None:
    found = {name: plain(value) for name, value in read_arguments(text_of(key)).items()}
    parameters = inspect.signature(class_of(key)).parameters
    expected = {name: plain(parameter.default) for name, parameter in parameters.items()}
    assert found == expected
    # False == 0 and 2 == 2.0 in Python.
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in expected.items()}


@pytest.mark.parametrize("key", KEYS)
def test_only_names_that_exist(key: str) -> None:
    names = read_tags(section(text_of(key), "What it logs"))
    assert names, "no value is named"
    unknown = {name for name in names if not any(is_tag(name, tag) for tag in KNOWN_TAGS)}
    assert not unknown


def test_every_name_is_on_a_page() -> None:
    names = set[str]().union(*(read_tags(section(text_of(key), "What it logs")) for key in KEYS))
    exact = {tag: {name for name in names if not any(is_tag(name, other) for other in _longer(tag))} for tag in _WHOLE}
    missing = {tag for tag in tags.ALL_TAGS if not any(is_tag(name, tag) for name in exact.get(tag, names))}
    assert not missing


def _pattern(name: str) -> str:
    """A layer of the run is `<layer>` on the page."""
    parts = re.split(r"(<[^<>]+>)", name)
    return "".join(".+" if part.startswith("<") else re.escape(part) for part in parts)


def _longer(tag: str) -> set[str]:
    return {other for other in tags.ALL_TAGS if other != tag and is_tag(other, tag)}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.filterwarnings("ignore::stabilizer.StabilizerWarning")
def test_what_a_run_logs_is_on_the_page(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback alone, with a loss that is 3,000 times too large near the end."""
    monkeypatch.chdir(tmp_path)
    given = SETUPS["rollout"]()
    model, optimizer, writer = given["model"], given["optimizer"], given["writer"]
    callbacks = [class_of(key)(strict=True)]
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=writer) as handle:
        for step in range(110):
            batch = given["batches"][step % 8]
            loss = model(input_ids=batch.input_ids, labels=batch.labels).loss * (3000 if step == 105 else 1)
            if key == "rollout_mismatch":
                logp = given["log_probs"](model, batch)
                handle.observe(logp_train=logp, logp_rollout=batch.logp, mask=batch.mask, entropy=given["entropy"])
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    writer.close()
    run = read_run(tmp_path / "runs")
    logged = {*run.scalars, *run.pictures}
    assert logged or key in SILENT, "the run logged nothing"
    named = read_tags(section(text_of(key), "What it logs"))
    patterns = [_pattern(name) for name in named]
    missing = {tag for tag in logged if not any(re.fullmatch(pattern, tag) for pattern in patterns)}
    assert not missing


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in pages() if path.parent.name != "callbacks"])
def test_names_on_other_pages_exist(page: str) -> None:
    unknown = {
        name
        for name in read_tags((ROOT / page).read_text(encoding="utf-8"))
        if not any(is_tag(name, tag) for tag in KNOWN_TAGS) and not re.search(r"\.\w+$|<n>|\.\.\.|/$", name)
    }
    assert not unknown
