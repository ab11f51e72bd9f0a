"""Several models, optimizers and forward passes in one loop, and what a micro-batch's loss weighs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from stabilizer.batches import count
from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach, recommended
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import attached, make_accelerator
from tests.lightning_models import make_trainer
from tests.tiny_loops import Loop, OneLayer, Steps, loss_at, no_log, prepared_unit, unit


def _gan(*, scale: float | None = None) -> Any:
    """An accelerator, generator, discriminator and their optimizers, prepared."""
    accelerator = make_accelerator()
    if scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    (generator, first), (discriminator, second) = unit(), unit()
    prepared = accelerator.prepare(generator, discriminator, first, second)
    if scale is not None:  # Accelerate refuses it on a CPU
        accelerator.native_amp = True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    return (accelerator, *prepared)


def _gan_losses(generator: Any, discriminator: Any) -> tuple[Any, Any]:
    """Functions of the two losses, which are 100 and 1; the discriminator sees both models' forward passes."""
    noise = torch.ones(4, 1)
    return (
        lambda: (discriminator(generator(noise).detach())).mean() * 100,
        lambda: (discriminator(generator(noise))).mean(),
    )


@pytest.mark.parametrize("scale", [None, 4.0])
def test_each_optimizer_of_a_handle_has_its_own_loss(scale: float | None) -> None:
    accelerator, generator, discriminator, first, second = _gan(scale=scale)
    both = nn.ModuleDict({"g": generator, "d": discriminator})
    accelerator._models.append(both)
    steps, means = Steps(), LossMeanVarCallback(every_n_steps=1, warmup_steps=0)
    loss_d, loss_g = _gan_losses(generator, discriminator)
    with attached(accelerator, both, [first, second], steps, means):
        for _ in range(4):
            accelerator.backward(loss_d())
            accelerator.clip_grad_norm_(discriminator.parameters(), 1e9)
            second.step()
            second.zero_grad()
            accelerator.backward(loss_g())
            accelerator.clip_grad_norm_(generator.parameters(), 1e9)
            second.zero_grad()  # what the generator's loss has left there, which is no loss of its own
            first.step()
            first.zero_grad()
    assert steps.losses(0) == [1.0] * 4
    assert steps.losses(1) == [100.0] * 4
    assert (means.statistics(0)["mean_100"], means.statistics(1)["mean_100"]) == (1.0, 100.0)


def test_two_handles_on_one_accelerator_see_their_own_losses() -> None:
    accelerator, generator, discriminator, first, second = _gan()
    loss_d, loss_g = _gan_losses(generator, discriminator)
    steps_g, steps_d = Steps(name="g"), Steps(name="d")
    with (
        attached(accelerator, generator, first, steps_g),
        attached(accelerator, discriminator, second, steps_d),
    ):
        for _ in range(3):
            accelerator.backward(loss_d())
            second.step()
            second.zero_grad()
            accelerator.backward(loss_g())
            first.step()
            first.zero_grad()
            second.zero_grad()
    assert (steps_g.losses(), steps_d.losses()) == ([1.0] * 3, [100.0] * 3)
    for steps in (steps_g, steps_d):
        assert [position.num_micro_batches for position in steps.positions] == [1, 1, 1]


def test_one_key_in_two_handles_on_one_accelerator_is_refused() -> None:
    accelerator, generator, discriminator, first, second = _gan()
    again, named = GradNormCallback(), GradNormCallback(name="d")
    with attached(accelerator, generator, first, GradNormCallback()):
        with pytest.raises(ValueError, match=r"GradNormCallback.*name="):
            attach(accelerator, model=discriminator, optimizer=second, callbacks=[again], log=no_log)
        assert again.driver is None
        assert not discriminator._forward_pre_hooks
        with attached(accelerator, discriminator, second, named):
            pass
    with attached(accelerator, discriminator, second, again):  # free again
        pass


def test_the_default_suite_can_be_named() -> None:
    callbacks = recommended(name="student")
    assert [callback.state_key for callback in callbacks] == [
        "GradNormCallback[student]",
        "LossMeanVarCallback[student]",
        "AdaptiveClipThreshold[student]",
        "GradLocCallback[student]",
    ]
    assert {callback.name for callback in recommended()} == {""}
    with Loop("plain", *callbacks) as loop:
        loop.step(1.0)
    tags = {tag for values, _ in loop.rows for tag in values}
    assert {"student/grad_norm/total", "student/loss/mean_100"} <= tags
    assert all(tag.startswith("student/") for tag in tags)


IDS = torch.tensor([[5, 1, 2, 3], [6, 1, 2, 4]])


def _labels(case: str) -> Tensor:
    labels = IDS.clone()
    if case == "padded":
        labels[0, 2:] = -100
    elif case == "prompt":
        labels[:, :2] = -100
    elif case == "shifted":
        labels = IDS.roll(-1, dims=1)
        labels[:, -1] = -100
    elif case == "masked":
        labels[:] = -100
        labels[0, 1] = 7  # another token than the model sees there
    return labels


