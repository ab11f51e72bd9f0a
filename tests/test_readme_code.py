"""README's code, run as it stands."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import load_callbacks
from tests.accelerate_loops import make_accelerator
from tests.event_files import read_run

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def _block(language: str, word: str) -> str:
    [block] = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in code]
    return block


class LanguageModel(nn.Module):
    """Answers like a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.table(input_ids)
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def _names(num_batches: int = 4) -> dict[str, Any]:
    tokens = torch.arange(num_batches * 2 * 5).reshape(num_batches, 2, 5) % 9
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": [{"input_ids": batch, "labels": batch.clone()} for batch in tokens],
        "torch": torch,
    }


def _check(folder: Path, *, num_steps: int) -> None:
    scalars = read_run(folder).scalars
    assert set(scalars["grad_norm/total"]) == set(range(num_steps))
    assert 0 in scalars["loss/mean_100"]
    assert scalars["loss/min"][0] > 0


def test_the_loop_of_accelerate(tmp_path: Path) -> None:
    names = _names()
    accelerator = make_accelerator(gradient_accumulation_steps=2, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    names["model"], names["optimizer"] = accelerator.prepare(names["model"], names["optimizer"])
    exec(_block("python", "attach(accelerator"), {**names, "accelerator": accelerator})  # noqa: S102 (our own page)
    accelerator.end_training()
    _check(tmp_path / "run", num_steps=2)
    assert set(read_run(tmp_path / "run").scalars["grad_norm/total_after"]) == {0, 1}


def test_the_plain_loop(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    code = _block("python", "attach(None")
    exec("from stabilizer.callbacks import attach, recommended\n" + code, {**_names(), "writer": writer})  # noqa: S102 (our own page)
    writer.close()
    _check(tmp_path, num_steps=4)


def test_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = _block("python", "callbacks=recommended())\ntrainer.fit").partition("\n\n#")[0]
    code = code.replace('strategy="ddp", ', "max_steps=2, enable_progress_bar=False, accelerator='cpu', ")
    from tests.lightning_models import make_module

    exec(code, {"model": make_module("transformer")})  # noqa: S102 (our own page)
    _check(tmp_path / "lightning_logs" / "version_0", num_steps=2)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stabilizer.yaml"
    path.write_text(_block("yaml", "preset: safe"), encoding="utf-8")
    norms, *_ = load_callbacks(path)
    assert (norms.layer_every_n_steps, norms.exclude) == (50, ["lm_head"])
