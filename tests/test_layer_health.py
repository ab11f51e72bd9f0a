"""LayerHealthCallback: every finding in a run that has it, and none in a run that is well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stabilizer import tags
from stabilizer.callbacks import LayerHealthCallback, attach
from stabilizer.errors import StabilizerWarning
from stabilizer.health import KINDS
from stabilizer.markdown import note
from tests import reference_health as reference
from tests.environments import ROOT
from tests.event_files import read_run
from tests.models import loss_of, make_transformer, token_batch
from tests.scripted_norms import BLOCKS, NUM_BLOCKS, SHORT, kinds, names_of, noise, only, play

pytestmark = pytest.mark.filterwarnings("ignore:.*no gradient in the first:stabilizer.errors.StabilizerWarning")


def _texts(folder: Path) -> list[tuple[int, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    found = events.Tensors(f"{tags.FINDING_TEXT}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


class Sigmoids(nn.Module):
    """A deep network of sigmoids without residual connections."""

    def __init__(self, num_blocks: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_blocks))
        self.head = nn.Linear(16, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.sigmoid(block(x))
        output: Tensor = self.head(x)
        return output


class SigmoidModule(pl.LightningModule):
    """The same in Lightning; keeps the norms of its blocks as it sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Sigmoids()
        self.norms: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        error: Tensor = self.model(batch) - batch.sum(1, keepdim=True)
        return error.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients: Any = [[one.grad for one in block.parameters()] for block in self.model.blocks]
        self.norms.append([float(torch.cat([g.double().flatten() for g in block]).norm()) for block in gradients])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        inputs: Any = torch.randn(60, 4, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(inputs, batch_size=None)


@pytest.mark.covers(feature="layer health", host="lightning", strategy="single")
def test_a_deep_network_of_sigmoids(tmp_path: Path) -> None:
    """Decay and vanishing, in a Trainer: told once, in the loggers as number and text, with numpy's figures."""
    callback, module = LayerHealthCallback(**SHORT), SigmoidModule()
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = pl.Trainer(
        max_steps=45, accelerator="cpu", callbacks=[callback], logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    with pytest.warns(StabilizerWarning) as caught:
        trainer.fit(module)
    said = [str(one.message) for one in caught if issubclass(one.category, StabilizerWarning)]
    assert kinds(callback) == ["exponential_decay", "vanishing"]
    decay, vanishing = callback.findings
    assert said == [f"exponential_decay (warning): {decay.text}", f"vanishing (alarm): {vanishing.text}"]
    # Found as soon as half a window is there; nothing of the first four steps is in it.
    rows = np.array(module.norms)[4:21]
    slope, r_squared, half_depth = reference.depth_line(reference.log_medians(rows))
    assert decay.step == vanishing.step == 20
    assert decay.evidence == pytest.approx(
        {"slope": slope, "r_squared": r_squared, "half_depth": half_depth, "num_blocks": 12}, rel=1e-4
    )
    assert r_squared > 0.8
    assert half_depth < 3
    assert vanishing.evidence["ratio"] == pytest.approx(reference.deep_over_shallow(rows), rel=1e-4)
    assert vanishing.severity == "alarm"
    assert vanishing.layers == ("model.blocks.0", "model.blocks.1")
    assert decay.layers == ("model.blocks.0", "model.blocks.11")
    assert "step 20: the gradient norm of the shallow blocks (model.blocks.0, model.blocks.1) is" in vanishing.text
    run = read_run(tmp_path)
    assert run.scalars[f"{tags.FINDING}/vanishing"] == {0: 0, 10: 0, 20: 3, 30: 3, 40: 3}
    assert run.scalars[f"{tags.FINDING}/loss_plateau"].keys() == {0, 10, 20, 30, 40}
    assert _texts(tmp_path) == [
        (20, note("warning: exponential_decay", decay.text)),
        (20, note("alarm: vanishing", vanishing.text)),
    ]


def _train(callback: LayerHealthCallback, model: nn.Module, *, num_steps: int, lr: float = 0.02) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    rows: list[Any] = []
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)) as run:
        for step in range(num_steps):
            loss = loss_of(model, token_batch(0, step=step))
            loss.backward()
            run.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    return rows


@pytest.mark.covers(feature="layer health", host="plain", strategy="single")
def test_a_healthy_transformer_has_no_finding() -> None:
    callback = LayerHealthCallback(strict=True, window=50, warmup_steps=20, loss_window=50, every_n_steps=10)
    rows = _train(callback, make_transformer(num_layers=8), num_steps=130)
    assert callback.findings == []
    assert {tag for values, _ in rows for tag in values} == {f"{tags.FINDING}/{kind}" for kind in KINDS}


def test_a_recorded_healthy_run_has_no_finding() -> None:
    """2,500 steps of a small GPT with all defaults."""
    recorded = np.load(ROOT / "tests/data/healthy_run.npz")
    names = [str(name).replace("blocks", "layers") for name in recorded["layer_names"]]
    callback = LayerHealthCallback(strict=True)
    points, said = play(callback, recorded["norms"][:, :-1], names=names, losses=recorded["losses"].tolist())
    assert callback.findings == []
    assert said == []
    assert len(points) == 50 * len(KINDS)
    assert set(points.values()) == {0}


