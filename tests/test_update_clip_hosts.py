"""UpdateClipCallback and OptimizerHealth in hosts: who reads parameters when, loss scales, checkpoints, devices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import StabilizerCallback, UpdateClipCallback, attach
from stabilizer.callbacks.replays import Replays
from stabilizer.callbacks.run_host import RunHost
from stabilizer.callbacks.suite import Suite
from stabilizer.optimizer_health import per_rate
from tests import accelerate_loops
from tests.contract_hosts import EPOCH, HOSTS, make_host
from tests.counting import fake_cuda, host_may_wait
from tests.fake_suites import SilentSink
from tests.health_loops import HealthCallback
from tests.launcher import run_distributed
from tests.lightning_models import expected_batches, make_module, make_trainer
from tests.models import TinyTransformer, loss_of, make_transformer, reference_gradients, token_batch
from tests.reference_optimizer import AdamW, Array, clipped
from tests.states import same
from tests.test_update_clip_ranks import LIMITS, NUM_STEPS, OPTIONS, whole_parameters
from tests.tiny_loops import no_log

ACTING: dict[str, Any] = {"mode": "act", "max_rms": 0.3, "every_n_steps": 2}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_host_clips_to_the_same_bits() -> None:
    weights = {}
    for name in HOSTS:
        host = make_host(name)
        plain = host.train([])
        weights[name] = host.train([UpdateClipCallback(**ACTING)], num_steps=4)
        assert host.points["update_clip/rate", 2] > 0.3
        assert not all(torch.equal(plain[key], value) for key, value in weights[name].items())
    expected = weights.pop(HOSTS[0])
    for name, found in weights.items():
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name


@pytest.mark.parametrize("host_name", HOSTS)
@pytest.mark.parametrize(
    "make",
    [functools.partial(UpdateClipCallback, **ACTING), functools.partial(HealthCallback, every_n_steps=2)],
    ids=["clip", "health"],
)
def test_a_resumed_run_is_the_uninterrupted_one(make: Any, host_name: str, tmp_path: Path) -> None:
    host = make_host(host_name)
    whole, first, second = make(), make(), make()
    weights, expected = host.train([whole], num_steps=2 * EPOCH), host.points
    host.train([first], num_steps=EPOCH, save=tmp_path)
    before = host.points
    found = host.train([second], num_steps=2 * EPOCH, load=tmp_path)
    assert all(torch.equal(found[key], value) for key, value in weights.items())
    assert same(second.state_dict(), whole.state_dict())
    assert {**before, **host.points} == expected


def test_averages_and_schedulers_see_the_clipped_parameters() -> None:
    seen: list[Any] = []

    class Reads(pl.Callback):
        """Stands before ours in the list."""

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            """Note the parameters, as an average of weights does."""
            seen.append({name: p.detach().clone() for name, p in module.model.named_parameters()})

    module = make_module("transformer", optimizer="adamw")
    clip = UpdateClipCallback(**ACTING)
    make_trainer(callbacks=[Reads(), clip], max_steps=1).fit(module)
    assert clip.next_step() == 1
    assert all(torch.equal(seen[0][name], p) for name, p in module.model.named_parameters())
    start = make_transformer().state_dict()
    moved = torch.cat([(seen[0][name] - start[name]).flatten() for name in seen[0]])
    assert float(moved.square().mean().sqrt()) / module.learning_rate == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("name", ["adamw", "fused_adamw"])
def test_a_scaled_step_that_overflows_is_none(name: str) -> None:
    model = make_transformer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    optimizer = accelerate_loops.make_optimizer(model, name=name)
    clip, health, rows = UpdateClipCallback(**{**ACTING, "every_n_steps": 1}), HealthCallback(), []
    with attach(None, model=model, optimizer=optimizer, callbacks=[clip, health], log=lambda *row: rows.append(row)):
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, token_batch(step=step))).backward()
            if step == 2:
                list(model.parameters())[-1].grad[0, 0] = torch.inf  # type: ignore[index]
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            is_same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            assert is_same == (step == 2)
    tags = [(tag, step) for values, step in rows for tag in values]
    # The steps that were made, whether the host counts the other one or not.
    made = sorted({step for tag, step in tags if tag == "update_clip/rms/lm_head"})
    assert len(made) == 3
    assert sorted({step for tag, step in tags if tag == "optimizer/update_norm/lm_head"}) == made
    # Gradients that the fused kernel divides itself are those that went into its moments.
    ratios = [value for values, _ in rows for tag, value in values.items() if tag == "optimizer/rms_g2_v/lm_head"]
    assert ratios[0] == pytest.approx(1.0, rel=1e-3)
    assert health.findings == []


def _in_lightning(rank: int, world_size: int, strategy: str) -> dict[str, Tensor]:
    module = make_module("transformer")
    module.configure_optimizers = lambda: torch.optim.AdamW(module.model.parameters(), lr=0.05, **OPTIONS)
    clip = UpdateClipCallback(max_rms=LIMITS["learning_rate"], mode="act", strict=True)
    found: list[Any] = []

    class Reads(pl.Callback):
        """Before the strategy lets go of the model."""

        def on_train_end(self, trainer: Any, module: Any) -> None:
            """Gather."""
            found.append(whole_parameters(module.model))

    trainer = make_trainer(
        strategy, devices=world_size, max_steps=NUM_STEPS, callbacks=[clip, HealthCallback(), Reads()]
    )
    trainer.fit(module)
    return dict(found[0])


def _expected(num_ranks: int) -> dict[str, Array]:
    model = make_transformer().double()
    oracle = AdamW(dict(model.named_parameters()), rate=0.05, **OPTIONS)

    def layer_of(name: str) -> str:
        return ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]

    for step in range(NUM_STEPS):
        gradients = reference_gradients(model, expected_batches("transformer", step, num_ranks=num_ranks))
        before = {name: value.copy() for name, value in oracle.parameters.items()}
        oracle.step({name: gradient for name, gradient in gradients.items() if gradient is not None})
        rates = dict.fromkeys(before, 0.05)
        oracle.parameters = clipped(before, oracle.parameters, layer_of, max_rms=LIMITS["learning_rate"], rates=rates)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(oracle.parameters[name]))
    return oracle.parameters


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning_on_two_ranks_is_one_process_in_float64(strategy: str) -> None:
    expected = _expected(2)
    for found in run_distributed(_in_lightning, strategy):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name].numpy(), value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.fixture
def _fake() -> Iterator[None]:
    with fake_cuda():
        yield


def _on_a_device(callbacks: list[StabilizerCallback], *, num_steps: int) -> None:
    """Steps of an optimizer whose state is on the device; the first one may wait: it makes what is made once."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = TinyTransformer()
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    host = RunHost("plain", None, model, [optimizer], Replays(callbacks), [])
    sink: Any = SilentSink()
    for callback in callbacks:
        callback.host = host
    suite = Suite(callbacks, model=model, optimizer=optimizer, sink=sink)
    for step in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

        def make_a_step() -> None:
            suite.run()
            optimizer.step()
            suite.finish()

        if step == 0:
            with host_may_wait():
                make_a_step()
        else:
            make_a_step()


@pytest.mark.usefixtures("_fake")
def test_the_host_never_waits_for_the_device() -> None:
    clip = UpdateClipCallback(mode="act", every_n_steps=2, strict=True)
    other = UpdateClipCallback(mode="act", relative_to="parameter", every_n_steps=2, strict=True, name="other")
    health = HealthCallback(every_n_steps=2)
    _on_a_device([clip, other, health], num_steps=6)
    assert clip.next_step() == other.next_step() == health.next_step() == 6
    assert health.health._followed[0]._readings, "nothing was measured"


@pytest.mark.usefixtures("_fake")
def test_a_rate_on_the_device_stays_there() -> None:
    found = per_rate(torch.ones(2, device="cuda"), [torch.full((), 0.1, device="cuda"), 0.1])
    assert found.device.type == "cuda"


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_copies_of_a_model_in_a_run_are_bare(precision: torch.dtype) -> None:
    model: Any = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).to(precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach(None, model=model, optimizer=optimizer, callbacks=[HealthCallback()], log=no_log):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.arange(8)).sum().backward()
            twin = copy.deepcopy(model)
            twin(torch.arange(8)).sum().backward()
            optimizer.step()
    assert all(not p._backward_hooks for p in model.parameters())
