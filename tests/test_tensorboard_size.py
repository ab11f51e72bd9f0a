"""What a long run leaves on the disk for TensorBoard: at most 20 MB in 10,000 steps of a model of 40 layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import LayerClipCallback, attach, recommended
from stabilizer.callbacks.pictures import norm_heatmap
from stabilizer.drawing import png
from tests.event_files import read_run

NUM_LAYERS, NUM_STEPS = 40, 10_000
LIMIT = 20_000_000


class Deep(nn.Module):
    """Forty blocks with the names that models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_LAYERS))})
        self.lm_head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Add up all blocks."""
        for layer in self.model["layers"]:
            x = x + 0.1 * layer(x)
        return self.lm_head(x)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean of squares."""
    return model(batch).square().mean()


def num_bytes(folder: Path, num_steps: int) -> int:
    """Size of the event files of a run with the default suite and a clip of every layer."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callbacks = [*recommended(), LayerClipCallback()]
    with (
        SummaryWriter(str(folder)) as writer,
        attach(None, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=loss_of, log=writer) as handle,
    ):
        for _ in range(num_steps):
            batch = torch.randn(2, 4)
            handle.record_batch(batch)
            loss = loss_of(model, batch)
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    run = read_run(folder)
    layers = [tag for tag in run.scalars if tag.startswith("clip/layer_coefficient/")]
    assert len(layers) == NUM_LAYERS + 1
    assert len(run.scalars["grad_norm/total"]) == num_steps
    return run.num_bytes


def test_ten_thousand_steps_fit(tmp_path: Path) -> None:
    """From two short runs what a step costs, from the largest picture what the pictures cost, one every 1,000 steps."""
    short, longer = num_bytes(tmp_path / "short", 120), num_bytes(tmp_path / "longer", 220)
    by_step = (longer - short) / 100
    torch.manual_seed(0)
    # Noise over as many steps as a picture has: nothing is larger as a PNG.
    rows, names = torch.rand(1024, NUM_LAYERS + 1).exp(), [f"model.layers.{n}" for n in range(NUM_LAYERS + 1)]
    marks = {"incident": list(range(0, 1024, 50)), "alarm": list(range(0, 1024, 10))}
    picture = len(png(norm_heatmap(rows, steps=range(1024), layer_names=names, marks=marks)))
    whole = short + by_step * NUM_STEPS + 11 * picture
    assert by_step < 1300, f"{by_step:.0f} bytes a step"
    assert picture < 100_000, f"{picture} bytes a picture"
    assert whole < LIMIT, f"{whole / 1e6:.1f} MB"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_steps(tmp_path: Path) -> None:
    assert num_bytes(tmp_path, NUM_STEPS) < LIMIT
