"""LossMeanVarCallback in real Trainers: the numbers of numpy, whatever the precision, accumulation and ranks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stabilizer.callbacks import LossMeanVarCallback
from stabilizer.errors import StabilizerWarning
from tests.event_files import read_run
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, make_module, make_trainer, module_class
from tests.models import loss_of

WINDOWS = (3, 5)


def _callback(**options: Any) -> LossMeanVarCallback:
    return LossMeanVarCallback(**{"windows": WINDOWS, "every_n_steps": 2, "warmup_steps": 0, **options})


def _expected(losses: list[float]) -> dict[str, float]:
    """Of one loss a step; those that are not finite enter nothing."""
    finite = [(step, loss) for step, loss in enumerate(losses) if np.isfinite(loss)]
    expected: dict[str, float] = {}
    for window in WINDOWS:
        last = np.array([loss for _, loss in finite[-window:]])
        expected |= {f"mean_{window}": last.mean(), f"std_{window}": last.std(ddof=1)}
    x, y = (np.array(column, dtype=np.float64) for column in zip(*finite[-WINDOWS[-1] :], strict=True))
    (slope, intercept), residual = np.polyfit(x, y, 1), 0.0
    residual = float(((y - slope * x - intercept) ** 2).sum())
    expected[f"slope_{WINDOWS[-1]}"] = slope
    expected[f"slope_error_{WINDOWS[-1]}"] = np.sqrt(residual / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return expected


def _check(callback: LossMeanVarCallback, losses: list[float], *, rel: float = 1e-5) -> None:
    found = callback.statistics()
    for name, value in _expected(losses).items():
        assert found[name] == pytest.approx(value, rel=rel, abs=1e-6), name


class _Scripted:
    """Losses by (step, micro-batch, rank), through a parameter so that there is a gradient; batches of given sizes."""

    def __init__(self, package: str = "lightning.pytorch") -> None:
        import importlib

        lightning = importlib.import_module(package)

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            losses: Any = staticmethod(lambda batch_index, rank: 1.0 + batch_index)
            sizes: Any = staticmethod(lambda batch_index, rank: 1)
            wraps: Any = staticmethod(lambda loss: loss)
            num_batches = 8

            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(2))

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                value = self.losses(batch_idx, self.trainer.global_rank)
                return self.wraps((self.weight - self.weight.detach()).sum() + value)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.0)

            def train_dataloader(self) -> Any:
                rank = self.trainer.global_rank
                sizes = [self.sizes(index, rank) for index in range(self.num_batches)]
                return DataLoader([torch.zeros(size, 1) for size in sizes], batch_size=None)

        self.module = Module()


def _scripted(**attributes: Any) -> Any:
    module = _Scripted().module
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("wraps", [lambda loss: loss, lambda loss: {"loss": loss, "logits": torch.zeros(3)}])
@pytest.mark.covers(feature="loss windows", strategy="single", host="lightning")
def test_a_tensor_or_a_dict(wraps: Any, tmp_path: Any) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    losses = [4.0, 3.0, 7.0, 2.5, 2.0, 1.0, 1.5]
    module = _scripted(losses=lambda index, rank: losses[index], wraps=wraps)
    callback = _callback()
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    make_trainer(max_steps=7, callbacks=[callback], logger=logger).fit(module)
    _check(callback, losses)
    scalars = read_run(tmp_path / "run").scalars
    for name, value in _expected(losses).items():
        assert scalars[f"loss/{name}"][6] == pytest.approx(value, rel=1e-5), name
    assert set(scalars["loss/mean_3"]) == {0, 2, 4, 6}
    assert scalars["loss/min"] == {0: 4.0, 2: 3.0, 4: 2.0, 6: 1.0}
    assert scalars["loss/max"] == {0: 4.0, 2: 7.0, 4: 2.5, 6: 1.5}
    assert set(scalars["loss/nonfinite"].values()) == {0.0}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_and_a_scaler_leave_the_loss_as_it_is(scaled: bool, package: str) -> None:
    import importlib

    MixedPrecision = importlib.import_module(f"{package}.plugins.precision").MixedPrecision
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 4}
    if scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    module = _Scripted(package).module
    module.num_batches = 12
    callback = _callback()
    make_trainer(callbacks=[callback], package=package, **options).fit(module)
    # Losses 1, 2, 3 | 4, 5, 6 | ...
    _check(callback, [2.0, 5.0, 8.0, 11.0], rel=1e-6)


def _weighted_fit(rank: int, world_size: int, strategy: str) -> dict[str, float]:
    module = _scripted(
        losses=lambda index, rank: 1.0 + index + 3 * rank, sizes=lambda index, rank: 1 + index % 3 + rank
    )
    callback = _callback()
    make_trainer(strategy, devices=world_size, max_steps=4, accumulate_grad_batches=2, callbacks=[callback]).fit(module)
    return callback.statistics()


@pytest.mark.covers(feature="loss windows", strategy="ddp", host="lightning")
def test_samples_weigh_losses_of_all_ranks() -> None:
    expected = []
    for step in range(4):
        rows = [
            (1.0 + index + 3 * rank, 1 + index % 3 + rank) for index in (2 * step, 2 * step + 1) for rank in range(2)
        ]
        losses, weights = zip(*rows, strict=True)
        expected.append(float(np.average(losses, weights=weights)))
    results = run_distributed(_weighted_fit, "ddp", world_size=2)
    assert results[0] == results[1]
    for name, value in _expected(expected).items():
        assert results[0][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.covers(feature="loss windows", strategy="fsdp2", host="lightning")
def test_the_loss_of_a_sharded_model() -> None:
    results = run_distributed(_sharded_fit, world_size=2)
    assert results[0][0] == results[1][0]
    means = np.array([losses for _, losses in results]).mean(axis=0)
    assert results[0][0]["mean_3"] == pytest.approx(means[-3:].mean(), rel=1e-5)


def _sharded_fit(rank: int, world_size: int) -> tuple[dict[str, float], list[float]]:
    callback, module = _callback(), make_module("transformer")
    make_trainer("fsdp2", devices=world_size, max_steps=4, callbacks=[callback]).fit(module)
    return callback.statistics(), module.losses


def _nan_fit(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    def loss(index: int, rank: int) -> float:
        return float("nan") if index in (5, 6, 7) and rank == 1 else 1.0 + index

    callback = _callback(every_n_steps=4, cooldown_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("ddp" if world_size > 1 else "single", devices=world_size, max_steps=8, callbacks=[callback]).fit(
            _scripted(losses=loss)
        )
    told = [str(warning.message) for warning in caught if issubclass(warning.category, StabilizerWarning)]
    return callback.statistics(), [message for message in told if "not finite" in message and "loss" in message]


def test_a_nan_is_counted_told_and_kept_out_of_the_windows() -> None:
    (statistics, told), (other, untold) = run_distributed(_nan_fit, world_size=2)
    nan = float("nan")
    for name, value in _expected([1.0, 2.0, 3.0, 4.0, 5.0, nan, nan, nan]).items():
        assert statistics[name] == other[name] == pytest.approx(value, rel=1e-6), name
    assert statistics["num_nonfinite"] == 3
    [message] = told
    assert message.startswith("step 5 (batch 5): the loss is not finite")
    assert "3 micro-batches" in message
    assert untold == []


def test_the_rank_of_a_nan_is_named(tmp_path: Any) -> None:
    from stabilizer.callbacks.console import RunConsole
    from stabilizer.callbacks.nonfinite_losses import NonfiniteLosses

    alarm, console = NonfiniteLosses(cooldown_steps=10), RunConsole()
    with pytest.warns(StabilizerWarning, match=r"step 7 \(batch 15\): the loss is not finite on ranks 1, 3 \(3 micro"):
        # Counts of two steps, their weights, and counts of four ranks.
        alarm.reader([6, 7], [13, 15], console=console)(8, torch.tensor([0.0, 3.0, 8.0, 8.0, 0.0, 1.0, 0.0, 2.0]))
    alarm.reader([8], [17], console=console)(9, torch.tensor([4.0, 8.0]))  # within the cooldown
    with pytest.warns(StabilizerWarning, match=r"step 17: .*no valid target in the batch.*\(5 micro-batches since"):
        alarm.reader([16, 17], [-1, -1], console=console)(18, torch.tensor([0.0, 1.0, 8.0, 0.0]))


@pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
@pytest.mark.parametrize("on_alarm", [["log"], []])
def test_alarms_can_be_turned_off(on_alarm: list[Any], recwarn: Any) -> None:
    callback = _callback(on_alarm=on_alarm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_steps=4, callbacks=[callback]).fit(_scripted(losses=lambda index, rank: float("nan")))
    assert bool([w for w in caught if "loss is not finite" in str(w.message)]) == bool(on_alarm)
    assert callback.statistics()["num_nonfinite"] == 4


def test_a_state_fits_windows_of_other_lengths() -> None:
    losses = [9.0, 4.0, 3.0, 7.0, 2.5, 2.0, 1.0]
    callback = _callback()
    module = _scripted(losses=lambda index, rank: losses[index])
    make_trainer(max_steps=7, callbacks=[callback]).fit(module)
    for windows in ((2, 4), (3, 50)):
        other = _callback(windows=windows)
        with pytest.warns(StabilizerWarning, match=r"windows: \[3, 5\] -> "):
            other.load_state_dict(callback.state_dict())
        last = losses[-min(windows[-1], 5) :]
        assert other.statistics()[f"mean_{windows[-1]}"] == pytest.approx(np.mean(last))
        assert other.statistics()[f"std_{windows[-1]}"] == pytest.approx(np.std(last, ddof=1))


def test_two_optimizers_after_one_backward_see_the_same_loss() -> None:
    class Two(module_class(PACKAGES[0])):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("mlp")
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            weights = list(self.model.parameters())
            return [torch.optim.SGD(weights[:2], lr=0.0), torch.optim.SGD(weights[2:], lr=0.0)]

        def training_step(self, batch: Any, batch_index: int) -> None:
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            for optimizer in self.optimizers():
                optimizer.zero_grad()

    module, callback = Two(), _callback()
    make_trainer(max_steps=8, callbacks=[callback]).fit(module)
    for optimizer_index in (0, 1):
        mean = callback.statistics(optimizer_index)["mean_3"]
        assert mean == pytest.approx(np.mean(module.losses[-3:]), rel=1e-5)


def test_arguments_that_mean_nothing_here_are_told_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(max_steps=1, callbacks=[_callback(exclude=[r"model\.lm_head"])]).fit(make_module("transformer"))
    assert "a loss belongs to no layer" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": ()}, "windows"),
        ({"windows": (1, 5)}, "at least 2"),
        ({"windows": (5, 5)}, "windows"),
        ({"every_n_steps": 0}, "every_n_steps=0: expected a whole number of steps, at least 1"),
        ({"weight": "words"}, "weight='words': allowed are"),
        ({"warmup_steps": -1}, "warmup_steps=-1: expected a whole number of steps, at least 0"),
        ({"cooldown_steps": 1.5}, r"cooldown_steps=1\.5: expected"),
        ({"on_alarm": "log"}, "on_alarm='log': expected a list"),
        (
            {"on_alarm": ["stopp"]},
            r"on_alarm: 'stopp': allowed are \"log\", .*\"stop\", and functions .*closest is stop",
        ),
        ({"on_alarm": ["log", "log"]}, r"on_alarm: 'log' is there 2 times"),
        ({"on_alarm": [5]}, r"on_alarm: 5: expected one of \"log\", .*, a mapping with its name, or a function"),
        ({"on_alarm": [{"name": ["log"]}]}, "on_alarm: .*: expected one of"),
        (
            {"on_alarm": [{"name": "lower_lr", "factor": 1.0}]},
            r"on_alarm: lower_lr: factor=1\.0: expected a number above",
        ),
        ({"on_alarm": [{"name": "lower_lr", "num_steps": 0}]}, "on_alarm: lower_lr: num_steps=0: expected"),
        (
            {"on_alarm": [{"name": "lower_lr", "by": 2}]},
            "on_alarm: lower_lr: 'by' is no argument; known are factor, num",
        ),
        ({"on_alarm": [{"name": "stop", "by": 2}]}, "on_alarm: stop: 'by' is no argument; known are none"),
        ({"on_alarm": [{"name": "record", "path": 5}]}, "on_alarm: record: path=5: expected the name of a file"),
        ({"on_alarm": [{"name": "save_checkpoint", "max_saves": 0}]}, "max_saves=0"),
        (
            {"on_alarm": [{"name": "call", "function": "no.such.thing"}]},
            "function='no.such.thing': expected a function",
        ),
        ({"jump_target": 0}, "jump_target=0"),
        ({"drift_limit": 0}, "drift_limit=0"),
        ({"variance_limit": 1}, "variance_limit=1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossMeanVarCallback(**options)
