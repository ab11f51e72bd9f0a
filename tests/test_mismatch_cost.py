"""What RolloutMismatchCallback costs and keeps: collectives, waits of the host, states, and steps run again."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import (
    GradLocCallback,
    GradNormCallback,
    LossMeanVarCallback,
    RolloutMismatchCallback,
    StabilizerCallback,
    StepContext,
    attach,
)
from stabilizer.callbacks.context import Position
from tests.contract_hosts import make_host
from tests.counting import count_collectives, fake_cuda
from tests.fake_suites import fake_suite
from tests.launcher import run_distributed
from tests.loggers import points_of
from tests.mismatch_loops import constant, healthy, micro_batch, take_steps
from tests.models import loss_of, token_batch
from tests.spread import spread
from tests.states import same
from tests.tiny_loops import Loop


def _count(rank: int, world_size: int, strategy: str, callbacks: list[StabilizerCallback]) -> Counter[str]:
    """Collectives of three quiet steps."""
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks) as handle:

        def step(number: int) -> None:
            loss = loss_of(model, token_batch(data_rank, step=number))
            handle.record_loss(loss.detach(), weight=1.0)
            loss.backward()
            if any(callback.observations is not None for callback in callbacks) and rank == 0:
                handle.observe(**healthy(40), entropy=1.0)
            optimizer.step()
            optimizer.zero_grad()

        for number in range(5):
            step(number)
        with count_collectives() as calls:
            for number in range(5, 8):
                step(number)
    return calls.names


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_observations_travel_with_norms_and_losses(strategy: str) -> None:
    before = [GradNormCallback(), LossMeanVarCallback()]
    after = [*before, RolloutMismatchCallback(), RolloutMismatchCallback(name="again")]
    counts = [run_distributed(_count, strategy, callbacks) for callbacks in (before, after)]
    assert counts[0] == counts[1]
    assert counts[0][0]["c10d.allreduce_.default"] >= 3


# Making a metric copies its fake defaults.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_host_never_waits_for_the_device() -> None:
    """A read of a CUDA tensor raises here; nothing that is observed is where the next thing is."""
    callbacks = [RolloutMismatchCallback(strict=True), RolloutMismatchCallback(every_n_steps=3, name="a", strict=True)]
    with fake_cuda():
        suite = fake_suite(list(callbacks))
        for step in range(1, 8):
            for callback in callbacks:
                observe = callback.observations.observe
                logp = torch.zeros(4, 6, device="cuda", requires_grad=True)
                observe(logp_train=logp, logp_rollout=torch.zeros(4, 6), mask=torch.ones(4, 6), entropy=0.5)
                observe(
                    logp_train=logp,
                    logp_rollout=logp.detach(),
                    mask=torch.ones(4, 6, device="cuda", dtype=torch.bool),
                    entropy=torch.zeros(4, 6, device="cuda"),
                    kl_ref=torch.zeros(4, 6),
                    clipped=torch.zeros((), device="cuda"),
                    policy_lag=[1, 2, 3, 4],
                    completion_length=torch.zeros(4, device="cuda", dtype=torch.int64),
                    truncated=torch.zeros(4, device="cuda", dtype=torch.bool),
                    rewards=torch.zeros(8, device="cuda"),
                    num_generations=4,
                    heldout_reward=0.25,
                    behaviour_is_old=True,
                )
                callback.observations.take(0)
            suite.run(position=Position(step, 1, 1))
            suite.finish()
        seen = callbacks[0].last()
        assert seen is not None
        assert seen.mismatch.kl_k3.device.type == seen.entropy_slope.device.type == "cuda"


def _break_packing(rank: int, world_size: int) -> tuple[bool, int]:
    """Whether the callback is off in the end on a rank that cannot pack its sums from step 1 on, and its steps."""
    model, data_rank = spread("ddp", rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    callback = RolloutMismatchCallback(on_alarm=[])

    def fail(device: torch.device) -> Any:
        raise RuntimeError("cannot be packed")

    with attach(None, model=model, optimizer=optimizer, callbacks=[callback]) as handle:
        for step in range(4):
            loss_of(model, token_batch(data_rank, step=step)).backward()
            handle.observe(**healthy(40))
            if step == 1 and rank == 1:
                assert callback.observations is not None
                callback.observations.given = fail  # type: ignore[method-assign]
            optimizer.step()
            optimizer.zero_grad()
    return callback.has_failed, callback.next_step()


def test_a_rank_that_cannot_pack_takes_part_all_the_same() -> None:
    assert run_distributed(_break_packing) == [(False, 4), (True, 4)]


class _Late(StabilizerCallback):
    """Observes when the step has been measured."""

    def on_gradients(self, context: StepContext) -> None:
        context.observe(policy_lag=float(context.step))


STEPS = [healthy(seed=1), constant(0.2), constant(0.06), None, constant(0.07), constant(0.08), healthy(), constant(0.3)]


def _run(first: int, last: int, state: Any = None) -> tuple[Any, Any]:
    """Points and state; of the steps of STEPS from the first on."""
    actions: list[Any] = [{"name": "lower_lr", "num_steps": 3}]
    callback = RolloutMismatchCallback(cooldown_steps=3, window=4, on_alarm=actions)
    loop = Loop("plain", callback, _Late())
    with loop:
        if state is not None:
            loop.handle.load_state_dict(state)
        take_steps(
            loop, [observed and {**observed, "entropy": 0.1 * n} for n, observed in enumerate(STEPS)][first:last]
        )
        kept = copy.deepcopy(loop.handle.state_dict())
    return points_of(loop.rows), kept


@pytest.mark.parametrize("cut", range(1, len(STEPS)))
def test_a_resumed_run_is_the_uninterrupted_one(cut: int, tmp_path: Path) -> None:
    """With an alarm's cooldown, windows, lowered rates, and what the next step has been told already."""
    expected, expected_state = _run(0, len(STEPS))
    before, state = _run(0, cut)
    torch.save(state, tmp_path / "state.pt")
    after, final = _run(cut, len(STEPS), torch.load(tmp_path / "state.pt", weights_only=True))
    assert {**before, **after} == expected
    assert same(final, expected_state)


