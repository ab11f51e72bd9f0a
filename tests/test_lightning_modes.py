"""The ways in which people train with Lightning: manual optimization, scalers, clips, compilation, several fits."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stabilizer.callbacks import GradNormCallback, StabilizerCallback
from stabilizer.errors import StabilizerWarning
from tests.event_files import Run, read_run
from tests.lightning_models import make_module, make_trainer
from tests.lightning_variants import Manual, Plain, TwoOptimizers
from tests.models import loss_of, make_transformer


def _fit(module: Any, folder: Path, *, max_steps: int = 4, **options: Any) -> Run:
    from lightning.pytorch.loggers import TensorBoardLogger

    options.setdefault("callbacks", [GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None)])
    trainer = make_trainer(max_steps=max_steps, logger=TensorBoardLogger(folder, name="", version="run"), **options)
    trainer.fit(module)
    return read_run(folder / "run")


def _raw(folder: Path) -> dict[int, float]:
    """The totals of a plain run on the same data."""
    return _fit(Plain(), folder).scalars["grad_norm/total"]


def _total(optimizer: torch.optim.Optimizer) -> float:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


def _recording(record: list[Any]) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        optimizer.register_step_post_hook(lambda o, args, kwargs: record.append(_total(o)))
        return optimizer

    return make


@pytest.mark.parametrize("clip", [{"gradient_clip_val": 0.5}, {"gradient_clip_val": 1e-3, "algorithm": "value"}, {}])
def test_lightning_s_own_clip_beside_ours(clip: dict[str, Any], tmp_path: Path) -> None:
    clip = dict(clip)
    if algorithm := clip.pop("algorithm", None):
        clip["gradient_clip_algorithm"] = algorithm
    received: list[float] = []
    run = _fit(Plain(optimizer=_recording(received)), tmp_path, **clip)
    assert run.scalars["grad_norm/total"][0] == pytest.approx(_raw(tmp_path / "raw")[0], rel=1e-6)
    if not clip:
        assert not any("after" in tag for tag in run.scalars)
        return
    assert list(run.scalars["grad_norm/total_after"].values()) == pytest.approx(received, rel=1e-5)
    layers = [tag.removeprefix("grad_norm/layer/") for tag in run.scalars if tag.startswith("grad_norm/layer/")]
    squares = sum(run.scalars[f"grad_norm/layer_after/{layer}"][0] ** 2 for layer in layers)
    assert squares**0.5 == pytest.approx(received[0], rel=1e-5)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_order_in_the_list_changes_nothing(order: tuple[int, ...], tmp_path: Path) -> None:
    seen: list[str] = []

    class First(StabilizerCallback):
        order = 10

        def on_gradients(self, context: Any) -> None:
            seen.append("first")

    class Last(StabilizerCallback):
        order = 90

        def on_gradients(self, context: Any) -> None:
            seen.append("last")

    callbacks = [GradNormCallback(), First(), Last()]
    run = _fit(Plain(), tmp_path, callbacks=[callbacks[number] for number in order], gradient_clip_val=0.5, max_steps=2)
    assert seen == ["first", "last"] * 2
    assert run.scalars["grad_norm/total"][0] == pytest.approx(_raw(tmp_path / "raw")[0], rel=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_manual_optimization_sees_raw_gradients(clip: float | None, algorithm: str, tmp_path: Path) -> None:
    if algorithm == "value" and clip:
        clip = 1e-3
    received: list[float] = []
    module = Manual(clip=clip, algorithm=algorithm)
    module.make_optimizer = _recording(received)
    run = _fit(module, tmp_path)
    totals = run.scalars["grad_norm/total"]
    assert list(totals) == [0, 1, 2, 3]
    assert totals[0] == pytest.approx(_raw(tmp_path / "raw")[0], rel=1e-6)
    after = run.scalars["grad_norm/total_after"] if clip else totals
    assert list(after.values()) == pytest.approx(received, rel=1e-5)


def test_several_steps_in_one_batch(tmp_path: Path) -> None:
    run = _fit(Manual(clip=0.5, steps_per_batch=3), tmp_path, max_steps=6)
    assert list(run.scalars["grad_norm/total"]) == list(run.scalars["grad_norm/total_after"]) == list(range(6))


@pytest.mark.parametrize("every", [1, 2])
def test_two_optimizers_have_their_own_statistics_and_steps(every: int, tmp_path: Path) -> None:
    module = TwoOptimizers(every=every)
    run = _fit(module, tmp_path, max_steps=12 if every == 1 else 9)
    for number, prefix in enumerate(("", "opt1/")):
        totals = run.scalars[f"{prefix}grad_norm/total"]
        assert list(totals) == list(range(len(module.expected[number])))
        assert list(totals.values()) == pytest.approx(module.expected[number], rel=1e-5)
    names = {tag.rpartition("/")[2] for tag in run.scalars if tag.startswith("opt1/grad_norm/layer/")}
    assert names == {"model.embed_tokens", "model.norm", "model.lm_head"}


@pytest.mark.parametrize("fused", [False, True])
def test_a_real_scaler(fused: bool, tmp_path: Path) -> None:
    """fp16 on a CPU: norms are unscaled, and overflow steps are counted as steps, without a warning."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    module = Plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0, fused=fused))
    run = _fit(module, tmp_path, max_steps=30, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    totals = run.scalars["grad_norm/total"]
    assert list(totals) == list(range(30))
    healthy = [step for step, total in totals.items() if math.isfinite(total)]
    # The scaler halves its scale at each overflow, which is how its own count can be read.
    assert 30 - len(healthy) == 30 - math.log2(scaler.get_scale()) > 3
    assert [step for step, number in run.scalars["grad_norm/nonfinite"].items() if number == 0] == healthy
    plain = _fit(Plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)), tmp_path / "b", max_steps=30)
    expected = [plain.scalars["grad_norm/total"][step] for step in healthy]
    assert [totals[step] for step in healthy] == pytest.approx(expected, rel=0.02)


