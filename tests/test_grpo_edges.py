"""GradLoc in TRL where something is missing, bounded or not known; and in its other trainers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

from stabilizer.callbacks import GradLocCallback, GradNormCallback, StabilizerTrainerCallback
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import reset
from tests.grpo_runs import make_grpo, make_model, make_tokenizer
from tests.test_grpo import FAULT_AT, OLD_LOG_PROB, POSITION, ROW, search


def _plant_advantage(trainer: Any, batch: dict[str, Tensor]) -> None:
    if trainer._step == FAULT_AT:
        batch["completion_mask"][ROW, : POSITION + 1] = 1
        advantages = batch["advantages"].unsqueeze(1).repeat(1, batch["completion_mask"].shape[1])
        advantages[ROW, POSITION] = -3e3
        batch["advantages"] = advantages


def _plant_ratio(trainer: Any, batch: dict[str, Tensor]) -> None:
    if trainer._step == FAULT_AT:
        batch["completion_mask"][ROW, : POSITION + 1] = 1
        batch["old_per_token_logps"][ROW, POSITION] = OLD_LOG_PROB
        batch["advantages"][ROW] = -1.0


def _run(folder: Path, *, inject: Any, **options: Any) -> GradLocCallback:
    localizer = search(folder)
    trainer = make_grpo(
        "single",
        folder,
        callbacks=[StabilizerTrainerCallback([localizer], log=lambda *_: None)],
        inject=inject,
        **{"num_iterations": 2, "max_steps": FAULT_AT + 1, "max_grad_norm": 0.0, **options},
    )
    trainer.train()
    return localizer


def test_ratios_that_trl_does_not_keep_are_not_observable_and_never_absent(tmp_path: Path) -> None:
    localizer = _run(tmp_path, inject=_plant_advantage, num_iterations=1)
    (incident,) = localizer.incidents
    assert (incident.type, incident.ratio) == ("D", "not observable")
    (token,) = incident.tokens
    assert (token.row, token.position, token.log_ratio) == (ROW, POSITION, None)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sapo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ],
    ids=["sapo", "sequence", "cispo"],
)
def test_a_bounded_loss_that_shows_no_spike_stays_silent(tmp_path: Path, options: dict[str, Any]) -> None:
    """The very fault that `test_grpo` finds with an unbounded loss."""
    assert _run(tmp_path, inject=_plant_ratio, **options).incidents == []


def test_a_sequence_whose_tokens_are_all_a_little_off(tmp_path: Path) -> None:
    """No token's ratio is extreme, their product is."""

    def plant(trainer: Any, batch: dict[str, Tensor]) -> None:
        if trainer._step == FAULT_AT:
            batch["completion_mask"][ROW] = 1
            batch["old_per_token_logps"][ROW] -= 6.0
            batch["advantages"][ROW] = -1.0

    (incident,) = _run(tmp_path, inject=plant).incidents
    assert incident.type == "A.2"
    assert {token.row for token in incident.tokens} == {ROW}
    for token in incident.tokens:
        assert token.log_ratio is not None
        assert token.log_ratio < 11.51
        assert token.sequence_log_ratio is not None
        assert token.sequence_log_ratio > 11.51


def test_the_ratio_to_the_engine_that_sampled_counts_too(tmp_path: Path) -> None:
    """With vLLM TRL weighs by it; its log-probs of that token are wrong, the old policy's are right."""

    def plant(trainer: Any, batch: dict[str, Tensor]) -> None:
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"].clone()
        batch["sampling_per_token_logps"][0, 0] = math.nan  # which the engine could not score
        _plant_advantage(trainer, batch)
        if trainer._step == FAULT_AT:
            batch["sampling_per_token_logps"][ROW, POSITION] = OLD_LOG_PROB

    (incident,) = _run(tmp_path, inject=plant).incidents
    (token,) = incident.tokens
    assert (incident.type, token.row, token.position) == ("A.1", ROW, POSITION)
    assert token.log_ratio is not None
    assert -8 < token.log_ratio + OLD_LOG_PROB < 0


