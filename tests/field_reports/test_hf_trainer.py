"""Field reports on transformers' Trainer: gradients, losses and accumulation with our callbacks in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerTrainerCallback,
)
from tests import reference as oracle
from tests.field_reports.helpers import TOLERANCE, covers, norm_logger, our_warnings
from tests.field_reports.trainer_tools import Run, levels
from tests.grpo_runs import make_grpo
from tests.launcher import run_distributed
from tests.loss_alarm_loops import summary, watcher, with_spikes
from tests.trainer_runs import VOCABULARY, Rows, make_llama, micro_batches, reference

INF, NAN = math.inf, math.nan


def test_B006_adapters_of_the_trainer_that_get_no_gradients_are_named(tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(make_llama(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))

    cut = adapted()
    for layer in cut.base_model.model.model.layers:
        # What a reentrant checkpoint does to a block whose inputs ask for no gradient.
        layer.register_forward_hook(lambda module, args, output: output.detach())
    run = Run(tmp_path, norm_logger(granularity="parameter"), model=cut)
    [message] = run.messages
    assert message.startswith("4 of 5 trainable parameters had no gradient in the first 3 optimizer steps")
    assert all(f"model.layers.{number}.self_attn.q_proj.lora_{half}" in message for number in (0, 1) for half in "AB")

    frozen = adapted()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("lm_head.modules_to_save" in name)
    run = Run(tmp_path, norm_logger(granularity="parameter"), model=frozen)
    assert run.messages == []
    [layer] = {tag for tag, _ in run.values if "/layer/" in tag}
    assert "lm_head" in layer

    run = Run(tmp_path, GradNormCallback(), model=adapted(), before=_weightless)
    assert any("the total gradient norm is exactly 0 in the first 3" in message for message in run.messages)


def _weightless(trainer: Trainer) -> None:
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.sum() * 0


def two_levels(rank: int, world_size: int, folder: Path) -> Any:
    values = with_spikes([1.0, 3.0] * 70, {121: 50.0})
    callback, guard = watcher("log", every_n_steps=5), AdaptiveClipThreshold(mode="observe")
    run = Run(folder, callback, guard, strategy="ddp", max_steps=70, **levels(values))
    return callback.statistics(), callback.alarms, run.values


def test_B008_the_trainer_s_loss_is_that_of_all_ranks(tmp_path: Path) -> None:
    (first, alarms, values), (second, others, _) = run_distributed(two_levels, tmp_path)
    assert (first, alarms) == (second, others)
    [alarm] = alarms
    assert (alarm.kind, alarm.step) == ("jump", 60)
    assert alarm.value == pytest.approx(25.5)
    # Our step 55 is the trainer's 56.
    expected = {"mean_20": 2.0, "min": 1.0, "max": 3.0, "max_rank": 1.0}
    assert {name: values[f"loss/{name}", 56] for name in expected} == pytest.approx(expected)
    assert values["loss/max", 61] == pytest.approx(50.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_B012_a_nan_that_the_trainer_s_log_hides_is_told_at_its_step(tmp_path: Path) -> None:
    callback = watcher("log", every_n_steps=1)
    values = with_spikes([2.0] * 12, {5: NAN})
    run = Run(tmp_path, callback, AdaptiveClipThreshold(), max_steps=12, **levels(values))
    # As if nothing had happened.
    assert all(math.isfinite(loss) for loss in run.shown("loss"))
    assert summary(callback) == [("nonfinite", 5, 1)]
    assert any(message.startswith("step 5") and "the loss is not finite" in message for message in run.messages)
    assert run.series("alarm/nonfinite") == {6: 1.0}
    assert run.series("loss/nonfinite") == {step: float(step >= 6) for step in range(1, 13)}
    assert set(run.series("loss/mean_20").values()) == {2.0}
    assert run.trainer.model.weight == 1


def test_B012_a_nan_in_a_policy_s_loss_is_told_at_its_step(tmp_path: Path) -> None:
    def spoil(trainer: Any, batch: dict[str, Tensor]) -> None:
        if trainer.state.global_step == 2:
            batch["advantages"][0] = NAN

    callback, rows = LossMeanVarCallback(every_n_steps=1, warmup_steps=0), list[Any]()
    suite = StabilizerTrainerCallback([callback, AdaptiveClipThreshold()], log=lambda *row: rows.append(row))
    trainer = make_grpo("single", tmp_path, callbacks=[suite], inject=spoil, max_steps=4)
    with our_warnings() as messages:
        trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert summary(callback) == [("nonfinite", 2, 1)]
    assert any(message.startswith("step 2") and "the loss is not finite" in message for message in messages)
    counts = {step: values["loss/nonfinite"] for values, step in rows if "loss/nonfinite" in values}
    assert counts == {1: 0, 2: 0, 3: 1, 4: 1}
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())


def test_B032_the_trainer_s_limit_is_that_of_the_full_sum_of_micro_batches(tmp_path: Path) -> None:
    signs = (1, 1, -1, -0.9)
    calls = iter(signs)

    def signed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return next(calls) * _summed(outputs.logits, labels) / num_items_in_batch

    model = make_llama().double()
    [step] = micro_batches(num_steps=1, accumulation=4, num_ranks=1)
    num_tokens = sum(int((piece["labels"][:, 1:] != -100).sum()) for [piece] in step)
    alone = []
    for sign, [piece] in zip(signs, step, strict=True):
        loss = sign * _summed(model(input_ids=piece["input_ids"]).logits, piece["labels"]) / num_tokens
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        alone.append({name: g for (name, _), g in zip(model.named_parameters(), gradients, strict=True)})
    raw = {name: torch.stack([gradients[name] for gradients in alone]).sum(0) for name in alone[0]}
    total = oracle.total_norm(raw)
    assert total < 0.5 * sum(map(oracle.total_norm, alone)), "nothing cancels: the test says nothing"
    run = Run(
        tmp_path,
        GradNormCallback(),
        gradient_accumulation_steps=4,
        max_grad_norm=total / 2,
        max_steps=1,
        kwargs={"compute_loss_func": signed},
    )
    assert run.series("grad_norm/total") == {1: pytest.approx(total, rel=TOLERANCE)}
    [received] = run.seen.gradients
    for name, gradient in raw.items():
        # Half of the whole sum: a clip of each micro-batch would have turned it.
        torch.testing.assert_close(received[name].double(), gradient / 2, rtol=1e-4, atol=1e-7)


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits[:, :-1].reshape(-1, VOCABULARY)
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_B075_mean_and_deviation_of_the_trainer_s_losses_are_those_of_finite_ones(tmp_path: Path) -> None:
    values = [1.0, 2.0, NAN, 4.0, INF, 6.0]
    losses = LossMeanVarCallback(windows=(3,), every_n_steps=1, warmup_steps=0, on_alarm=[])
    run = Run(tmp_path, losses, AdaptiveClipThreshold(), max_steps=6, **levels(values))
    for step in range(1, 7):
        window = [value for value in values[:step] if math.isfinite(value)][-3:]
        assert run.values["loss/mean_3", step] == pytest.approx(np.mean(window), rel=1e-6)
        if step > 2:
            # The sample's: divided by n - 1.
            assert run.values["loss/std_3", step] == pytest.approx(np.std(window, ddof=1), rel=1e-6)
    assert run.series("loss/nonfinite") == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    assert run.trainer.state.global_step == losses.next_step() == 6


@covers("single", "transformers")
@pytest.mark.parametrize("knows_tokens", [True, False])
def test_B033_the_trainer_s_loss_and_norms_do_not_depend_on_accumulation(tmp_path: Path, knows_tokens: bool) -> None:
    def unaware(trainer: Trainer) -> None:
        # Each micro-batch's loss is a mean then, which the trainer divides by their number.
        trainer.model_accepts_loss_kwargs = knows_tokens

    runs = {}
    for accumulation in (1, 2, 4):
        losses = LossMeanVarCallback(windows=(2,), every_n_steps=1, warmup_steps=0, strict=True)
        runs[accumulation] = Run(
            tmp_path,
            norm_logger(strict=True),
            losses,
            before=unaware,
            dataset=Rows(64) if knows_tokens else _Even(64),
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=8 // accumulation,
        )
    tags = {key for key in runs[1].values if key[0].startswith(("grad_norm/", "loss/mean_"))}
    assert {("loss/mean_2", 3), ("grad_norm/total", 1), ("grad_norm/layer/model.layers.1", 2)} <= tags
    for run in runs.values():
        assert {key: run.values[key] for key in tags} == pytest.approx(
            {key: runs[1].values[key] for key in tags}, rel=1e-4
        )
    if knows_tokens:
        expected = reference(num_steps=3, accumulation=4, num_ranks=1, max_norm=1.0)
        totals = list(runs[4].series("grad_norm/total").values())
        assert totals == pytest.approx([step["total"] for step in expected], rel=TOLERANCE)
        mean = (expected[1]["loss"] + expected[2]["loss"]) / 2
        assert runs[4].values["loss/mean_2", 3] == pytest.approx(mean, rel=TOLERANCE)


class _Even(Rows):
    """All samples have as many labels."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "labels": self.ids[index].clone()}
