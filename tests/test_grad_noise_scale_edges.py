"""The noise scale beside other callbacks, at intervals, after a resume, with several optimizers."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNoiseScaleCallback,
    attach,
)
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.lightning_models import make_trainer
from tests.lightning_variants import TwoOptimizers
from tests.models import loss_of, make_transformer, token_batch
from tests.spread import no_sync, spread
from tests.stateful import differences
from tests.states import same

pytestmark = pytest.mark.norms

MICRO_BATCHES = 2


def num_hooks(model: nn.Module) -> list[int]:
    """Of every parameter."""
    return [len(parameter._backward_hooks or ()) for parameter in model.parameters()]


def run(
    *callbacks: Any,
    model: nn.Module | None = None,
    rank: int = 0,
    steps: Any = range(4),
    look: Any = lambda step: None,
    micro_batches: int = MICRO_BATCHES,
    load: Any = None,
) -> Any:
    """Train without moving; what the handle's callbacks have learned, and the steps' looks at the last micro-batch."""
    model = make_transformer() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with attach(None, model=model, optimizer=optimizer, callbacks=list(callbacks), log=lambda *row: None) as handle:
        if load is not None:
            handle.load_state_dict(load)
        for step in steps:
            with look(step) or contextlib.nullcontext() as looked:
                for number in range(micro_batches):
                    with contextlib.nullcontext() if number == micro_batches - 1 else no_sync(model):
                        loss = loss_of(model, token_batch(rank, step=step, micro_batch=number))
                        handle.record_loss(loss.detach(), weight=3)
                        hooks = num_hooks(model)
                        (loss / micro_batches).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append((hooks, looked))
        return handle.state_dict(), [c.reading() for c in callbacks if hasattr(c, "reading")], seen


def test_steps_between_are_free_and_the_others_read_as_if_alone() -> None:
    _, [found], seen = run(GradNoiseScaleCallback(every_n_steps=5), steps=range(11))
    assert [sum(hooks) > 0 for hooks, _ in seen] == [step % 5 == 0 for step in range(11)]
    _, [alone], _ = run(GradNoiseScaleCallback(), steps=(0, 5, 10))
    assert found["num_steps"] == 3
    assert differences(found, alone) == []


@pytest.mark.parametrize("threshold", [1e-3, 1e6])
def test_steps_that_a_clip_has_skipped_are_left_out(threshold: float) -> None:
    clip = AdaptiveClipThreshold(rule={"name": "fixed", "threshold": threshold}, on_spike="skip_step")
    callback = GradNoiseScaleCallback()
    run(callback, clip)
    assert callback.reading()["num_steps"] == (0 if threshold < 1 else 4)


@pytest.mark.parametrize("num_spikes", [1, 10])
def test_a_spike_leaves_what_is_known_as_it_was_and_a_level_that_lasts_is_taken(num_spikes: int) -> None:
    callback = GradNoiseScaleCallback()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    readings = {}
    generator = torch.Generator().manual_seed(0)
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: None) as handle:
        for step in range(160):
            for number in range(4):
                # One micro-batch of a spike; all of them from step 110 on.
                is_large = step >= 110 or (70 <= step < 70 + num_spikes and number == 1)
                loss = (100.0 if is_large else 1.0) * model(torch.randn(2, 3, generator=generator) + 1).mean()
                handle.record_loss(loss.detach(), weight=2)
                (loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            readings[step] = callback.reading()
    before, after = readings[69], readings[69 + num_spikes]
    assert {**after, "num_steps": 0} == pytest.approx({**before, "num_steps": 0})
    assert readings[109]["num_steps"] == 110 - num_spikes
    assert readings[109]["noise_scale"] == pytest.approx(before["noise_scale"], rel=0.5)
    # Accepted after 32 steps of it.
    assert readings[141]["num_steps"] == 110 - num_spikes
    assert readings[159]["num_steps"] == 110 - num_spikes + 18


def without(state: Any, key: str) -> Any:
    """A state as it was before a key of it was known."""
    if isinstance(state, dict):
        return {name: without(value, key) for name, value in state.items() if name != key}
    return state


def test_a_checkpoint_of_before_spikes_were_known_is_taken() -> None:
    state, [found], _ = run(GradNoiseScaleCallback())
    old = without(state, "usual")
    assert differences(old, state) != []
    _, [resumed], _ = run(GradNoiseScaleCallback(), load=old, steps=range(4, 8))
    _, [whole], _ = run(GradNoiseScaleCallback(), steps=range(8))
    assert found["num_steps"] == 4
    assert differences(resumed, whole) == []


def test_what_was_known_at_the_end_can_be_read_after_it() -> None:
    callback = GradNoiseScaleCallback(per_layer=True)
    assert callback.reading() == {}
    _, [at_the_end], _ = run(callback)
    assert at_the_end["num_steps"] == 4
    assert repr(callback.reading()) == repr(at_the_end)


def test_sensors_are_shared_with_a_search(tmp_path: Path) -> None:
    beside = [GradLocCallback(dump_dir=str(tmp_path)), GradNoiseScaleCallback(), GradNoiseScaleCallback(name="b")]
    for hooks, _ in run(*beside)[2]:
        assert set(hooks) == {1}


def test_several_of_them_each_read_their_own_layers_and_units() -> None:
    whole = GradNoiseScaleCallback(per_layer=True)
    blocks = GradNoiseScaleCallback(name="blocks", layers=[0, 1])
    tokens = GradNoiseScaleCallback(name="tokens", batch_unit="tokens")
    _, [all_layers, two, counted], _ = run(whole, blocks, tokens)
    # A loop that tells a weight tells it for every unit.
    assert differences({k: v for k, v in all_layers.items() if "/" not in k}, counted) == []
    one_by_one = [run(GradNoiseScaleCallback(layers=[n]))[1][0] for n in (0, 1)]
    for key in ("grad_sq", "trace"):
        assert two[key] == pytest.approx(sum(one[key] for one in one_by_one))
    for number, one in enumerate(one_by_one):
        assert all_layers[f"layer/layers.{number}"] == pytest.approx(one["noise_scale"], nan_ok=True)


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    whole, first, second = (GradNoiseScaleCallback(per_layer=True) for _ in range(3))
    state, expected, _ = run(whole, steps=range(7))
    saved, _, _ = run(first, steps=range(3))
    resumed, found, _ = run(second, steps=range(3, 7), load=saved)
    assert expected[0]["num_steps"] == 7
    assert repr(found) == repr(expected)
    assert same(resumed, state)


def test_a_state_of_other_layers_is_told_and_left() -> None:
    saved, _, _ = run(GradNoiseScaleCallback(per_layer=True))
    other = make_transformer(num_layers=2)
    with pytest.warns(StabilizerWarning, match=r"of 7 layers, these are 5 .*starts anew"):
        _, [found], _ = run(GradNoiseScaleCallback(per_layer=True), model=other, steps=range(4, 6), load=saved)
    assert found["num_steps"] == 2


@pytest.mark.parametrize("every", [1, 2])
def test_the_second_of_two_optimizers_is_told_why_it_has_none(every: int) -> None:
    (messages, readings), (silence, others) = run_distributed(_two_optimizers, every)
    [message] = messages
    assert "optimizer 1: the noise scale is not available" in message
    assert "only those that move after the same backward passes" in message
    assert silence == []
    for found in (readings, others):
        assert found[0]["num_steps"] >= 11
        assert found[1]["num_steps"] == 0


@pytest.mark.parametrize("again", [False, True])
def test_two_optimizers_after_the_same_backward_passes_both_have_one(again: bool) -> None:
    """Not the second of them if gradients have come since, which the sensors cannot tell from those before."""
    model, callback = make_transformer(), GradNoiseScaleCallback(log_every_n_steps=1)
    halves = list(model.layers.parameters()), [p for name, p in model.named_parameters() if "layers" not in name]
    optimizers = [torch.optim.SGD(half, lr=0.0) for half in halves]
    with attach(None, model=model, optimizer=optimizers, callbacks=[callback], log=lambda *row: None) as handle:
        for step in range(2):
            for number in range(2):
                loss = loss_of(model, token_batch(step=step, micro_batch=number))
                handle.record_loss(loss.detach(), weight=3)
                loss.backward()
            optimizers[0].step()
            if again:
                model.zero_grad()
                # Not through the model's hooks, which tell micro-batches apart.
                loss_of(model.forward, token_batch(step=step)).backward()  # type: ignore[arg-type]
            optimizers[1].step()
            model.zero_grad()
        readings = [callback.reading(number) for number in range(2)]
    assert [one["num_steps"] for one in readings] == [2, 0 if again else 1]


class TwoReadings(GradNoiseScaleCallback):
    """Reads at the end of a run."""

    def on_run_end(self, context: Any) -> None:
        self.found[context.optimizer_index] = self.reading(context.optimizer_index)


def _two_optimizers(rank: int, world_size: int, every: int) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    callback = TwoReadings(log_every_n_steps=1)
    callback.found = {}
    trainer = make_trainer(
        DDPStrategy(find_unused_parameters=True), devices=world_size, max_steps=22, callbacks=[callback]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StabilizerWarning)
        trainer.fit(TwoOptimizers(every=every))
    assert not callback.has_failed
    return [str(one.message) for one in caught if one.category is StabilizerWarning], callback.found


def _reading(rank: int, world_size: int, strategy: str) -> Any:
    model, data_rank = spread(strategy, rank)
    return run(GradNoiseScaleCallback(per_layer=True), model=model, rank=data_rank)[1][0]


@pytest.mark.covers(feature="noise scale", host="plain", strategy="fsdp2_tp")
def test_tensor_parallel_shards_read_what_their_data_ranks_alone_read() -> None:
    """Ranks of a tensor-parallel group hold pieces of one gradient: they are one part, not two."""
    found = run_distributed(_reading, "fsdp2_tp", world_size=4)
    expected = run_distributed(_reading, "ddp")[0]
    assert all(repr(one) == repr(found[0]) for one in found)
    # The first micro-batch of FSDP2 is not seen.
    assert (found[0]["num_steps"], expected["num_steps"]) == (3, 4)
    assert found[0]["batch"] == expected["batch"] == 12
