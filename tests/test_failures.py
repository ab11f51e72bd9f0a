"""What happens when something is wrong: in the model, in the strategy, in the loggers, or in a callback of ours."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.callbacks import GradNormCallback, StabilizerCallback, StepContext
from stabilizer.errors import StabilizerWarning
from tests.event_files import read_run
from tests.launcher import run_distributed
from tests.lightning_models import make_module, make_trainer
from tests.lightning_variants import Plain
from tests.models import loss_of, make_transformer


class Raises(StabilizerCallback):
    """Raises at one step on one rank."""

    def __init__(self, *, at: int, on_rank: int | None = None, hook: str = "on_gradients", **options: Any) -> None:
        super().__init__(**options)
        self.at, self.on_rank, self.hook = at, on_rank, hook
        self.seen: list[int] = []

    def _act(self, context: StepContext, hook: str) -> None:
        if hook != self.hook:
            return
        self.seen.append(context.step)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if context.step == self.at and self.on_rank in (None, rank):
            raise RuntimeError("the disk is full")

    def on_gradients(self, context: StepContext) -> None:
        """Raise, if this is the hook."""
        self._act(context, "on_gradients")

    def on_step_end(self, context: StepContext) -> None:
        """Raise, if this is the hook."""
        self._act(context, "on_step_end")


def _errors(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.name == "stabilizer"]


@pytest.mark.parametrize("hook", ["on_gradients", "on_step_end"])
def test_an_exception_disables_the_callback_and_nothing_else(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Raises(at=2, hook=hook), GradNormCallback()
    make_trainer(max_steps=5, callbacks=[bad, good]).fit(make_module("transformer"))
    assert bad.seen == [0, 1, 2]
    assert good.norm_history().steps == [0, 1, 2, 3, 4]
    [message] = _errors(caplog.records)
    assert f"Raises.{hook} failed at step 2 on rank 0" in message
    assert "strict=True" in message
    [record] = [record for record in caplog.records if record.name == "stabilizer"]
    assert record.exc_info is not None
    assert "the disk is full" in str(record.exc_info[1])


def test_strict_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="the disk is full"):
        make_trainer(callbacks=[Raises(at=1, strict=True)]).fit(make_module("transformer"))


def raise_on_one_rank(rank: int, world_size: int, strategy: str, on_rank: int) -> dict[str, Any]:
    """Twelve steps; a callback raises at step 3 on one rank."""
    import warnings

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("stabilizer").addHandler(handler)
    bad, good = Raises(at=3, on_rank=on_rank), GradNormCallback()
    module = make_module("transformer", tensor_style="tp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StabilizerWarning)
        make_trainer(strategy, devices=world_size, max_steps=12, callbacks=[bad, good]).fit(module)
    logging.getLogger("stabilizer").removeHandler(handler)
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, StabilizerWarning)]
    weights = [getattr(p, "_local_tensor", p).detach().sum().item() for p in module.parameters()]
    return {
        "seen": bad.seen,
        "steps": good.norm_history().steps,
        "errors": _errors(records),
        "warnings": ours,
        "weights": weights,
    }


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.covers(feature="failure on one rank", strategy=name, host="lightning"))
        for name in ("ddp", "fsdp1", "fsdp2")
    ],
)
@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_callback_that_raises_on_one_rank_is_off_on_all(strategy: str, on_rank: int) -> None:
    results = run_distributed(raise_on_one_rank, strategy, on_rank)
    assert results[on_rank]["seen"] == [0, 1, 2, 3]
    # The flag travels with step 4, and every rank reads it at step 8.
    assert results[1 - on_rank]["seen"] == list(range(8))
    for result in results:
        assert result["steps"] == list(range(12)), "the other callback goes on"
    assert [len(result["errors"]) for result in results] == [1 - on_rank, on_rank]
    assert f"failed at step 3 on rank {on_rank}" in results[on_rank]["errors"][0]
    # Only rank 0 speaks, and only if it has not said so already.
    assert [len(result["warnings"]) for result in results] == [on_rank, 0]


def broken_measuring(rank: int, world_size: int, strategy: str) -> list[Any]:
    """Local statistics raise on rank 1 from step 2 on."""
    from stabilizer import measurement

    original = measurement.norms

    def broken(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and callback.next_step() >= 2:
            raise RuntimeError("out of memory")
        return original(*args, **kwargs)

    measurement.norms = broken
    callback = GradNormCallback()
    try:
        module = make_module("transformer")
        make_trainer(strategy, devices=world_size, max_steps=12, callbacks=[callback]).fit(module)
    finally:
        measurement.norms = original
    return [callback.norm_history().steps, len(module.losses)]


@pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_measuring_that_fails_on_one_rank_hangs_nobody(strategy: str) -> None:
    for steps, num_batches in run_distributed(broken_measuring, strategy):
        assert num_batches == 12
        assert steps[-1] < 8, "all ranks stop measuring together"


def test_a_logger_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    class Full(TensorBoardLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("no space left on device")

    callback = GradNormCallback()
    make_trainer(callbacks=[callback], logger=Full(tmp_path), max_steps=5).fit(make_module("transformer"))
    assert callback.norm_history().steps == [0, 1, 2, 3, 4]
    [message] = _errors(caplog.records)
    assert "writing to the loggers failed" in message


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    monkeypatch.setenv("STABILIZER_DISABLE", "1")
    callback = GradNormCallback(layers=[99])
    trainer = make_trainer(callbacks=[callback], logger=TensorBoardLogger(tmp_path, name="", version="run"))
    with pytest.warns(StabilizerWarning, match="STABILIZER_DISABLE is set: GradNormCallback do nothing"):
        trainer.fit(make_module("transformer"))
    assert read_run(tmp_path / "run").ours() == {}
    with pytest.raises(ValueError, match="has not made a step"):
        callback.norm_history()
    monkeypatch.setenv("STABILIZER_DISABLE", "0")
    with pytest.raises(ValueError, match="out of range"):
        make_trainer(callbacks=[callback]).fit(make_module("transformer"))


def test_deepspeed_is_refused_with_the_way_out() -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class DeepSpeedStrategy(SingleDeviceStrategy):
        """Lightning's own cannot be made without DeepSpeed and a GPU."""

    trainer = make_trainer(strategy=DeepSpeedStrategy(torch.device("cpu")), callbacks=[GradNormCallback()])
    with pytest.raises(ValueError, match=r"DeepSpeed ZeRO keeps gradients .* ModelParallelStrategy \(FSDP2\)"):
        trainer.fit(make_module("transformer"))


