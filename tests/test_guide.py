"""The guide to a spike: its callbacks train, and what it names is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from stabilizer import health, numerics
from stabilizer.callbacks import StabilizerCallback, attach
from stabilizer.localize.table import TYPE_NAMES
from tests.docs_pages import section
from tests.docs_setups import CausalLM, make_loader
from tests.environments import ROOT

GUIDE = (ROOT / "docs" / "guides" / "my-loss-spiked.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_gives_callbacks_that_train(code: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 (our own page)
    callbacks: list[StabilizerCallback] = names["callbacks"] if "callbacks" in names else [names["clip"]]
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    logged: dict[str, float] = {}
    with attach(
        None, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda values, _: logged.update(values)
    ) as handle:
        for batch in make_loader(3):
            loss = model(**batch).loss
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert not any(callback.has_failed for callback in callbacks)
    assert any(tag.startswith("clip/") for tag in logged)


def test_the_guide_has_code() -> None:
    assert len(BLOCKS) == 5


def test_the_order_is_that_of_the_questions() -> None:
    titles = re.findall(r"^## (\d)\. (.*)$", GUIDE, re.MULTILINE)
    assert [int(number) for number, _ in titles] == list(range(len(titles)))
    assert [title for _, title in titles[1:5]] == ["Data and reward", "Policy", "Numerics", "System"]


def test_types_and_kinds_are_those_of_the_callbacks() -> None:
    data = section(GUIDE, "1. Data and reward").partition("**Is it the reward?**")[0]
    rows = re.findall(r"^\| (`.*?) \|", data, re.MULTILINE)
    assert sorted(re.findall(r"`([\w.]+)`", " ".join(rows))) == sorted(TYPE_NAMES)
    assert set(re.findall(r"`finding/(\w+)`", GUIDE)) <= set(health.KINDS)
    verdicts = re.findall(r"^\| `(\w+)` \|", section(GUIDE, "4. System"), re.MULTILINE)
    assert set(verdicts) <= set(numerics.VERDICTS)
