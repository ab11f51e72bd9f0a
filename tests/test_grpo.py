"""GradLoc in TRL's GRPOTrainer: the token is found, with a proof that TRL's loss confirms, and nothing is changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import GradLocCallback, StabilizerTrainerCallback
from stabilizer.localize.incident import Incident
from tests.grpo_runs import LENGTH, make_grpo, make_model, whole
from tests.launcher import run_distributed

#: The step with the fault.
FAULT_AT = 8
NUM_STEPS = 10
ROW, POSITION = 3, 2
#: Of the policy that sampled, in nature above -6 here: a log-ratio over the 11.51 of type A.1.
OLD_LOG_PROB = -20.0
BAD_RANK = 1


def plant_token(trainer: Any, batch: dict[str, Tensor]) -> None:
    """One token that the policy which sampled found far less likely, in a sequence with a bad reward."""
    accelerator = trainer.accelerator
    is_bad = accelerator.process_index == min(BAD_RANK, accelerator.num_processes - 1)
    if is_bad and trainer._step == FAULT_AT * trainer.args.gradient_accumulation_steps:
        # A completion that has ended has no loss behind its end.
        batch["completion_mask"][ROW, : POSITION + 1] = 1
        batch["old_per_token_logps"][ROW, POSITION] = OLD_LOG_PROB
        batch["advantages"][ROW] = -1.0


def search(folder: Path | str, **options: Any) -> GradLocCallback:
    """A callback that knows its thresholds after a few steps."""
    rule = {"name": "robust_log", "warmup_steps": 4}
    return GradLocCallback(rule=rule, warmup_steps=5, dump_dir=str(folder), **options)


def run(
    strategy: str, folder: str, *, localizes: bool = True, inject: Any = plant_token, **options: Any
) -> dict[str, Any]:
    """Train, with dropout, two steps a sampled batch."""
    localizer = search(folder)
    given = {"num_iterations": 2, "max_steps": NUM_STEPS, "max_grad_norm": 0.0, **options}
    callbacks = [StabilizerTrainerCallback([localizer], log=lambda *_: None)] if localizes else []
    trainer = make_grpo(strategy, folder, callbacks=callbacks, model=make_model(dropout=0.1), inject=inject, **given)
    trainer.train()
    clocks = ("runtime", "per_second", "step_time")
    logs = [
        {k: v for k, v in entry.items() if not any(clock in k for clock in clocks)}
        for entry in trainer.state.log_history
    ]
    return {
        "incidents": [incident.to_json() for incident in localizer.incidents],
        "weights": [whole(parameter) for parameter in trainer.model.parameters()],
        "logs": logs,
        "entropy_coef": trainer.entropy_coef,
        "rng": torch.get_rng_state(),
        "kind": type(trainer.model_wrapped).__name__,
    }


def _on_ranks(rank: int, world_size: int, strategy: str, folder: str, **options: Any) -> dict[str, Any]:
    return run(strategy, folder, **options)


def _runs(strategy: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    if strategy == "single":
        return [run(strategy, str(folder), **options)]
    return run_distributed(_on_ranks, strategy, str(folder), world_size=2, timeout=110, **options)


def _strategies() -> list[Any]:
    return [
        pytest.param(
            strategy, marks=pytest.mark.covers(feature="token localisation", strategy=strategy, host="transformers")
        )
        for strategy in ("single", "ddp", "fsdp2")
    ]


@pytest.mark.parametrize("strategy", _strategies())
def test_a_planted_token_is_found_and_nothing_is_changed(tmp_path: Path, strategy: str) -> None:
    # With two micro-batches a mean of a metric shows whether one of them was counted twice.
    options = {"gradient_accumulation_steps": 2 if strategy == "single" else 1}
    with_it = _runs(strategy, tmp_path / "a", **options)
    without = _runs(strategy, tmp_path / "b", localizes=False, **options)
    if strategy != "single":
        assert with_it[0]["kind"] == {"ddp": "DistributedDataParallel", "fsdp2": "FSDPQwen2ForCausalLM"}[strategy]
    for searched, plain in zip(with_it, without, strict=True):
        incident = Incident.from_json(searched["incidents"][0])
        assert (incident.type, incident.step, incident.ratio) == ("A.1", FAULT_AT, "observed")
        (token,) = incident.tokens
        rank = 0 if strategy == "single" else BAD_RANK
        assert (token.rank, token.micro_batch, token.row, token.position) == (rank, 0, ROW, POSITION)
        assert token.log_ratio is not None
        assert -8 < token.log_ratio + OLD_LOG_PROB < 0
        assert incident.num_passes <= 3
        assert incident.reproducible
        assert incident.replayed_norm == pytest.approx(incident.local_norm, rel=1e-4)
        # Dormant before, reporting then: bit for bit the run without it, logs and random numbers included.
        assert all(torch.equal(a, b) for a, b in zip(searched["weights"], plain["weights"], strict=True))
        assert searched["logs"] == plain["logs"] or _same_logs(searched["logs"], plain["logs"])
        assert torch.equal(searched["rng"], plain["rng"])


def _same_logs(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Equal, NaN for NaN; the norm that the trainer logs is ours, from another kernel."""
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if key == "grad_norm":
                assert value == pytest.approx(b[key], rel=1e-5)
            else:
                assert value == b[key] or (math.isnan(value) and math.isnan(b[key])), (key, value, b[key])
    return True


_LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "luspo", "sapo", "vespo")},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo-sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "two-sided": {"loss_type": "dapo", "delta": 1.5},
    "high-entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.5},
    "entropy-bonus": {"loss_type": "dapo", "entropy_coef": 5.0},
    "off-policy-mask": {"loss_type": "grpo", "off_policy_mask_threshold": 10.0},
}


class _Truth:
    """What TRL's own loss says of a batch: norms of the gradient, whole and without some tokens.

    The loss is differentiated by what it is computed from, one number a token; those of some tokens are left out, and
    the rest goes through the model.
    """

    def __init__(self, trainer: Any, at: int) -> None:
        self._kept: list[tuple[Tensor, ...]] = []
        self._loss = torch.zeros(())
        self._parameters: dict[str, Tensor] = {}
        log_probs, compute = trainer._get_per_token_logps_and_entropies, trainer.compute_loss

        def keeping(*args: Any, **kwargs: Any) -> Any:
            self._kept.append(log_probs(*args, **kwargs))
            return self._kept[-1]

        def computing(model: Any, inputs: Any, **kwargs: Any) -> Tensor:
            if trainer._step == at and not self._parameters:
                # In a copy of the model: sensors on the parameters see every gradient.
                twin = copy.deepcopy(model)
                self._parameters = dict(twin.named_parameters())
                trainer._get_per_token_logps_and_entropies = keeping
                self._loss = compute(twin, inputs, **kwargs)
                del trainer._get_per_token_logps_and_entropies
            own: Tensor = compute(model, inputs, **kwargs)
            return own

        trainer.compute_loss = computing

    def norm(self, *, layer: str, without: Sequence[tuple[int, int | None]] = ()) -> float:
        """Of a layer, or "total"."""
        sources = self._kept[-1][:2]
        given = torch.autograd.grad(self._loss, sources, retain_graph=True, allow_unused=True)
        known = [(s, g.clone()) for s, g in zip(sources, given, strict=True) if g is not None]
        for _, gradient in known:
            for row, position in without:
                gradient[row, position] = 0
        chosen = [p for name, p in self._parameters.items() if layer == "total" or name.startswith(f"{layer}.")]
        found = torch.autograd.grad(
            [s for s, _ in known], chosen, grad_outputs=[g for _, g in known], retain_graph=True
        )
        return math.sqrt(sum(float(g.double().square().sum()) for g in found))


@pytest.mark.parametrize("name", _LOSSES)
def test_every_loss_is_gated_exactly(tmp_path: Path, name: str) -> None:
    """The counterfactual of a search equals what TRL's loss gives without that token."""
    options = _LOSSES[name]

    def plant(trainer: Any, batch: dict[str, Tensor]) -> None:
        if trainer._step == FAULT_AT:
            batch["completion_mask"][ROW, : POSITION + 1] = 1
            # A large advantage of its own shows in bounded losses too.
            advantages = batch["advantages"].unsqueeze(1).repeat(1, batch["completion_mask"].shape[1])
            advantages[ROW, POSITION] = -3e3
            batch["advantages"] = advantages

    localizer = search(tmp_path)
    trainer = make_grpo(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([localizer], log=lambda *_: None)],
        inject=plant,
        num_iterations=2,
        max_steps=FAULT_AT + 1,
        max_grad_norm=0.0,
        **options,
    )
    truth = _Truth(trainer, FAULT_AT)
    trainer.train()
    (incident,) = localizer.incidents
    layer = incident.threshold_of.split()[0]
    assert incident.reproducible
    for found in (incident.observed_norm, incident.replayed_norm):
        assert found == pytest.approx(truth.norm(layer=layer), rel=1e-4)
    tokens = [(token.row, token.position) for token in incident.tokens]
    # Where a sequence has one ratio, all of its tokens have one gradient.
    whole_row = [(ROW, position) for position in range(LENGTH)]
    assert sorted(tokens) == (whole_row if "sequence" in name else [(ROW, POSITION)])
    assert incident.counterfactual_norm == pytest.approx(truth.norm(layer=layer, without=tokens), rel=1e-3)
    assert incident.counterfactual_norm < incident.threshold
