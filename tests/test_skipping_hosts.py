"""What goes on around a skipped step: hooks of others, schedulers, accumulation, counters, collectives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback
from tests.accelerate_loops import attached, make_accelerator
from tests.counting import count_collectives
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, expected_batches, make_trainer
from tests.lightning_variants import Manual, Plain
from tests.models import loss_of, make_transformer
from tests.skip_tools import MODEL, NAN, OPTIMIZERS, SQRT, changed, snapshot, train
from tests.tiny_loops import told

FIXED = {"name": "fixed", "threshold": 100.0}


def norms_of(optimizer: Any) -> list[float]:
    """What a user's hook reads: raises if a gradient is gone."""
    return [float(parameter.grad.norm()) for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
@pytest.mark.parametrize("package", [*PACKAGES, f"{PACKAGES[0]} manual"])
def test_hooks_of_others_still_see_the_gradients(package: str, name: str) -> None:
    """A skip is applied after them, whatever the order in the list."""
    seen: list[bool] = []

    def look(trainer: Any, module: Any, optimizer: Any) -> None:
        seen.append(all(torch.isfinite(torch.tensor(norms_of(optimizer)))))

    kind = importlib.import_module(f"{package.split()[0]}.callbacks").LambdaCallback
    others = [kind(on_before_optimizer_step=look) for _ in range(2)]
    callbacks = [others[0], LayerClipCallback(), others[1]]
    run = train(package, callbacks, num_steps=3, faults={(1, None): NAN}, optimizer=name)
    assert seen == [True, True, False, False, True, True]
    assert run.moved(1) == []
    assert run.moved(2)


class Reads(Plain):
    """A module that looks at its gradients in its own hook, which comes after all callbacks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(make_transformer(**MODEL), **options)
        self.norms: list[list[float]] = []
        self.states: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Read all norms."""
        self.norms.append(norms_of(optimizer))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep weights and optimizer."""
        self.states.append(snapshot(self.model, self.trainer.optimizers[0]))

    def on_train_end(self) -> None:
        """Keep the last ones."""
        self.states.append(snapshot(self.model, self.trainer.optimizers[0]))

    def moved(self) -> list[bool]:
        """Whether each batch has changed anything."""
        return [bool(changed(*pair)) for pair in zip(self.states, self.states[1:], strict=False)]


def bad_at(*batches: int) -> Any:
    """A loss that is NaN in some batches."""
    return lambda module, batch, number: loss_of(module.model, batch) * (NAN if number in batches else 1.0)


@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "sgd_fused"])
def test_a_module_s_own_hook_still_sees_the_gradients(name: str) -> None:
    module = Reads(optimizer=OPTIMIZERS[name], loss=bad_at(1))
    with told():
        make_trainer(max_steps=3, callbacks=[AdaptiveClipThreshold()]).fit(module)
    assert [any(norm != norm for norm in norms) for norms in module.norms] == [False, True, False]
    assert module.moved() == [True, False, True]


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
def test_only_the_step_with_the_bad_micro_batch_is_skipped(name: str) -> None:
    """Windows of three: batch 4 spoils the second of three steps."""
    module, clip = Reads(optimizer=OPTIMIZERS[name], loss=bad_at(4)), LayerClipCallback()
    trainer = make_trainer(max_steps=3, accumulate_grad_batches=3, callbacks=[clip])
    with told() as messages:
        trainer.fit(module)
    assert module.moved() == [False, False, True, False, False, False, False, False, True]
    assert (trainer.global_step, clip.next_step(), clip.num_skipped()) == (3, 3, 1)
    [message] = messages
    assert message.startswith("step 1: ")
    assert "the loss is not finite on rank 0" in message


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
def test_only_the_step_with_the_bad_micro_batch_is_skipped_with_an_accelerator(name: str) -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    bare = make_transformer(**MODEL)
    inner = OPTIMIZERS[name](bare.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(bare, inner, scheduler)
    clip, moved, rates = LayerClipCallback(), [], []
    with told() as messages, attached(accelerator, model, optimizer, clip):
        for number in range(9):
            before = snapshot(bare, inner)
            with accelerator.accumulate(model):
                loss = loss_of(model, expected_batches("transformer", number)[0])
                accelerator.backward(loss * (NAN if number == 4 else 1.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            moved.append(bool(changed(before, snapshot(bare, inner))))
            rates.append(scheduler.get_last_lr()[0])
    assert moved == [False, False, True, False, False, False, False, False, True]
    assert (clip.next_step(), clip.num_skipped()) == (3, 1)
    assert rates[2::3] == pytest.approx([0.05 / 2, 0.05 / 4, 0.05 / 8]), "a skipped step is a step of the schedule"
    [message] = messages
    assert message.startswith("step 1: ")


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
def test_the_schedule_and_the_trainer_s_count_go_on(name: str) -> None:
    class Scheduled(Reads):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # At the first step too, where torch would warn of a schedule that comes before the optimizer.
    module = Scheduled(optimizer=OPTIMIZERS[name], loss=bad_at(0, 2))
    trainer = make_trainer(max_steps=4, callbacks=[LayerClipCallback()])
    with told():
        trainer.fit(module)
    assert trainer.global_step == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 / 16)
    assert module.moved()[1:] == [True, False, True]


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
def test_a_training_step_that_returns_none_is_no_step(name: str) -> None:
    """It enters no history and is no skip; the step after it is as ever."""
    histories = []
    for without in ((), (2, 5)):
        clips = [LayerClipCallback(), AdaptiveClipThreshold()]

        def loss(module: Any, batch: Any, number: int, without: Any = without) -> Tensor | None:
            # The same data for the steps that remain.
            place = number - sum(skipped < number for skipped in without)
            own = expected_batches("transformer", place)[0]
            return None if number in without else loss_of(module.model, own)

        module = Reads(optimizer=OPTIMIZERS[name], loss=loss)
        module.on_before_optimizer_step = lambda optimizer: None  # type: ignore[method-assign, assignment]
        with told() as messages:
            make_trainer(max_steps=7 if without else 5, callbacks=clips, limit_train_batches=5 + len(without)).fit(
                module
            )
        assert messages == []
        histories.append(str([clip.extra_state()["clips"]["0"]["thresholds"] for clip in clips]))
        assert [(clip.num_skipped(), clip.next_step()) for clip in clips] == [(0, 5), (0, 5)]
    assert histories[0] == histories[1]


def test_several_steps_in_a_batch_are_skipped_each_for_itself() -> None:
    class Twice(Manual):
        def training_step(self, batch: Any, batch_index: int) -> None:
            optimizer: Any = self.optimizers()
            for number in range(2):
                before = snapshot(self.model, optimizer.optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss_of(self.model, batch) * (NAN if (batch_index, number) == (1, 0) else 1.0))
                optimizer.step()
                moved.append(bool(changed(before, snapshot(self.model, optimizer.optimizer))))

    moved: list[bool] = []
    clip = LayerClipCallback()
    with told():
        make_trainer(max_steps=6, callbacks=[clip]).fit(Twice())
    assert moved == [True, True, False, True, True, True]
    assert (clip.next_step(), clip.num_skipped()) == (6, 1)


def collectives(rank: int, world_size: int, strategy: str, name: str) -> tuple[list[int], list[bool]]:
    """How many there are in each step; a bad one is step 5, one that is skipped for a spike step 6."""
    clip = LayerClipCallback(rule=FIXED, on_spike="skip_step", every_n_steps=1)
    with count_collectives() as calls:
        run = train(
            "plain",
            [clip],
            num_steps=8,
            faults={(5, 1): SQRT, (6, 1): 1e6},
            rank=rank,
            num_ranks=world_size,
            strategy=strategy,
            optimizer=name,
            look=lambda: len(calls),
        )
    numbers = [after - before for before, after in zip(run.extra, run.extra[1:], strict=False)]
    return numbers, [bool(run.moved(step)) for step in range(8)]


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_ranks_exchange_the_same_whether_they_skip_or_not(strategy: str, name: str) -> None:
    (first, moved), (second, also) = run_distributed(collectives, strategy, name)
    assert moved == also == [step not in (5, 6) for step in range(8)]
    assert first == second
    # Steps at which nothing is due that is not due at every step.
    assert first[6] == first[7] == first[3], "a skip costs nothing"
    assert first[5] > first[3], "a bad gradient is looked at"
