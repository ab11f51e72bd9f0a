"""GradLoc in Accelerate loops: nothing else changes in the loop, and what is missing is said."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import GradLocCallback, attach
from tests.accelerate_loops import make_accelerator
from tests.launcher import run_distributed
from tests.localize_loops import Fault, Plan, batches, loss_of_tokens
from tests.models import Block, TinyTransformer, initialise_
from tests.states import same
from tests.test_grad_loc_identity import expected, make_callback, summary

FAULTS = (Fault(12, ((0, 0, 1, 3),)), Fault(15, ((0, 1, 0, 5), (0, 1, 1, 0))), Fault(18, ((0, 1, 1, 2),)))
SPREAD_FAULTS = (*FAULTS[:2], Fault(18, ((1, 1, 1, 2),)))
PLAN = Plan(steps=22, faults=FAULTS, micro_batches=2, rows=2, length=6)


class Output:
    """As transformers return it, as far as `.loss` goes."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class WithLoss(nn.Module):
    """A model that returns its loss; dropout makes a replay with other random numbers another one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.dropout, self.kind = TinyTransformer(num_layers=2), nn.Dropout(0.1), kind

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Any:
        """The loss, in a mapping or an object; or logits."""

        def logits(tokens: Tensor) -> Tensor:
            output: Tensor = self.dropout(self.inner(tokens))
            return output

        if self.kind == "logits":
            return logits(tokens)
        loss = loss_of_tokens(logits, (tokens, targets, weights))  # type: ignore[arg-type]
        return {"loss": loss, "other": 1} if self.kind == "mapping" else Output(loss)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of what returns logits."""
    return loss_of_tokens(lambda tokens: model(**batch), tuple(batch.values()))  # type: ignore[arg-type]


def train(
    callback: GradLocCallback | None,
    *,
    kind: str = "mapping",
    strategy: str = "single",
    rank: int = 0,
    plan: Plan = PLAN,
    loss_fn: Any = None,
    **options: Any,
) -> list[Tensor]:
    """The loop of Accelerate's documentation; this rank's weights after it."""
    torch.manual_seed(rank)
    accelerator = make_accelerator(strategy, gradient_accumulation_steps=plan.micro_batches, **options)
    model: Any = WithLoss(kind)
    initialise_(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    handle: Any = contextlib.nullcontext()
    if callback is not None:
        handle = attach(
            accelerator,
            model=model,
            optimizer=optimizer,
            callbacks=[callback],
            loss_fn=loss_fn,
            log=lambda values, step: None,
        )
    with handle:
        for row in (row for step in batches(plan, rank) for row in step):
            batch = dict(zip(("tokens", "targets", "weights"), row, strict=True))
            with accelerator.accumulate(model):
                if callback is not None and loss_fn is not None:
                    handle.record_batch(batch)
                if kind == "logits":
                    loss = loss_of(model, batch)
                else:
                    output = model(**batch)
                    loss = output["loss"] if kind == "mapping" else output.loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def make(folder: Path | str, **options: Any) -> GradLocCallback:
    """One that searches every fault."""
    callback = make_callback("triggered", folder)
    callback.tap = "inner.lm_head"
    return callback


@pytest.mark.parametrize(("kind", "loss_fn"), [("mapping", None), ("attribute", None), ("logits", loss_of)])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.covers(feature="token localisation", host="accelerate", strategy="single")
def test_the_token_is_found_and_training_is_the_same(kind: str, loss_fn: Any, precision: str, tmp_path: Path) -> None:
    callback = make(tmp_path)
    weights = train(callback, kind=kind, loss_fn=loss_fn, mixed_precision=precision)
    assert summary(callback) == expected("triggered", FAULTS)
    assert same(weights, train(None, kind=kind, mixed_precision=precision))


def nothing(model: nn.Module, batch: Any) -> Any:
    """What a user may return by mistake."""
    return {"loss": None}


def another(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is another one."""
    return loss_of(model, batch) * 3


@pytest.mark.parametrize("loss_fn", [None, nothing])
def test_without_a_loss_the_incident_says_what_to_do(loss_fn: Any, tmp_path: Path) -> None:
    callback = make(tmp_path)
    weights = train(callback, kind="logits", loss_fn=loss_fn)
    assert [one.step for one in callback.incidents] == [12, 15, 18]
    for incident in callback.incidents:
        assert incident.error is not None
        assert "loss_fn" in incident.error, incident.error
        assert "loss of a micro-batch as it is propagated" in incident.error
        assert incident.tokens == ()
    assert same(weights, train(None, kind="logits"))


def test_a_loss_that_is_another_one_is_no_replay(tmp_path: Path) -> None:
    callback = make(tmp_path)
    train(callback, kind="logits", loss_fn=another)
    for incident in callback.incidents:
        assert (incident.type, incident.reproducible, incident.tokens) == ("T", False, ())
        worst = max(one.norm for one in incident.micro_batches)
        assert incident.replayed_norm == pytest.approx(3 * worst, rel=1e-3)


def doubled(model: nn.Module, batch: Any) -> Tensor:
    """A factor as of a scaler or a forgotten division."""
    return loss_of(model, batch) * 2


def test_a_loss_that_is_divided_otherwise_is_told(tmp_path: Path) -> None:
    callback = make(tmp_path)
    train(callback, kind="logits", loss_fn=doubled)
    for incident in callback.incidents:
        assert incident.error is not None
        assert "are 0.5 times those of the replay" in incident.error
        assert "let loss_fn divide as the loop does" in incident.error


def _spread(rank: int, world_size: int, strategy: str, folder: str) -> Any:
    plan = Plan(**{**vars(PLAN), "faults": SPREAD_FAULTS})
    callback = make(folder)
    weights = train(callback, strategy=strategy, rank=rank, plan=plan)
    return summary(callback), same(weights, train(None, strategy=strategy, rank=rank, plan=plan))


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.covers(strategy=name)) for name in ("ddp", "fsdp1", "fsdp2")]
)
@pytest.mark.covers(feature="token localisation", host="accelerate")
def test_two_processes(strategy: str, tmp_path: Path) -> None:
    for told, is_same in run_distributed(_spread, strategy, str(tmp_path)):
        assert told == expected("triggered", SPREAD_FAULTS)
        assert is_same


_ = Block  # by whose name the accelerator wraps