def test_a_reference_policy_and_accumulation(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")

    def plant(trainer: Any, batch: dict[str, Tensor]) -> None:
        # The second micro-batch of a step.
        if trainer._step == 2 * FAULT_AT + 1:
            batch["advantages"] = batch["advantages"].unsqueeze(1).repeat(1, batch["completion_mask"].shape[1])
            batch["completion_mask"][ROW, : POSITION + 1] = 1
            batch["advantages"][ROW, POSITION] = -3e3

    (incident,) = _run(
        tmp_path,
        inject=plant,
        beta=0.1,
        gradient_accumulation_steps=2,
        model=str(tmp_path / "model"),
        entropy_coef=0.02,
        use_adaptive_entropy=True,
        entropy_target=5.0,
    ).incidents
    assert incident.reproducible
    assert [(one.micro_batch, one.row, one.position) for one in incident.tokens] == [(1, ROW, POSITION)]


def test_a_coefficient_that_follows_the_run_is_replayed_as_it_was(tmp_path: Path) -> None:
    """The last micro-batch of a step moves TRL's entropy coefficient: the replay is of before that."""
    for micro_batch in (0, 1):

        def plant(trainer: Any, batch: dict[str, Tensor], number: int = micro_batch) -> None:
            if trainer._step == 2 * FAULT_AT + number:
                batch["completion_mask"][ROW, : POSITION + 1] = 1
                advantages = batch["advantages"].unsqueeze(1).repeat(1, batch["completion_mask"].shape[1])
                advantages[ROW, POSITION] = -3e4
                batch["advantages"] = advantages

        (incident,) = _run(
            tmp_path / str(micro_batch),
            inject=plant,
            gradient_accumulation_steps=2,
            entropy_coef=1.0,
            use_adaptive_entropy=True,
            entropy_target=5.0,
            entropy_coef_delta=10.0,
            entropy_coef_max=1000.0,
        ).incidents
        assert incident.replayed_norm == pytest.approx(incident.local_norm, rel=1e-5)


def test_a_version_of_trl_that_is_not_known_is_told_and_training_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    original = GRPOTrainer._get_per_token_logps_and_entropies
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    monkeypatch.setattr(GRPOTrainer, "_log_probs_of_tomorrow", original, raising=False)
    code = GRPOTrainer._compute_loss.__code__
    names = tuple("_log_probs_of_tomorrow" if "logps_and" in name else name for name in code.co_names)
    monkeypatch.setattr(GRPOTrainer._compute_loss, "__code__", code.replace(co_names=names))
    norms = GradNormCallback()
    localizer = search(tmp_path)
    trainer = make_grpo(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([localizer, norms], log=lambda *_: None)],
        max_steps=FAULT_AT + 1,
        max_grad_norm=0.0,
        inject=_plant_advantage,
    )
    with pytest.warns(StabilizerWarning, match=r"this version of trl is not known: .*known is trl 1\.16"):
        trainer.train()
    assert trainer.state.global_step == FAULT_AT + 1
    assert len(norms.norm_history().totals) == FAULT_AT + 1


def _texts(num: int = 64) -> Dataset:
    return Dataset.from_list([{"text": f"{a % 10} + {a // 10 % 10} = {(a + a // 10) % 10}"} for a in range(num)])


def _pairs(num: int = 64) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"{a % 10} + 1 =", "chosen": f" {(a + 1) % 10}", "rejected": f" {a % 7} 3"} for a in range(num)]
    )


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_other_trainers_of_trl(tmp_path: Path, kind: str) -> None:
    """Their fused heads never call the output embedding: the gate stands on the log-probs that they give."""
    weights, found = [], list[Any]()
    for localizes in (True, False):
        reset()
        localizer = search(tmp_path)
        callbacks = [StabilizerTrainerCallback([localizer], log=lambda *_: None)] if localizes else []
        shared: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "activation_checkpointing": False,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_steps": FAULT_AT + 1,
            "per_device_train_batch_size": 4,
            "max_grad_norm": 0.0,
            "dataloader_pin_memory": False,
            "logging_steps": 1,
        }
        model: Any = make_model(dropout=0.1)
        if kind == "sft":
            trainer: Any = SFTTrainer(
                model=model,
                args=SFTConfig(**shared),
                train_dataset=_texts(),
                processing_class=make_tokenizer(),
                callbacks=callbacks,
            )
        else:
            trainer = DPOTrainer(
                model=model,
                ref_model=make_model(),
                args=DPOConfig(**shared),
                train_dataset=_pairs(),
                processing_class=make_tokenizer(),
                callbacks=callbacks,
            )
        _blow_up(trainer, at=FAULT_AT)
        trainer.train()
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        found += localizer.incidents
    (incident,) = found
    assert incident.reproducible
    assert incident.is_complete
    assert {(token.row, token.position) for token in incident.tokens} == {(2, 3)}
    assert not any("outside the search" in note for note in incident.notes)
    assert math.isfinite(incident.counterfactual_norm)
    assert incident.counterfactual_norm < incident.observed_norm / 3
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _blow_up(trainer: Any, *, at: int) -> None:
    """One token's log-prob counts a thousand times in the loss of one step."""
    inner = trainer.accelerator.unwrap_model(trainer.model)
    forward = inner.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if trainer.state.global_step == at and torch.is_grad_enabled():
            scale = torch.ones_like(output.log_probs)
            scale[2, 3] = 1e3
            output["log_probs"] = output.log_probs * scale
        return output

    inner.forward = scaled
