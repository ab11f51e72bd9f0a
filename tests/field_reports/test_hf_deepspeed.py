"""Field reports, area hf-deepspeed: norms in transformers' Trainer, and what is said where an engine keeps gradients.

DeepSpeed itself is not needed: `Engine` does with gradients what DeepSpeed's does, behind Accelerate's own wrappers.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper
from torch import Tensor, nn
from transformers import Trainer

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, StabilizerTrainerCallback
from tests import trainer_runs
from tests.field_reports.helpers import TOLERANCE, covers, norm_logger, our_warnings
from tests.launcher import run_distributed
from tests.trainer_runs import BATCH_SIZE, VOCABULARY, Rows, make_trainer, reference

NUM_STEPS = 5
#: The optimizer step whose gradient is not finite.
BAD = 2


class _Spoiled:
    """A loss that is NaN at one call on one rank.

    Args:
        is_here: Whether this rank is the one.
    """

    def __init__(self, is_here: bool) -> None:
        self.is_here, self.calls = is_here, itertools.count()

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """The mean over a step's tokens, as transformers computes it."""
        factor = torch.nan if next(self.calls) == BAD and self.is_here else 1.0
        return factor * _summed(outputs, labels) / num_items_in_batch


def _summed(outputs: Any, labels: Tensor) -> Tensor:
    logits = outputs.logits[:, :-1].reshape(-1, VOCABULARY)
    return nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")


def _norms(norms: GradNormCallback) -> dict[str, list[float]]:
    history = norms.norm_history()
    return dict(zip(history.layer_names, history.norms.T.tolist(), strict=True))


def guarded(rank: int, world_size: int, folder: Path, strategy: str) -> dict[str, Any]:
    norms, guard = norm_logger(granularity="parameter"), AdaptiveClipThreshold(max_threshold=1e3, warmup_cap=None)
    with our_warnings() as messages:
        trainer = make_trainer(
            strategy,
            folder,
            callbacks=[StabilizerTrainerCallback([norms, guard], log=lambda *row: None)],
            max_steps=NUM_STEPS,
            kwargs={"compute_loss_func": _Spoiled(rank == world_size - 1)},
        )
        trainer.train()
    steps = norms.norm_history().steps
    return {"steps": steps, "norms": _norms(norms), "skipped": guard.num_skipped(), "messages": messages}


@covers("single", "transformers")
@covers("ddp", "transformers")
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_B015_norms_of_every_parameter_at_every_step_beside_a_guard(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks = 1 if strategy == "single" else 2
    ranks = [guarded(0, 1, tmp_path, strategy)] if num_ranks == 1 else run_distributed(guarded, tmp_path, strategy)
    # A step that is left out moves nothing, so that the others are those of a run without its samples.
    batches = trainer_runs.micro_batches(num_steps=NUM_STEPS, accumulation=1, num_ranks=num_ranks)
    del batches[BAD]
    monkeypatch.setattr(trainer_runs, "micro_batches", lambda **_: batches)
    expected = reference(num_steps=NUM_STEPS - 1, accumulation=1, num_ranks=num_ranks)
    for found in ranks:
        assert (found["steps"], found["skipped"]) == (list(range(NUM_STEPS)), 1)
        for name, norms in found["norms"].items():
            good = [norm for step, norm in enumerate(norms) if step != BAD]
            assert good == pytest.approx([step["norms"][name] for step in expected], rel=TOLERANCE, abs=1e-9), name
    [message] = ranks[0]["messages"]
    assert message.startswith(f"step {BAD}: the gradient is not finite in ")


class _Same(Rows):
    """All ranks have the same samples at all steps."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index % BATCH_SIZE)


def opposed(rank: int, world_size: int, folder: Path, strategy: str) -> tuple[list[float], list[float], float]:
    """What is logged, what the trainer shows, and the norm of this rank's own gradient."""
    norms = GradNormCallback(heatmap_every_n_steps=None)
    sign = 1.0 if rank == 0 else -0.99

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return sign * _summed(outputs, labels) / num_items_in_batch

    trainer = make_trainer(
        strategy,
        folder,
        dataset=_Same(64),
        callbacks=[StabilizerTrainerCallback([norms], log=lambda *row: None)],
        kwargs={"compute_loss_func": loss},
        max_grad_norm=0.0,
        learning_rate=0.0,
    )
    trainer.train()
    shown = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    # As every rank has the same samples, its own gradient is that of one process, but for its sign.
    own = abs(sign) * reference(num_steps=1, accumulation=1, num_ranks=1)[0]["total"]
    return norms.norm_history().totals.tolist(), shown, own


@covers("ddp", "transformers")
@covers("fsdp2", "transformers")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_B119_the_norm_is_that_of_the_reduced_gradient_whatever_ranks_have_before(
    strategy: str, tmp_path: Path
) -> None:
    ranks = run_distributed(opposed, tmp_path, strategy)
    whole = reference(num_steps=1, accumulation=1, num_ranks=1)[0]["total"]
    # Gradients that nearly cancel: the difference of two numbers a hundred times as large.
    for totals, shown, own in ranks:
        assert totals == pytest.approx([0.005 * whole] * 3, rel=1e-4)
        assert shown == pytest.approx(totals, rel=TOLERANCE)
        assert own > 100 * totals[0], "nothing cancels: the test says nothing"
    assert ranks[0][0] == ranks[1][0]


class Engine(nn.Module):
    """Does with gradients what an engine of DeepSpeed does: takes them away, reduces, clips by itself and steps.

    Args:
        module: To train.
        optimizer: Of its parameters.
        limit: Of its own configuration.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, limit: float) -> None:
        super().__init__()
        self.module, self.optimizer, self.limit = module, optimizer, limit
        self.norm: Tensor | None = None
        self.num_steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, *, is_boundary: bool) -> None:
        """Every micro-batch is a step here."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Propagate, and leave nothing behind."""
        loss.backward()
        self._gradients = [parameter.grad for parameter in self.module.parameters()]
        self.module.zero_grad()

    def step(self) -> None:
        """Reduce, clip, move."""
        for parameter, gradient in zip(self.module.parameters(), self._gradients, strict=True):
            assert gradient is not None
            dist.all_reduce(gradient.div_(dist.get_world_size()))
            parameter.grad = gradient
        self.norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.limit)
        self.optimizer.step()
        self.module.zero_grad()
        self.num_steps += 1

    def get_global_grad_norm(self) -> Tensor | None:
        """Before the clip."""
        return self.norm


