"""From a run of each host to a file of thresholds, and to the callbacks that are made from it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from stabilizer.background import SHARED
from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback, attach, load_callbacks
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.run_facts import RunFacts
from stabilizer.cli import main
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.counting import fake_cuda
from tests.launcher import run_distributed
from tests.lightning_models import BATCH_SIZE, make_module, make_trainer
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, token_batch
from tests.tiny_loops import no_log, told

NUM_STEPS = 230


def _calibrate(logdir: Path, out: Path, *options: str) -> Any:
    arguments = ["calibrate", str(logdir), "--out", str(out), "--picture", str(out.with_suffix(".png"))]
    assert main([*arguments, *options]) == 0
    return yaml.safe_load(out.read_text())


def _facts(folder: Path) -> dict[str, Any]:
    """What is written of a run, once."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    [text] = events.Tensors("stabilizer/run/text_summary")
    found = json.loads(text.tensor_proto.string_val[0].decode().strip("`").removeprefix("json"))
    assert isinstance(found, dict)
    return found


def _loop(callbacks: list[Any], *, log: Any, steps: int, size: int = 5, model: Any = None) -> Any:
    model = make_mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=log):
        for step in range(steps):
            loss_of(model, mlp_batch(step=step, size=size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [callback.thresholds() for callback in callbacks if hasattr(callback, "thresholds")]


@pytest.mark.parametrize("granularity", ["block", "parameter", {r"first|second\.bias": "mine"}])
def test_the_thresholds_of_a_plain_loop_are_in_force_in_the_next(granularity: Any, tmp_path: Path) -> None:
    norms = GradNormCallback(layer_every_n_steps=1, granularity=granularity)
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        _loop([norms], log=writer, steps=NUM_STEPS)
    history = norms.norm_history()
    content = _calibrate(tmp_path / "logs", tmp_path / "found.yaml")
    told_of = {"num_params": 49, "world_size": 1, "accumulation": None, "batch": 5, "precision": None}
    assert content["adaptive_clip"]["rule"]["calibrated_for"] == told_of
    callbacks = load_callbacks(tmp_path / "found.yaml")
    assert [type(callback) for callback in callbacks] == [LayerClipCallback, AdaptiveClipThreshold]
    layers, total = _loop(callbacks, log=no_log, steps=1)
    assert list(layers) == list(history.layer_names)
    for threshold, recorded in (
        (total["total"], history.totals),
        *zip(layers.values(), history.norms.T, strict=True),
    ):
        kept = recorded[100:].double().numpy()
        assert threshold == pytest.approx(max(1.5 * np.quantile(kept, 0.999), 3 * np.median(kept)), rel=1e-3)


@pytest.mark.parametrize("logger", ["TensorBoardLogger", "CSVLogger"])
def test_a_lightning_run_and_the_run_after_it(logger: str, tmp_path: Path) -> None:
    from lightning.pytorch import loggers

    options: dict[str, Any] = {"max_steps": NUM_STEPS, "accumulate_grad_batches": 2}
    norms = GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None)
    log = getattr(loggers, logger)(str(tmp_path), name="logs")
    module = make_module("mlp", length=2 * BATCH_SIZE * NUM_STEPS)
    make_trainer(callbacks=[norms], logger=log, **options).fit(module)
    content = _calibrate(tmp_path / "logs", tmp_path / "found.yaml")
    calibrated_for = content["adaptive_clip"]["rule"]["calibrated_for"]
    if logger == "TensorBoardLogger":
        told_of = {"num_params": 49, "world_size": 1, "accumulation": 2, "batch": BATCH_SIZE, "precision": "32-true"}
        assert calibrated_for == told_of
        assert _facts(Path(log.log_dir)) == {**told_of, "series": {"": {"granularity": "block", "norm_type": 2}}}
    else:
        assert set(calibrated_for.values()) == {None}
    kept = norms.norm_history().totals[100:].double().numpy()
    threshold = content["adaptive_clip"]["rule"]["threshold"]
    assert threshold == pytest.approx(max(1.5 * np.quantile(kept, 0.999), 3 * np.median(kept)), rel=1e-3)

    for accumulated in (2, 1):
        callbacks = load_callbacks(tmp_path / "found.yaml")
        with told() as messages:
            trainer = make_trainer(callbacks=callbacks, max_steps=3, accumulate_grad_batches=accumulated)
            trainer.fit(make_module("mlp"))
        found = [message for message in messages if "calibrate" in message]
        assert len(found) == (accumulated == 1 and logger == "TensorBoardLogger")
        for message in found:
            assert "accumulation was 2 and is 1." in message
            assert "stabilizer calibrate" in message


def test_the_trackers_of_accelerate_get_the_facts(tmp_path: Path) -> None:
    accelerator = make_accelerator(log_with="tensorboard", project_dir=str(tmp_path), gradient_accumulation_steps=3)
    accelerator.init_trackers("logs")
    model, optimizer = prepared(accelerator)
    callbacks = [GradNormCallback(heatmap_every_n_steps=None), LayerClipCallback(name="a", granularity="module")]
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks):
        train(accelerator, model, optimizer, [token_batch(step=step, size=4) for step in range(9)])
    accelerator.end_training()
    num_params = sum(parameter.numel() for parameter in make_transformer().parameters() if parameter.requires_grad)
    series = {"": {"granularity": "block", "norm_type": 2}, "a": {"granularity": "module", "norm_type": 2}}
    told_of = {"num_params": num_params, "world_size": 1, "accumulation": 3, "batch": 4, "precision": "32-true"}
    assert _facts(tmp_path / "logs") == {**told_of, "series": series}