def test_lbfgs_is_refused() -> None:
    module = Plain(optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss"):
        make_trainer(callbacks=[GradNormCallback()]).fit(module)


def test_hidden_gradients_are_one_warning() -> None:
    """Whoever keeps gradients to itself, whatever its name."""

    def loss(module: Plain, batch: Any, number: int) -> torch.Tensor:
        loss = loss_of(module.model, batch)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        return (loss.detach() + sum(g.sum() for g in gradients)).requires_grad_()

    with pytest.warns(StabilizerWarning, match=r"none of the 48 trainable parameters .* DeepSpeed ZeRO") as caught:
        make_trainer(max_steps=8, callbacks=[GradNormCallback()]).fit(Plain(loss=loss))
    assert sum(isinstance(warning.message, StabilizerWarning) for warning in caught) == 1


def test_parameters_without_gradients_are_named() -> None:
    module = Plain(make_transformer(unused=True))
    with pytest.warns(StabilizerWarning, match=r"2 of 50 trainable .* \['model.unused.weight', 'model.unused.bias'\]"):
        make_trainer(max_steps=8, callbacks=[GradNormCallback()]).fit(module)


def test_a_norm_of_exactly_zero_is_said() -> None:
    module = Plain(loss=lambda module, batch, number: 0 * loss_of(module.model, batch))
    with pytest.warns(StabilizerWarning, match="total gradient norm is exactly 0 in the first 3 optimizer steps"):
        make_trainer(max_steps=8, callbacks=[GradNormCallback()]).fit(module)


def test_hooks_and_memory_are_given_back() -> None:
    """After a fit nothing of ours is left on the model, and the callback does not keep the model alive."""
    import gc
    import weakref

    callback = GradNormCallback()
    module = make_module("transformer")
    trainer = make_trainer(callbacks=[callback])
    trainer.fit(module)
    for part in module.modules():
        hooks: list[Any] = [part._forward_hooks, part._forward_pre_hooks, part._backward_hooks]
        assert not any(hooks)
    alive = weakref.ref(module.model)
    kept = copy.deepcopy(callback)  # Lightning itself puts methods of the module on every callback, not on a copy
    del module, trainer, part, callback
    gc.collect()
    assert alive() is None
    assert kept.norm_history().steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0: expected a whole number of steps, at least 1"),
        ({"layer_every_n_steps": 2.5}, "layer_every_n_steps=2.5"),
        ({"heatmap_every_n_steps": 0}, "heatmap_every_n_steps=0.*None turns it off"),
        ({"max_abs_every_n_steps": -1}, "max_abs_every_n_steps=-1.*None turns it off"),
        ({"history": 0}, "history=0"),
        ({"norm_type": 3}, 'norm_type=3: allowed are 2 and "inf"'),
        ({"layers": "model.norm"}, r"layers='model.norm': expected a list, such as \['model.norm'\]"),
        ({"layers": 3}, r"layers=3: expected a list, such as \[3\]"),
        ({"exclude": "norm"}, "exclude='norm': expected a list"),
        ({"granularity": "blocks"}, "granularity='blocks': expected"),
        ({"granularity": {"(": "x"}}, r"granularity: '\(' is no regular expression"),
    ],
)
def test_bad_arguments_are_errors_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradNormCallback(**options)


def test_nothing_trainable() -> None:
    from stabilizer import gradient_norms

    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="0 of 2 parameters require a gradient"):
        gradient_norms(model)


assert os.environ.get("STABILIZER_DISABLE", "") in ("", "0"), "the tests need the callbacks on"