def pretend_deepspeed(trainer: Trainer) -> list[Engine]:
    """Have a trainer train through an `Engine`; the list that it will be in.

    Args:
        trainer: Has not trained.
    """
    accelerator, engines = trainer.accelerator, list[Engine]()
    for kind in (AcceleratorState, PartialState):
        kind._shared_state["distributed_type"] = DistributedType.DEEPSPEED

    def prepare(*given: Any) -> Any:
        if len(given) == 1:
            return (accelerator.prepare_data_loader(given[0]),)
        model, optimizer = given
        engines.append(Engine(model, optimizer, trainer.args.max_grad_norm))
        accelerator.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(engines[0])
        prepared = engines[0], DeepSpeedOptimizerWrapper(optimizer)
        accelerator._models.append(prepared[0])
        accelerator._optimizers.append(prepared[1])
        return prepared

    accelerator._prepare_deepspeed = prepare
    return engines


def under_an_engine(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    rows: list[Any] = []
    norms, clip = GradNormCallback(), AdaptiveClipThreshold(warmup_cap=None)
    callback = StabilizerTrainerCallback([norms, clip], log=lambda *row: rows.append(row))
    trainer = make_trainer("ddp", folder, callbacks=[callback], max_grad_norm=0.5)
    engines = pretend_deepspeed(trainer)
    try:
        trainer.train()
        error = ""
    except ValueError as refusal:
        error = str(refusal)
    limits = trainer.args.max_grad_norm, clip.max_threshold
    found = {"error": error, "steps": engines[0].num_steps, "limits": limits, "rows": rows, "next": norms.next_step()}
    # The other way out that is named.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STABILIZER_DISABLE", "1")
        trainer = make_trainer("ddp", folder, callbacks=[callback], max_grad_norm=0.5)
        engines = pretend_deepspeed(trainer)
        with our_warnings() as messages:
            trainer.train()
    shown = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {**found, "messages": messages, "steps_without": engines[0].num_steps, "shown": shown}


def _refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "DeepSpeed ZeRO keeps gradients in partitions of its own" in found["error"]
        assert "Use DDP or FSDP, or set STABILIZER_DISABLE=1" in found["error"]
        assert found["steps"] == 0, "refused before the first step"


def test_B103_an_engine_that_frees_gradients_is_refused_before_the_first_step(tmp_path: Path) -> None:
    ranks = run_distributed(under_an_engine, tmp_path)
    _refused(ranks)
    for found in ranks:
        # Neither with the callbacks nor without them is anything logged of what cannot be seen, least of all 0.
        assert (found["rows"], found["next"]) == ([], 0)
        assert found["steps_without"] == 3
    [message] = ranks[0]["messages"]
    assert message.startswith("STABILIZER_DISABLE is set: AdaptiveClipThreshold, GradNormCallback do nothing")


def test_B120_the_engine_s_own_clip_is_left_to_it_and_that_is_said(tmp_path: Path) -> None:
    ranks = run_distributed(under_an_engine, tmp_path)
    _refused(ranks)
    expected = reference(num_steps=3, accumulation=1, num_ranks=2, max_norm=0.5)
    for found in ranks:
        # The engine reads its limit there.
        assert found["limits"] == (0.5, None)
        # Without the callbacks it clips, and shows the norm before the clip.
        assert found["shown"] == pytest.approx([step["total"] for step in expected], rel=TOLERANCE)


def test_B015_gradients_that_an_engine_hides_are_said_to_be_missing(tmp_path: Path) -> None:
    callback = StabilizerTrainerCallback([GradNormCallback()], log=lambda *row: None)
    trainer = make_trainer("single", tmp_path, callbacks=[callback], max_grad_norm=0.0)
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with our_warnings() as messages:
        trainer.train()
    [message] = messages
    assert message.startswith("none of the 21 trainable parameters had a gradient in the first 3 optimizer steps")
    assert "as DeepSpeed ZeRO does; use DDP, FSDP1 or FSDP2 instead" in message