def _fixed(**calibrated_for: Any) -> dict[str, Any]:
    return {"name": "fixed", "threshold": 100.0, "calibrated_for": calibrated_for}


def _warned(rank: int, num_ranks: int, calibrated_for: dict[str, Any]) -> list[str]:
    """What a run of two steps says, with thresholds in both clips and for two layers."""
    accelerator = make_accelerator("ddp" if num_ranks > 1 else "single")
    model, optimizer = prepared(accelerator)
    rule = _fixed(**calibrated_for)
    callbacks = [AdaptiveClipThreshold(rule=rule), LayerClipCallback(rules={r".*0": rule, r".*1": rule})]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log):
            train(accelerator, model, optimizer, [token_batch(rank, step=step, size=3) for step in range(2)])
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, StabilizerWarning)]
    return [text for text in texts if "calibrate" in text]


def test_another_run_is_warned_once() -> None:
    same = {"num_params": None, "world_size": 1, "accumulation": None, "batch": 3, "precision": "no"}
    assert _warned(0, 1, same) == []
    assert _warned(0, 1, {}) == []
    [text] = _warned(0, 1, {**same, "batch": 8})
    assert "batch was 8 and is 3." in text
    [text] = _warned(0, 1, {**same, "precision": "bf16", "world_size": 64, "num_params": 7})
    assert re.search(
        r"num_params was 7 and is \d+, world_size was 64 and is 1, precision was 'bf16' and is '32-true'\.", text
    )


def test_another_number_of_processes_is_warned_once_on_one_of_them() -> None:
    first, second = run_distributed(_warned, {"world_size": 1, "batch": 3, "precision": "no"})
    assert len(first) == 1
    assert "world_size was 1 and is 2." in first[0]
    assert second == []


class _Facts(StabilizerCallback):
    """Keeps what is known of the run."""

    def on_gradients(self, context: Any) -> None:
        self.known = dict(context.run.known)


