"""What clipping costs: one collective of five numbers a step, and no wait for the device by a fused optimizer."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback, StabilizerCallback
from stabilizer.callbacks.acting import Actor
from stabilizer.callbacks.suite import Suite
from stabilizer.plan import StepPlan
from tests.counting import HostReadError, fake_cuda, host_may_wait
from tests.fake_suites import SilentSink
from tests.launcher import run_distributed
from tests.models import TinyTransformer
from tests.test_cost import QUIET, count
from tests.tiny_loops import told

CLIPS = [LayerClipCallback(strict=True), AdaptiveClipThreshold(strict=True)]
FIXED: list[StabilizerCallback] = [
    LayerClipCallback(rule={"name": "fixed", "threshold": 0.1}, every_n_steps=1, strict=True),
    AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 0.1}, strict=True),
]


def both_counts(rank: int, world_size: int, strategy: str, callbacks: list[Any]) -> tuple[Any, Any]:
    """What callbacks add to a run by themselves, and beside GradNormCallback."""
    # Copies: a callback goes on counting its steps.
    alone = count(rank, world_size, strategy, QUIET, copy.deepcopy(callbacks))
    beside = count(rank, world_size, strategy, QUIET, [GradNormCallback(strict=True), *callbacks])
    return alone[0], beside[0]


@pytest.mark.parametrize("callbacks", [CLIPS, FIXED], ids=["quiet", "clipping"])
@pytest.mark.parametrize(("strategy", "num"), [("ddp", 0), ("fsdp2", 3), ("sp", 6)])
def test_one_collective_of_their_own_however_many_they_are(strategy: str, num: int, callbacks: list[Any]) -> None:
    """Three steps: those of measuring (none under DDP, two a step with Partial gradients), and one to agree."""
    for alone, beside in run_distributed(both_counts, strategy, callbacks):
        assert alone == beside == {"c10d.allreduce_.default": num + 3}


def fake_suite(callbacks: list[StabilizerCallback], **options: Any) -> Suite:
    """A suite on a fake device that has made its first step."""
    with host_may_wait():
        with torch.device("cuda"):
            model = TinyTransformer()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        suite = Suite(callbacks, model=model, optimizer=optimizer, sink=SilentSink())  # type: ignore[arg-type]
        suite.run()
        suite.before_step()
        suite.finish()
    return suite


def callbacks_of(rule: Any, **options: Any) -> list[StabilizerCallback]:
    """Both, with norms beside them, that log every step or now and then."""
    return [
        GradNormCallback(heatmap_every_n_steps=None, strict=True),
        LayerClipCallback(
            rule=rule,
            rules={r"layers\..*": {"name": "fixed", "threshold": 1.0, "schedule": {3: 2.0}}},
            exclude=["norm"],
            min_norm=0.1,
            warmup_cap=1.0,
            every_n_steps=1,
            strict=True,
            **options,
        ),
        AdaptiveClipThreshold(rule=rule, max_threshold=5.0, strict=True, **options),
    ]


#: From step 16 on the host looks at counts of skips that were copied 16 steps earlier: no values arrive here.
NUM_STEPS = 16
RULES = ["robust_log", "mean_multiple", "quantile", "zscore"]


# Making a metric copies its fake defaults.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("rule", RULES)
def test_the_host_waits_for_nothing_beside_a_fused_optimizer(rule: str) -> None:
    """A read raises here; the steps include those at which shares are looked at and counts are fetched."""
    with fake_cuda():
        suite = fake_suite(callbacks_of(rule, on_nonfinite="skip_step"), fused=True)
        for step in range(1, NUM_STEPS):
            scale = torch.full((), 2.0, device="cuda") if step % 2 else None
            suite.run(grad_scale=scale, is_scaled=step % 2 == 1)
            suite.before_step()
            if step % 3 == 0:
                suite.after_clip(max_norm=0.5)
            suite.finish()
        assert suite.step == NUM_STEPS


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "options",
    [
        {"on_nonfinite": "zero_layer"},
        {"on_nonfinite": "ignore"},
        {"on_nonfinite": "skip_step", "mode": "observe"},
    ],
)
def test_nor_where_nothing_is_ever_skipped(options: dict[str, Any]) -> None:
    """Any optimizer will do then."""
    with fake_cuda():
        suite = fake_suite(callbacks_of("robust_log", **options))
        for _ in range(1, 20):
            suite.run()
            suite.before_step()
            suite.finish()
        assert suite.step == 20


def quiet_read(numbers: list[int]) -> Any:
    """Stands for the one read of a step: of a fake tensor nothing can be read.

    Args:
        numbers: Gets how many flags each read is of.
    """

    def read(self: Actor, plan: StepPlan, *flags: torch.Tensor) -> list[bool]:
        # Skipped, bad, the last, searched; and every wish to stop.
        numbers.append(2 + len(flags) + len(plan.stops))
        return [False] * numbers[-1]

    return mock.patch.object(Actor, "_read", read)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("on_spike", "num"), [("clip", 4), ("skip_step", 4), ("raise", 6)])
def test_one_read_a_step_beside_another_optimizer(on_spike: str, num: int) -> None:
    """The flags of all callbacks come in one piece, and any other read raises here."""
    numbers: list[int] = []
    with told() as messages, fake_cuda():
        with quiet_read(numbers):
            suite = fake_suite(callbacks_of("robust_log", on_spike=on_spike), fused=False)
            for _ in range(1, 12):
                suite.run()
                suite.before_step()
                suite.finish()
        with pytest.raises(HostReadError):
            suite.run()
    assert numbers == [num] * 12
    [message] = messages
    assert "With fused=True it waits for nothing" in message
