"""Field reports, area nonfinite-skip: the module that makes a NaN is told from those that carry it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, attach
from stabilizer.numerics.producers import ProducerWatch
from tests.field_reports.helpers import covers
from tests.lightning_models import make_trainer
from tests.numerics_runs import make_numerics
from tests.tiny_loops import no_log

WIDTH = 4

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")


class Part(nn.Module):
    """Takes and returns a dictionary with a tuple in it, and whole numbers beside; may make a NaN, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_bad = self.fails = False

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        """One step of the state."""
        if self.fails:
            raise RuntimeError("in the middle of a forward")
        x = torch.tanh(self.linear(state["hidden"][1]))
        x = x * math.nan if self.is_bad else x
        return {"hidden": (state["count"], x), "count": state["count"] + 1}


class Model(nn.Module):
    """Six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map x to a number a row."""
        state: dict[str, Any] = {"hidden": (torch.zeros(2, dtype=torch.int64), x), "count": torch.tensor(1)}
        for part in self.parts:
            state = part(state)
        output: Tensor = self.head(state["hidden"][1])
        return output


def num_hooks(model: nn.Module) -> int:
    """On all modules."""
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def batches(num: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        yield torch.randn(8, WIDTH, generator=generator)


@covers("single", host="plain")
def test_B080_only_the_producer_is_named_with_the_way_into_its_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = make_numerics(tmp_path)
    loss_of = lambda model, x: model(x).square().mean()  # noqa: E731
    before = num_hooks(model)
    # A step with NaN in all gradients would be the end.
    callbacks = [callback, AdaptiveClipThreshold(on_nonfinite="skip_step")]
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=loss_of, log=no_log):
        for step, x in enumerate(batches(4)):
            model.parts[3].is_bad = step == 2
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = callback.findings
    assert (finding.kind, finding.verdict, finding.step, finding.layer) == ("nonfinite_loss", "repeats", 2, "parts.3")
    assert 'parts.3 makes NaN: output["hidden"][1], of inputs and parameters that are finite' in finding.text
    assert "parts.4 makes" not in finding.text
    report = json.loads((tmp_path / "step_2/report.json").read_text())
    assert report["producer"]["module"] == "parts.3"
    assert num_hooks(model) == before


def test_B080_an_exception_in_the_middle_of_a_forward_leaves_no_hooks() -> None:
    model = Model()
    before = num_hooks(model)
    model.parts[4].fails = True

    def watched() -> None:
        with ProducerWatch(model):
            assert num_hooks(model) > before
            model(torch.zeros(2, WIDTH))

    with pytest.raises(RuntimeError, match="in the middle"):
        watched()
    assert num_hooks(model) == before


@covers("single", host="lightning")
def test_B080_a_fit_that_breaks_off_leaves_no_hooks(tmp_path: Path) -> None:
    """The replay of the bad step fails as well: that is said, and the fit's own exception is the one to be seen."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.model.parts[3].is_bad = index == 2
            self.model.parts[5].fails = index == 3
            return self.model(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(list(batches(6)), batch_size=None)  # type: ignore[arg-type]

    torch.manual_seed(0)
    module, callback = Module(), make_numerics(tmp_path)
    before = num_hooks(module)
    with pytest.raises(RuntimeError, match="in the middle"):
        make_trainer(callbacks=[callback], max_steps=6).fit(module)
    assert [(one.verdict, one.layer) for one in callback.findings] == [("repeats", "model.parts.3")]
    assert num_hooks(module) == before