def _known(rank: int, world_size: int, strategy: str, host: str) -> Any:
    callback = _Facts()
    if host == "lightning":
        trainer = make_trainer(strategy, devices=world_size, max_steps=1, callbacks=[callback])
        trainer.fit(make_module("transformer", tensor_style=strategy if strategy in ("tp", "sp") else "sp"))
    else:
        accelerator = make_accelerator(strategy)
        model, optimizer = prepared(accelerator)
        with attach(accelerator, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
            train(accelerator, model, optimizer, [token_batch(rank)])
    return callback.known


@pytest.mark.parametrize(
    ("strategy", "host"),
    [
        ("fsdp1", "lightning"),
        ("fsdp2", "lightning"),
        ("tp", "lightning"),
        ("fsdp1", "accelerate"),
        ("fsdp2", "accelerate"),
    ],
)
def test_parameters_are_counted_over_all_shards(strategy: str, host: str) -> None:
    expected = sum(parameter.numel() for parameter in make_transformer().parameters() if parameter.requires_grad)
    for known in run_distributed(_known, strategy, host):
        assert known["num_params"] == expected
        assert known["world_size"] == 2
        assert known["batch"] == 3


def test_the_first_batch_is_the_last_one_looked_at() -> None:
    """A batch that has none of the shapes of a batch is not known; the hook on the model is gone after the first."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    callback = _Facts()
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
        with torch.no_grad():
            model(torch.zeros(9, 4))  # no training
        for size in (2, 6):
            model(torch.zeros(size, 4)).sum().backward()
            assert not model._forward_pre_hooks
            optimizer.step()
            assert callback.known["batch"] == 2


class _Texts:
    """A log that takes text alone."""

    is_logging = True

    def __init__(self) -> None:
        self.texts: list[tuple[str, str, int]] = []

    def text(self, *row: Any) -> None:
        self.texts.append(row)


def test_the_host_does_not_wait_for_the_device_to_know_its_run() -> None:
    """A read of a CUDA tensor raises here."""
    sink, facts = _Texts(), RunFacts([GradNormCallback(norm_type="inf")], precision="no")
    with fake_cuda():
        with torch.device("cuda"):
            model, batch = torch.nn.Linear(3, 2), {"inputs": torch.zeros(6, 3)}
        for _ in range(2):
            facts.see_batch(batch)
            facts.see_batch({"inputs": torch.zeros(2, 3)})  # the last of an epoch, say
            facts.conclude(model, accumulation=0, sink=sink, step=7)  # type: ignore[arg-type]
    assert SHARED.drain(seconds=60)
    (tag, text, step), (configuration, _, _) = sink.texts
    assert configuration == "stabilizer/config"
    assert (tag, step) == ("stabilizer/run", 7)
    told_of = {"num_params": 8, "world_size": 1, "accumulation": None, "batch": 6, "precision": "32-true"}
    series = {"": {"granularity": "block", "norm_type": "inf"}}
    assert json.loads(text.strip("`").removeprefix("json")) == {**told_of, "series": series}


def test_largest_elements_are_no_norms_to_clip_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        _loop([GradNormCallback(norm_type="inf")], log=writer, steps=3)
    assert main(["calibrate", str(tmp_path)]) == 2
    assert "norm_type='inf': these are no L2 norms" in capsys.readouterr().err


def test_a_log_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def add_scalar(self, *row: Any) -> None:
            pass

        def add_text(self, *row: Any) -> None:
            raise OSError("no space left")

    clip = AdaptiveClipThreshold(rule=_fixed(batch=4))
    with told() as messages:
        [threshold] = _loop([clip], log=Full(), steps=2, size=4)
    assert threshold == {"total": 100.0}
    assert "no space left" in caplog.text
    assert not [message for message in messages if "calibrate" in message]


def test_a_first_step_that_is_short_does_not_hide_the_accumulation() -> None:
    callback = _Facts()
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 1, "max_steps": 1}
    with pytest.warns(StabilizerWarning, match="1 micro-batch, but each loss is divided by 2"):
        make_trainer(callbacks=[callback], **options).fit(make_module("mlp"))
    assert callback.known["accumulation"] == 2
