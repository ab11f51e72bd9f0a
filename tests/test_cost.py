"""What measuring costs: collectives, counted with and without callbacks, and waits of the host (none)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, StabilizerCallback, StepContext
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.suite import Suite
from stabilizer.tally import LossTally
from tests.counting import Calls, HostReadError, count_collectives, fake_cuda
from tests.fake_suites import SilentSink, fake_suite
from tests.launcher import run_distributed
from tests.lightning_models import make_module, make_trainer
from tests.models import TinyTransformer

#: Steps at which nothing is due that does not happen at every step.
QUIET = (5, 7)


class Window(pl.Callback):
    """Counts collectives from the beginning of one batch to the end of another."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.counter = count_collectives()
        self.calls = Calls()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.calls = self.counter.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self.counter.__exit__(None, None, None)


class Reads(StabilizerCallback):
    """One more that reads the same step, in a grouping of its own."""

    def on_gradients(self, context: StepContext) -> None:
        context.log("reads/largest", context.store.norms.max())


NORMS = [GradNormCallback(), Reads(granularity="parameter"), Reads(name="again")]
LOSSES = [*NORMS, LossMeanVarCallback(), LossMeanVarCallback(weight="samples", name="again")]


def count(
    rank: int, world_size: int, strategy: str, window: tuple[int, int], callbacks: list[StabilizerCallback]
) -> tuple[Counter[str], list[int]]:
    """Collectives that callbacks add within some steps, and the bytes of the largest tensor of each."""
    calls = []
    for ours in ([], callbacks):
        counted = Window(*window)
        style = "sp" if strategy == "sp" else "tp"
        trainer = make_trainer(strategy, devices=world_size, max_steps=9, callbacks=[*ours, counted])
        trainer.fit(make_module("transformer", tensor_style=style))
        calls.append(counted.calls)
    without, with_ours = calls
    added = with_ours.minus(without)
    sizes = Counter(with_ours.sizes) - Counter(without.sizes)
    return added, sorted(max(size) for size in sizes.elements())


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", {}),
        ("fsdp1", {"c10d.allreduce_.default": 3}),
        ("fsdp2", {"c10d.allreduce_.default": 3}),
        ("tp", {"c10d.allreduce_.default": 3}),
        # One more for Partial gradients.
        ("sp", {"c10d.allreduce_.default": 6}),
    ],
)
def test_collectives_of_three_quiet_steps(strategy: str, expected: dict[str, int]) -> None:
    for added, sizes in run_distributed(count, strategy, QUIET, NORMS):
        assert added == expected
        # 7 layers, 48 parameters, 5 flags and whether measuring failed, in float64; the Partial sum holds the 18 norms'
        # weights and biases.
        largest = 8 * (48 + 6) if strategy != "sp" else 4 * 18 * 16
        assert all(size <= largest for size in sizes), sizes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_losses_travel_with_the_norms(strategy: str) -> None:
    """One collective a step, whatever looks at the loss; under DDP it holds the losses alone."""
    for added, sizes in run_distributed(count, strategy, QUIET, LOSSES):
        assert added == {"c10d.allreduce_.default": 3}
        # Two kinds of weight: two sums each, and two counts; 7 flags, and whether measuring failed.
        assert sizes == [8 * 6 if strategy == "ddp" else 8 * (48 + 8 + 6)] * 3


def test_ranks_under_ddp_compare_their_gradients_now_and_then() -> None:
    for added, _ in run_distributed(count, "ddp", (3, 7), NORMS):
        assert sum(added.values()) == 1, "step 4 is the only one between 3 and 7"


# Making a metric copies its fake defaults.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_host_never_waits_for_the_device() -> None:
    """A read of a CUDA tensor raises here, and every step logs the total, every tenth all layers."""
    everything = [
        GradNormCallback(),
        GradNormCallback(name="a", layers=[0, -1], granularity="module", layer_every_n_steps=1),
        GradNormCallback(name="b", norm_type="inf", max_abs_every_n_steps=3, heatmap_every_n_steps=5),
        LossMeanVarCallback(every_n_steps=4, warmup_steps=0, windows=(2, 5)),
        LossMeanVarCallback(name="c", weight="tokens", every_n_steps=1),
    ]
    with fake_cuda():
        suite = fake_suite(list(everything))
        for step in range(1, 12):
            tally = LossTally(["auto", "tokens"])
            tally.begin({"labels": torch.zeros(2, 3, dtype=torch.int64, device="cuda")})
            tally.add(torch.ones((), device="cuda"), scale=torch.full((), 2.0, device="cuda"))
            suite.run(
                grad_scale=torch.full((), 2.0, device="cuda"),
                is_scaled=step % 2 == 0,
                losses=tally.take(0),
                position=Position(step, 1, 1),
            )
            suite.after_clip(max_norm=0.5)
            suite.after_clip(max_norm=None)
            suite.finish()
        assert suite.step == 12
        norm = suite._contexts[0].store.total_norm
        assert norm.device.type == "cuda"
        assert norm.dtype == torch.float32


@pytest.mark.parametrize("read", [Tensor.item, bool, float, lambda t: t.to("cpu")])
def test_a_callback_that_reads_would_be_found(read: Any) -> None:
    class Reader(StabilizerCallback):
        def on_gradients(self, context: StepContext) -> None:
            if context.step:
                read(context.store.total_norm)

    with fake_cuda():
        suite = fake_suite([Reader(strict=True)])
        with pytest.raises(HostReadError):
            suite.run()


@pytest.mark.gpu
def test_the_host_never_waits_for_a_real_device() -> None:
    model = TinyTransformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    suite = Suite([GradNormCallback()], model=model, optimizer=optimizer, sink=SilentSink())  # type: ignore[arg-type]
    for step in range(12):
        model(torch.zeros(2, 8, dtype=torch.long, device="cuda")).sum().backward()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            suite.run()
            optimizer.step()
            suite.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