@pytest.mark.parametrize("direction", ["deep", "shallow"])
@pytest.mark.parametrize(("factor", "level"), [(0.3, 0), (0.05, 2), (0.002, 3)])
def test_vanishing(direction: str, factor: float, level: int) -> None:
    """Deep ones (the last quarter) against the first two blocks, in both directions."""
    names = names_of(NUM_BLOCKS)
    norms = noise(60, names)
    small = [BLOCKS[6], BLOCKS[7]] if direction == "deep" else [BLOCKS[0], BLOCKS[1]]
    norms[:, [names.index(f"{name}.fc") for name in small]] *= factor
    callback = LayerHealthCallback(**SHORT)
    points, _ = play(callback, norms, names=names)
    assert points[f"{tags.FINDING}/vanishing", 50] == level
    assert points[f"{tags.FINDING}/exponential_decay", 50] == 0
    if level:
        found = only(callback, "vanishing")
        assert found.layers == tuple(small)
        expected = reference.deep_over_shallow(norms[4:21, 1:-1])
        assert found.evidence["ratio"] == pytest.approx(expected, rel=1e-4)


def test_warning_becomes_alarm() -> None:
    names = names_of(NUM_BLOCKS)
    norms = noise(90, names)
    norms[:, 7:9] *= 0.05
    norms[45:, 7:9] *= 0.05
    callback = LayerHealthCallback(**SHORT)
    _, said = play(callback, norms, names=names)
    assert [finding.severity for finding in callback.findings if finding.kind == "vanishing"] == ["warning", "alarm"]
    assert len([text for text in said if text.startswith("vanishing (alarm): step ")]) == 1


def test_parts_apart() -> None:
    names = names_of(NUM_BLOCKS, has_parts=True)
    norms = noise(60, names)
    norms[:, [position for position, name in enumerate(names) if name.endswith("attn")]] *= 3
    norms[:, names.index("layers.2.attn")] *= 40
    callback = LayerHealthCallback(**SHORT)
    play(callback, norms, names=names)
    found = only(callback, "parts_apart")
    assert found.layers == ("layers.2",)
    attention, mlp = (norms[4:21, names.index(f"layers.2.{part}")] for part in ("attn", "mlp"))
    assert found.evidence["ratio"] == pytest.approx(np.exp(np.median(np.log(attention / mlp))), rel=1e-4)
    assert found.evidence["usual_ratio"] == pytest.approx(3, rel=0.15)
    assert "too much in its attention part" in found.text


def test_parts_that_differ_alike_in_all_blocks_are_no_finding() -> None:
    names = names_of(NUM_BLOCKS, has_parts=True)
    norms = noise(60, names)
    norms[:, [position for position, name in enumerate(names) if name.endswith("attn")]] *= 40
    callback = LayerHealthCallback(**SHORT)
    play(callback, norms, names=names)
    assert callback.findings == []


def test_a_trainable_adapter_that_is_switched_off() -> None:
    """Its gradient is zero, not absent; the block that it is in trains."""
    model = make_transformer(num_layers=4, adapters=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    layers: Any = model.layers
    off = layers[2].attention.v
    off.lora_a.register_forward_hook(lambda module, inputs, output: 0 * output)
    off.lora_b.register_forward_hook(lambda module, inputs, output: 0 * output)
    callback = LayerHealthCallback(**SHORT)
    with pytest.warns(StabilizerWarning, match="no_gradient"):
        _train(callback, model, num_steps=31, lr=0.001)
    found = only(callback, "no_gradient")
    assert found.layers == ("layers.2.attention.v.lora_a", "layers.2.attention.v.lora_b")
    # Steps 4 to 23 are twenty; it is looked at step 30.
    assert (found.step, found.evidence["num_steps"]) == (30, 27)


def test_a_module_that_no_forward_pass_calls() -> None:
    callback = LayerHealthCallback(**SHORT)
    with pytest.warns(StabilizerWarning, match=r"no_gradient \(warning\): step 30: 1 of \d+ trainable modules"):
        _train(callback, make_transformer(num_layers=4, unused=True), num_steps=35)
    assert only(callback, "no_gradient").layers == ("unused",)


def test_an_expert_that_is_used_now_and_then_is_no_finding() -> None:
    names = names_of(NUM_BLOCKS)
    norms = noise(120, names)
    norms[:, 3] *= np.arange(120) % 15 == 0
    callback = LayerHealthCallback(**SHORT)
    play(callback, norms, names=names)
    assert callback.findings == []


def test_blocks_of_a_finer_granularity() -> None:
    """The depth is that of the blocks, whose norms are put together from their modules'."""
    names = names_of(NUM_BLOCKS, has_parts=True)
    norms = noise(60, names) * np.array([1.0, *np.repeat(0.5 ** np.arange(NUM_BLOCKS), 2), 1.0])
    callback = LayerHealthCallback(**SHORT, granularity="module")
    play(callback, norms, names=names)
    found = only(callback, "exponential_decay")
    blocks = np.sqrt((norms[4:21, 1:-1] ** 2).reshape(17, NUM_BLOCKS, 2).sum(2))
    expected = reference.depth_line(reference.log_medians(blocks))
    assert [found.evidence[name] for name in ("slope", "r_squared", "half_depth")] == pytest.approx(expected, rel=1e-4)
    assert found.layers == ("layers.7", "layers.0")


def test_a_model_without_blocks_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["first", "second", "third"]
    norms = noise(70, names)
    norms[57, 1] *= 100
    callback = LayerHealthCallback(**SHORT)
    play(callback, norms, names=names)
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "nothing of depth: 0 repeated blocks, exponential_decay and vanishing need 4" in table
    assert [(one.kind, one.layers) for one in callback.findings] == [("explosion_one", ("second",))]
