"""What RolloutMismatchCallback sees in TRL equals what TRL says itself, and what its inputs come to in float64."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import RolloutMismatchCallback, StabilizerTrainerCallback
from stabilizer.errors import StabilizerWarning
from tests.grpo_runs import make_grpo, make_model
from tests.launcher import run_distributed

#: Ours -> TRL's; the latter are logged when a batch is sampled.
_PAIRS = {
    "policy/entropy": "entropy",
    "policy/kl_ref": "kl",
    "policy/clipped": "clip_ratio/region_mean",
    "policy/completion_length": "completions/mean_length",
    "policy/truncated": "completions/clipped_ratio",
    "policy/reward": "reward",
    "policy/zero_variance_groups": "frac_reward_zero_std",
}


_QUIET: dict[str, Any] = {
    "k3_limits": None,
    "ess_limits": None,
    "max_log_ratio": None,
    "ln2_share": None,
    "shift_limits": None,
}


def _run(
    folder: str, strategy: str = "single", *, alarms: bool = False, **options: Any
) -> tuple[dict[tuple[str, int], float], Any]:
    rows: list[tuple[dict[str, float], int]] = []
    mismatch = RolloutMismatchCallback() if alarms else RolloutMismatchCallback(**_QUIET)
    # A reference policy must be on the disk.
    path = f"{folder}/model"
    is_distributed = torch.distributed.is_initialized()
    if not is_distributed or torch.distributed.get_rank() == 0:
        make_model().save_pretrained(path)
    if is_distributed:
        torch.distributed.barrier()
    trainer = make_grpo(
        strategy,
        folder,
        callbacks=[StabilizerTrainerCallback([mismatch], log=lambda values, step: rows.append((values, step)))],
        model=path,  # type: ignore[arg-type]
        **{"num_iterations": 2, "beta": 0.1, "max_steps": 4, "learning_rate": 3e-2, **options},
    )
    trainer.train()
    return {(tag, step): value for values, step in rows for tag, value in values.items()}, trainer


def _compare(rank: int, world_size: int, folder: str, strategy: str) -> bool:
    points, trainer = _run(folder, strategy)
    if rank:
        return True
    found = 0
    for entry in trainer.state.log_history:
        for ours, theirs in _PAIRS.items():
            if theirs in entry and "loss" in entry:
                assert points[ours, entry["step"]] == pytest.approx(entry[theirs], rel=1e-4, abs=1e-6), ours
                found += 1
    assert found >= 2 * len(_PAIRS)
    # Something to see: the second step of a batch is off policy, and clipped.
    assert points["policy/clipped", 2] > 0
    assert [points["policy/policy_lag", step] for step in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert points["policy/behaviour_is_old", 2] == 1
    # Rewards belong to the step after which nothing new is sampled for a while.
    assert ("policy/reward", 2) not in points
    return True


@pytest.mark.covers(feature="rollout mismatch", strategy="single", host="transformers")
def test_signals_are_those_that_trl_logs(tmp_path: Path) -> None:
    _compare(0, 1, str(tmp_path), "single")


@pytest.mark.covers(feature="rollout mismatch", strategy="ddp", host="transformers")
def test_signals_on_two_ranks_are_those_that_trl_logs(tmp_path: Path) -> None:
    assert run_distributed(_compare, str(tmp_path), "ddp", world_size=2, timeout=100) == [True, True]


def test_completions_that_are_cut_off_and_left_out(tmp_path: Path) -> None:
    points, trainer = _run(str(tmp_path), mask_truncated_completions=True)
    (first, *_) = (entry for entry in trainer.state.log_history if "completions/clipped_ratio" in entry)
    assert 0 < first["completions/clipped_ratio"] < 1
    assert points["policy/truncated", 1] == pytest.approx(first["completions/clipped_ratio"], rel=1e-5)
    assert points["policy/completion_length", 1] == pytest.approx(first["completions/mean_length"], rel=1e-5)


def test_log_probs_of_other_rows_end_no_run(tmp_path: Path) -> None:
    """A subclass may compute more than the trainer it comes from."""
    import tests.grpo_runs as runs

    original = runs._Injected._get_per_token_logps_and_entropies
    calls = list[int]()

    def twice(self: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, model, input_ids, attention_mask, *args, **kwargs)
        if model.training and found[0].requires_grad:
            calls.append(1)
            original(self, model, input_ids[:1], attention_mask[:1], *args, **kwargs)
        return found

    runs._Injected._get_per_token_logps_and_entropies = twice  # type: ignore[method-assign]
    try:
        _, trainer = _run(str(tmp_path))
    finally:
        del runs._Injected._get_per_token_logps_and_entropies
    assert calls
    assert trainer.state.global_step == 4


def test_the_mismatch_is_that_of_the_engine_that_sampled(tmp_path: Path) -> None:
    """Log-probs of the rollout engine, where there are any: not those of the old policy as training computes them."""
    seen: list[dict[str, np.ndarray[Any, Any]]] = []

    def inject(trainer: Any, batch: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(len(seen))
        noise = 0.1 * torch.randn(batch["old_per_token_logps"].shape, generator=generator)
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + noise
        # Tokens that the engine could not score.
        batch["sampling_per_token_logps"][0, 0] = math.nan
        names = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
        seen.append({name: batch[name].double().numpy() for name in names})

    with pytest.warns(StabilizerWarning, match="not finite"):
        points, _ = _run(str(tmp_path), inject=inject)
    for step, batch in enumerate(seen, start=1):
        mask = (batch["completion_mask"] > 0) & ~np.isnan(batch["sampling_per_token_logps"])
        log_ratios = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask]
        ratios = np.exp(log_ratios)
        assert points["rollout/kl_k3", step] == pytest.approx(float((ratios - 1 - log_ratios).mean()), rel=1e-4)
        assert points["rollout/effective_sample_size", step] == pytest.approx(
            float(ratios.mean() ** 2 / (ratios**2).mean()), rel=1e-4
        )
        assert points["rollout/mean_log_ratio", step] == pytest.approx(float(log_ratios.mean()), rel=1e-3)
        assert ("policy/behaviour_is_old", step) not in points


def test_what_is_not_observable_is_told_once(tmp_path: Path) -> None:
    with pytest.warns(StabilizerWarning, match="keeps no log-probs by token of the policy that sampled") as caught:
        points, _ = _run(str(tmp_path), num_iterations=1)
    assert sum("keeps no log-probs" in str(one.message) for one in caught) == 1
    assert not any(tag.startswith("rollout/") for tag, _ in points)
    assert ("policy/entropy", 4) in points


def test_a_uniform_shift_is_alarmed(tmp_path: Path) -> None:
    def inject(trainer: Any, batch: dict[str, Tensor]) -> None:
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.19

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        points, _ = _run(str(tmp_path), alarms=True, inject=inject, max_steps=1)
    assert any("rollout_shift (alarm)" in str(one.message) for one in caught), [str(one.message) for one in caught]
    assert points["rollout/mean_log_ratio", 1] == pytest.approx(-0.19, rel=1e-4)


def test_a_reward_that_is_held_out(tmp_path: Path) -> None:
    mismatch = RolloutMismatchCallback(**_QUIET)
    rows: list[tuple[dict[str, float], int]] = []
    trainer = make_grpo(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([mismatch], log=lambda values, step: rows.append((values, step)))],
        num_iterations=2,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=4,
        eval_dataset=True,
    )
    trainer.train()
    evaluated = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    found = {step: values["policy/heldout_reward"] for values, step in rows if "policy/heldout_reward" in values}
    # Known from the step after the evaluation on.
    assert found == {3: pytest.approx(evaluated[0])}
