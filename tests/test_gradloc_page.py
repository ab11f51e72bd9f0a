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

from stabilizer.callbacks import GradLocCallback, attach
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


class Logits(nn.Module):
    """Token numbers to logits; nothing in it can be tapped but through `token_gate`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


class WithLoss(nn.Module):
    """As a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.lm_head = Logits(), nn.Linear(9, 9)

    def forward(self, tokens: Tensor, labels: Tensor, weights: Tensor) -> Any:
        logits = self.lm_head(self.net(tokens))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return types.SimpleNamespace(loss=(losses * weights.flatten()).mean(), logits=logits)


def _loader() -> list[dict[str, Tensor]]:
    """Six batches; one token of the fifth has a weight that is no number."""
    tokens = torch.arange(6 * 3 * 5).reshape(6, 3, 5) % 9
    batches = [{"tokens": one, "labels": (one + 1) % 9, "weights": torch.ones(3, 5)} for one in tokens]
    batches[STEP]["weights"][ROW, POSITION] = torch.nan
    return batches


def _callback(folder: Path) -> GradLocCallback:
    return GradLocCallback(dump_dir=str(folder), strict=True)


def _check(callback: GradLocCallback) -> None:
    [incident] = callback.incidents
    assert incident.error is None
    assert incident.step == STEP
    [token] = incident.tokens
    assert (token.row, token.position) == (ROW, POSITION)


def _names() -> dict[str, Any]:
    """What the loops of the page take for given; `loss_of` is that of the page."""
    names: dict[str, Any] = {}
    exec(_block("token_gate(log_probs)"), names)  # noqa: S102 (our own page)
    model = Logits()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {**names, "attach": attach, "model": model, "optimizer": optimizer, "loader": _loader()}


def test_the_plain_loop_with_the_gate_by_hand(tmp_path: Path) -> None:
    callback = _callback(tmp_path)
    names = {**_names(), "callbacks": [callback], "writer": lambda values, step: None}
    exec(_block("attach(None"), names)  # noqa: S102 (our own page)
    _check(callback)


def test_the_loop_of_accelerate(tmp_path: Path) -> None:
    callback, names = _callback(tmp_path), _names()
    accelerator = make_accelerator()
    names["model"], names["optimizer"] = accelerator.prepare(names["model"], names["optimizer"])
    code = _block("attach(accelerator").replace("loss_fn=loss_of", "loss_fn=loss_of, log=print")
    exec(code, {**names, "accelerator": accelerator, "callbacks": [callback]})  # noqa: S102 (our own page)
    _check(callback)


def test_manual_optimization(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(_block("stabilizer_loss"), names)  # noqa: S102 (our own page)

    class WithData(names["MyModule"]):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(_loader(), batch_size=None)  # type: ignore[arg-type]

    callback = _callback(tmp_path)
    make_trainer(callbacks=[callback], max_steps=6).fit(WithData(WithLoss()))
    _check(callback)


@pytest.mark.parametrize(("page", "what"), [(page, what) for page, parts in PAGES.items() for what in parts])
def test_what_is_made_is_up_to_date(page: str, what: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert replaced(text, what) == text, "python -m tests.gradloc_page writes it"


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="once each"):
        replaced("no marks", "schema")


def test_every_type_and_every_action_has_its_row() -> None:
    rows = re.findall(r"^\| `\"?([\w.]+)\"?` \| ", PAGE.partition("## Privacy")[0], re.MULTILINE)
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