@pytest.mark.parametrize("kind", ["tokens", "auto"])
@pytest.mark.parametrize(
    ("case", "expected"), [("copy", 6), ("padded", 4), ("prompt", 4), ("shifted", 6), ("masked", 1)]
)
def test_labels_that_the_model_shifts_do_not_count_in_the_first_column(case: str, expected: int, kind: str) -> None:
    labels = _labels(case)
    assert int(count({"input_ids": IDS, "labels": labels}, kind)) == expected
    whole = int((labels != -100).sum())
    assert int(count({"labels": labels}, kind)) == whole, "nothing says that they are shifted"
    assert int(count({"input_ids": IDS[:, :3], "labels": labels}, kind)) == whole


class Language(nn.Module):
    """Shifts labels inside, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean over the tokens that have one before them."""
        logits, targets = self.embedding(input_ids)[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return {"loss": loss, "num": (targets != -100).sum()}


def test_windows_hold_the_mean_over_all_tokens() -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = Language()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    steps = Steps()
    steps.loss_weight = "auto"
    total = num = 0.0
    with attached(accelerator, model, optimizer, steps):
        for length in (2, 5):
            ids = torch.randint(0, 8, (4, length))
            with accelerator.accumulate(model):
                outputs = model(input_ids=ids, labels=ids)
                accelerator.backward(outputs["loss"])
                optimizer.step()
                optimizer.zero_grad()
            total, num = total + float(outputs["loss"].detach() * outputs["num"]), num + int(outputs["num"])
    assert steps.losses() == pytest.approx([total / num], rel=1e-6)


@pytest.mark.parametrize("num_micro_batches", [None, 1, 2])
def test_two_forward_and_backward_passes_of_a_micro_batch_are_added(num_micro_batches: int | None) -> None:
    """Without `accumulate` a step is one micro-batch."""
    num = num_micro_batches or 1
    accelerator, model, optimizer = prepared_unit(gradient_accumulation_steps=num)
    steps = Steps()
    with attached(accelerator, model, optimizer, steps):
        for _ in range(2 * num):
            context: Any = contextlib.nullcontext() if num_micro_batches is None else accelerator.accumulate(model)
            with context:
                accelerator.backward(loss_at(model, 1.0))
                accelerator.backward(loss_at(model, 10.0))
                optimizer.step()
                optimizer.zero_grad()
    assert steps.done == [(0, 11.0, 11.0), (1, 11.0, 11.0)]


class TwoLosses(LightningModule):
    """Two forward and two backward passes a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OneLayer()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        """1 and 10."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_at(self.layer, 1.0))
        self.manual_backward(loss_at(self.layer, 10.0))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that moves nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        """Two batches."""
        return torch.utils.data.DataLoader([torch.ones(1)] * 2)  # type: ignore[arg-type]


def test_lightning_adds_them_too() -> None:
    steps = Steps()
    make_trainer(max_steps=2, callbacks=[steps]).fit(TwoLosses())
    assert steps.done == [(0, 11.0, 11.0), (1, 11.0, 11.0)]


def test_losses_that_a_loop_divides_itself_add_up_to_their_mean() -> None:
    steps = Steps()
    with Loop("accelerate", steps) as loop:
        for values in ((2.0, 4.0), (6.0, 10.0)):
            for value in values:
                loop.accelerator.backward(loss_at(loop.model, value) / 2)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert steps.done == [(0, 3.0, 3.0), (1, 8.0, 8.0)]


def test_a_recorded_loss_beside_backward_counts_its_micro_batch_once() -> None:
    accelerator, model, optimizer = prepared_unit(gradient_accumulation_steps=4)
    steps = Steps()
    with attached(accelerator, model, optimizer, steps) as handle:
        for number in range(8):
            with accelerator.accumulate(model):
                loss = loss_at(model, 1.0 + number)
                accelerator.backward(loss)
                handle.record_loss(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert steps.losses() == [2.5, 6.5]
    assert [(p.batch_index, p.num_micro_batches, p.is_short) for p in steps.positions] == [(3, 4, False), (7, 4, False)]


def test_micro_batches_that_pass_by_the_wrapper_are_counted_by_accumulate() -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    model = nn.Sequential(OneLayer())
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    steps = Steps()
    with attached(accelerator, wrapped, optimizer, steps):
        for number in range(8):
            with accelerator.accumulate(wrapped):
                accelerator.backward(loss_at(wrapped if number % 4 == 0 else wrapped[0], 1.0))
                optimizer.step()
                optimizer.zero_grad()
    assert steps.losses() == [1.0, 1.0]


def test_a_loader_of_one_batch_is_a_short_window() -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    dataset = torch.utils.data.TensorDataset(torch.ones(2, 1))
    model, optimizer = unit()
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(dataset, batch_size=2))
    steps = Steps()

    def loop() -> None:
        with attached(accelerator, model, optimizer, steps):
            for _ in range(2):
                for (inputs,) in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(inputs).mean())
                        optimizer.step()
                        optimizer.zero_grad()

    with pytest.warns(StabilizerWarning, match=r"has 1 micro-batch, .*divided by 4.* 0\.25 of"):
        loop()
    assert [position.num_micro_batches for position in steps.positions] == [1, 1]
    assert [position.is_short for position in steps.positions] == [True, True]
