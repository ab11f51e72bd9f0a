"""docs/callbacks/grad_loc.md: its code, run as it stands, and the parts that are made from the package."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from stabilizer.callbacks import GradLocCallback
from stabilizer.localize.incident import Incident
from stabilizer.localize.table import TYPE_NAMES
from tests.accelerate_loops import make_accelerator
from tests.environments import ROOT
from tests.gradloc_page import PAGES, replaced
from tests.lightning_models import make_trainer

PAGE = (ROOT / "docs/callbacks/grad_loc.md").read_text(encoding="utf-8")
STEP, ROW, POSITION = 4, 1, 2


def _block(word: str) -> str:
    """The code with this word, without the indentation of a list."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    [found] = [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in blocks if word in code]
    return found


class Model(nn.Module):
    """As a model of transformers; token numbers to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lm_head = nn.Embedding(9, 9), nn.Linear(9, 9)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> Any:
        logits = self.lm_head(self.table(input_ids))
        loss = None
        if labels is not None and weights is not None:
            losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
            loss = (losses * weights.flatten()).mean()
        return types.SimpleNamespace(loss=loss, logits=logits)


def _loader() -> list[dict[str, Tensor]]:
    """Six batches; one token of the fifth has a weight that is no number."""
    tokens = torch.arange(6 * 3 * 6).reshape(6, 3, 6) % 9
    batches = [{"input_ids": one, "labels": one, "weights": torch.ones(3, 5)} for one in tokens]
    batches[STEP]["weights"][ROW, POSITION] = torch.nan
    return batches


def _check(callback: GradLocCallback) -> None:
    assert not callback.has_failed
    [incident] = callback.incidents
    assert incident.error is None
    assert incident.step == STEP
    [token] = incident.tokens
    assert (token.row, token.position) == (ROW, POSITION)


def _names() -> dict[str, Any]:
    """What the loops of the page take for given; `loss_of` is that of the page."""
    names: dict[str, Any] = {"torch": torch}
    exec(_block("token_gate(log_probs)"), names)  # noqa: S102 (our own page)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {**names, "model": model, "optimizer": optimizer, "loader": _loader()}


def test_the_plain_loop_with_the_gate_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**_names(), "writer": lambda values, step: None}
    exec(_block("loss_fn=loss_of, log=writer"), names)  # noqa: S102 (our own page)
    _check(names["callbacks"][0])


def test_the_loop_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _names()
    accelerator = make_accelerator()
    names["model"], names["optimizer"] = accelerator.prepare(names["model"], names["optimizer"])
    names["accelerator"] = accelerator
    code = _block("attach(accelerator").replace("loss_fn=loss_of", "loss_fn=loss_of, log=print")
    exec(code, names)  # noqa: S102 (our own page)
    _check(names["callbacks"][0])


def test_manual_optimization(tmp_path: Path) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(_block("stabilizer_loss").partition("\nmodule =")[0], names)  # noqa: S102 (our own page)
    callback = GradLocCallback(dump_dir=str(tmp_path), strict=True)
    module, batches = names["MyModule"](Model()), DataLoader(_loader(), batch_size=None)  # type: ignore[arg-type]
    make_trainer(callbacks=[callback], max_steps=6).fit(module, batches)
    _check(callback)


@pytest.mark.parametrize(("page", "what"), [(page, what) for page, parts in PAGES.items() for what in parts])
def test_what_is_made_is_up_to_date(page: str, what: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert replaced(text, what) == text, "python -m tests.gradloc_page writes it"


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="once each"):
        replaced("no marks", "schema")


def test_every_type_and_every_action_has_its_row() -> None:
    does = PAGE.partition("## What it does")[2].partition("## When to use it")[0]
    rows = re.findall(r"^\| `\"?([\w.]+)\"?` \| ", does, re.MULTILINE)
    assert sorted(rows) == sorted([*TYPE_NAMES, "report", "drop_tokens", "skip_step"])


def test_defaults_that_the_page_names() -> None:
    callback = GradLocCallback()
    for name, text in {
        "trigger_ratio": "`trigger_ratio` (3)",
        "reproduce_tol": "`reproduce_tol` (1 %)",
        "max_probes": "`max_probes` (16)",
        "cooldown_steps": "`cooldown_steps` (100)",
        "warmup_steps": "`warmup_steps` (50)",
    }.items():
        assert text in PAGE, text
        number = float(re.findall(r"\((\d+)", text)[0])
        assert getattr(callback, name) in (number, number / 100)
    assert Incident(step=0, type="D", observed_norm=1.0, threshold=1.0).schema == 1
    assert "`schema` is 1." in PAGE