def test_another_window_keeps_what_it_can() -> None:
    first, second = RolloutMismatchCallback(window=5), RolloutMismatchCallback(window=3)
    with Loop("plain", first) as loop:
        take_steps(loop, [{"entropy": float(n)} for n in range(4)])
        state = first.state_dict()
    with pytest.warns(match="window: 5 -> 3"):
        second.load_state_dict(state)
    with Loop("plain", second) as loop:
        take_steps(loop, [{"entropy": 4.0}])
        assert second.last().entropy_slope.item() == pytest.approx(1.0)  # type: ignore[union-attr]


def test_a_copy_takes_its_own_observations() -> None:
    callback = RolloutMismatchCallback()
    with Loop("plain", callback) as loop:
        take_steps(loop, [healthy()])
        copies = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]
        take_steps(loop, [{"entropy": 1.0}])
    for made in copies:
        with Loop("plain", made) as loop:
            take_steps(loop, [{"entropy": 2.0}])
            assert made.last().entropy.item() == 2.0


@pytest.mark.parametrize("host_name", ["lightning.pytorch", "plain"])
def test_a_search_does_not_observe_again(host_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that are run again tell what they have told before."""
    monkeypatch.chdir(tmp_path)
    searching = GradLocCallback(
        rule={"name": "fixed", "threshold": 1e-6}, warmup_steps=0, cooldown_steps=0, tap="model.lm_head"
    )
    points = []
    for others in ([], [searching]):
        host = make_host(host_name)
        host.train([RolloutMismatchCallback(on_alarm=[]), *others])
        points.append({key: value for key, value in host.points.items() if key[0].startswith("rollout/")})
    assert points[0] == points[1]
    assert ("rollout/num_tokens", 2) in points[0]
    assert (tmp_path / "incidents").exists(), "nothing was searched"


def test_a_second_optimizer_of_the_same_backward_pass_sees_the_same() -> None:
    callback = RolloutMismatchCallback(on_alarm=[])

    def make(parameters: Any) -> list[Any]:
        own = list(parameters)
        return [torch.optim.SGD(own, lr=0.0), torch.optim.SGD(own, lr=0.0)]

    loop = Loop("plain", callback, optimizer=make)
    with loop:
        loop.backward(1.0)
        loop.handle.observe(**micro_batch(0, 0, 0))
        for optimizer in loop.optimizers:
            optimizer.step()
        loop.optimizers[0].step()
    points = points_of(loop.rows)
    assert points["rollout/kl_k3", 0] == points["opt1/rollout/kl_k3", 0]
    assert ("rollout/kl_k3", 1) not in points
