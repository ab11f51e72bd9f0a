"""NumericsCallback beside the scalers of Accelerate and Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate.state import AcceleratorState
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from stabilizer.callbacks import attach
from tests.accelerate_loops import make_accelerator
from tests.lightning_models import make_trainer
from tests.numerics_runs import findings_of, make_numerics
from tests.test_numerics_scale import WIDTH, Model, make_scaler

pytestmark = [
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
]


@pytest.mark.covers(feature="broken steps told apart", strategy="single", host="accelerate")
def test_overflows_in_accelerate_are_counted(tmp_path: Path) -> None:
    # A scaler on a CPU, which Accelerate refuses there.
    accelerator = make_accelerator()
    accelerator.scaler = make_scaler(2.0**10)
    torch.manual_seed(0)
    bare = Model()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    accelerator.native_amp = True
    AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    callback = make_numerics(tmp_path)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss: Tensor = model(x)
        return loss * 1e13

    with attach(
        accelerator, model=model, optimizer=optimizer, callbacks=[callback], loss_fn=loss_fn, log=lambda *_: None
    ):
        for _ in range(20):
            accelerator.backward(loss_fn(model, torch.ones(4, WIDTH)))
            optimizer.step()
            optimizer.zero_grad()
    [finding] = findings_of(callback)
    assert (finding.kind, finding.verdict, finding.step) == ("stuck_loss_scale", "scaler_overflow", 17)


class Module(pl.LightningModule):
    """The same in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """A loss that overflows."""
        loss: Tensor = self.model(batch)
        return loss * 1e13

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        """Twenty micro-batches."""
        return torch.utils.data.DataLoader([torch.ones(4, WIDTH)] * 20, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.covers(feature="broken steps told apart", strategy="single", host="lightning")
def test_overflows_in_lightning_are_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callback = make_numerics(tmp_path)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=make_scaler(2.0**10))
    make_trainer(callbacks=[callback], max_steps=20, plugins=plugin).fit(Module())
    [finding] = findings_of(callback)
    assert (finding.kind, finding.verdict, finding.step) == ("stuck_loss_scale", "scaler_overflow", 17)