class Still(torch.optim.SGD):
    """Moves nothing, not even by 0 * NaN."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only compute the gradients."""
        closure()


def test_a_non_finite_gradient_is_named_once(tmp_path: Path) -> None:
    def loss(module: Plain, batch: Any, number: int) -> torch.Tensor:
        return loss_of(module.model, batch) * (torch.nan if number in (1, 2) else 1)

    module = Plain(loss=loss, optimizer=Still)
    with pytest.warns(StabilizerWarning, match=r"step 1: .* not finite in 7 of 7 layers") as caught:
        run = _fit(module, tmp_path)
    assert sum(isinstance(warning.message, StabilizerWarning) for warning in caught) == 1
    assert list(run.scalars["grad_norm/nonfinite"].values()) == [0, 7, 7, 0]
    assert run.scalars["grad_norm/total"][3] > 0


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
def test_training_step_that_returns_nothing_is_no_step(tmp_path: Path) -> None:
    def loss(module: Plain, batch: Any, number: int) -> torch.Tensor | None:
        return None if number % 2 else loss_of(module.model, batch)

    run = _fit(Plain(loss=loss), tmp_path, max_steps=6)
    assert list(run.scalars["grad_norm/total"]) == [0, 1, 2]


@pytest.mark.parametrize("how", ["module", "in place", "lightning module"])
def test_compiled_modules(how: str, tmp_path: Path) -> None:
    model = make_transformer()
    if how == "module":
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    elif how == "in place":
        model.compile(backend="aot_eager")
    module: Any = Plain(model)
    if how == "lightning module":
        module = torch.compile(module, backend="aot_eager")
    plain = _fit(Plain(), tmp_path / "plain", max_steps=2)
    compiled = _fit(module, tmp_path / "compiled", max_steps=2)
    assert compiled.ours().keys() == plain.ours().keys()
    for tag, points in plain.ours().items():
        assert compiled.scalars[tag] == pytest.approx(points, rel=1e-4), tag


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = block
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's result."""
        return checkpoint(self._checkpoint_wrapped_module, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, tmp_path: Path) -> None:
    model = make_transformer()
    for number in (1, 3):
        model.layers[number] = Checkpointed(model.layers[number], use_reentrant)
    plain = _fit(Plain(), tmp_path / "plain", max_steps=2)
    again = _fit(Plain(model), tmp_path / "again", max_steps=2)
    assert again.ours() == plain.ours()


def test_several_fits_of_one_trainer_go_on_counting(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    callback = GradNormCallback()
    module = make_module("transformer", length=9)
    trainer = make_trainer(
        max_steps=-1,
        max_epochs=1,
        callbacks=[callback],
        logger=TensorBoardLogger(tmp_path, name="", version="run"),
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    assert list(read_run(tmp_path / "run").scalars["grad_norm/total"]) == list(range(6))
    assert callback.norm_history().steps == list(range(6))
    assert "clip_gradients" not in vars(trainer.precision_plugin), "Lightning's method was not given back"


def test_layers_that_are_unfrozen_later_join(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                embedding = pl_module.model.embed_tokens
                embedding.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(embedding.parameters())})

    model = make_transformer()
    model.embed_tokens.requires_grad_(False)
    callback = GradNormCallback(layer_every_n_steps=1)
    run = _fit(Plain(model), tmp_path, callbacks=[callback, Unfreeze()])
    assert list(run.scalars["grad_norm/layer/model.embed_tokens"]) == [2, 3]
    assert list(run.scalars["grad_norm/layer/model.norm"]) == [0, 1, 2, 3]
    history = callback.norm_history()
    assert history.steps == [0, 1, 2, 3]
    assert (history.norms[:, 0] > 0).tolist() == [False, False, True, True]
    assert history.norms[:2, 1].tolist() == list(run.scalars["grad_norm/layer/model.layers.0"].values())[:2]
