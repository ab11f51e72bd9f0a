"""Field reports, area compile-hooks: compiled, checkpointed and hooked modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from stabilizer import StabilizerWarning, gradient_norms
from stabilizer.callbacks import GradNormCallback
from tests.event_files import Run, read_run
from tests.field_reports.helpers import TOLERANCE, Checkpointed, covers, fit, norm_logger, train
from tests.launcher import run_distributed
from tests.lightning_variants import Plain
from tests.models import loss_of, make_transformer, token_batch
from tests.sharding import shard_fsdp1, shard_fsdp2

# torch's own compiler, of modules that are compiled one by one.
QUIET_COMPILER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def _run(module: Any, folder: Path, *, callback: GradNormCallback | None = None, **options: Any) -> Run:
    fit(module, folder, callbacks=[callback or norm_logger()], **options)
    return read_run(folder / "run")


def _compiled(how: str) -> nn.Module:
    model: Any = make_transformer()
    if how == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    elif how == "blocks":
        for block in model.layers:
            block.compile(backend="aot_eager")
    return model  # type: ignore[no-any-return]


@QUIET_COMPILER
@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])
@covers("single")
def test_B037_norms_of_a_model_that_was_compiled_and_called_before(how: str, tmp_path: Path) -> None:
    model = _compiled(how)
    with torch.no_grad():
        model(token_batch()[0])
    expected = _run(Plain(), tmp_path / "plain").ours()
    compiled = _run(Plain(model), tmp_path / "compiled").ours()
    assert compiled.keys() == expected.keys()
    for tag, points in expected.items():
        assert compiled[tag] == pytest.approx(points, rel=1e-4), tag


def test_B038_activations_in_place_train_as_before(tmp_path: Path) -> None:
    def model(is_in_place: bool) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Embedding(32, 8), nn.Linear(8, 8), nn.ReLU(inplace=is_in_place), nn.Linear(8, 32)]
        return nn.Sequential(*layers)

    in_place, plain = (_run(Plain(model(kind)), tmp_path / str(kind)).ours() for kind in (True, False))
    assert len(plain) == 5
    assert in_place == plain


def _names_of(model: nn.Module, rank: int = 0) -> tuple[str, ...]:
    loss_of(model, token_batch(rank)).backward()
    return gradient_norms(model, granularity="parameter").layer_names


def names_under_wrappers(rank: int, world_size: int) -> dict[str, tuple[str, ...]]:
    return {
        "ddp": _names_of(DistributedDataParallel(make_transformer()), rank),
        "compiled ddp": _names_of(torch.compile(DistributedDataParallel(make_transformer()), backend="eager"), rank),
        "fsdp1": _names_of(shard_fsdp1(make_transformer()), rank),
        "fsdp2": _names_of(shard_fsdp2(make_transformer()), rank),
        "compiled fsdp2": _names_of(torch.compile(shard_fsdp2(make_transformer()), backend="eager"), rank),
    }


@QUIET_COMPILER
def test_B045_wrappers_leave_nothing_in_names() -> None:
    expected = tuple(name for name, _ in make_transformer().named_parameters())
    checkpointed: Any = make_transformer()
    for number, block in enumerate(checkpointed.layers):
        checkpointed.layers[number] = checkpoint_wrapper(block)
    assert any("_checkpoint_wrapped_module" in name for name, _ in checkpointed.named_parameters())
    models = {"checkpoint_wrapper": checkpointed, "compiled": _compiled("wrapped"), "blocks": _compiled("blocks")}
    for how, model in models.items():
        assert _names_of(model) == expected, how
    for result in run_distributed(names_under_wrappers, timeout=100):
        for how, names in result.items():
            assert names == expected, how


def test_B045_tags_patterns_and_states_fit_compiled_and_plain_runs(tmp_path: Path) -> None:
    def callback() -> GradNormCallback:
        return norm_logger(layers=[r"model\.layers\.[01]", 3, "model.lm_head"])

    first, second = callback(), callback()
    compiled = _run(Plain(_compiled("wrapped")), tmp_path / "compiled", callback=first)
    wanted = {f"grad_norm/layer/model.{name}" for name in ("layers.0", "layers.1", "layers.3", "lm_head")}
    assert {tag for tag in compiled.scalars if "/layer/" in tag} == wanted
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    plain = _run(Plain(), tmp_path / "plain", callback=second)
    assert {tag for tag in plain.scalars if "/layer/" in tag} == wanted
    assert list(plain.scalars["grad_norm/total"]) == [3, 4, 5]
    before, after = first.norm_history(), second.norm_history()
    assert after.layer_names == before.layer_names
    assert torch.equal(after.norms[:3], before.norms)


@covers("ddp")
@covers("fsdp1")
@covers("fsdp2")
def test_B045_tags_are_the_same_under_every_strategy(tmp_path: Path) -> None:
    expected = set(_run(Plain(), tmp_path / "plain").ours())
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        run_distributed(train, str(tmp_path / strategy), strategy, kind="transformer", max_steps=1)
        assert set(read_run(tmp_path / strategy / "run").ours()) == expected, strategy


def _hooks(*objects: Any) -> Iterator[tuple[str, int]]:
    """Every dictionary of hooks of modules, parameters and optimizers, with its length."""
    for owner in objects:
        for name in dir(owner):
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                hooks = getattr(owner, name)
                if hooks is None or isinstance(hooks, dict | list):
                    yield f"{type(owner).__name__}.{name}", len(hooks or ())


def _all_hooks(module: Any) -> list[tuple[str, int]]:
    parameters = list(module.parameters())
    common = nn.modules.module
    everywhere = [getattr(common, name) for name in dir(common) if name.startswith("_global") and "hook" in name]
    assert len(everywhere) > 3
    return [*_hooks(*module.modules(), *parameters), ("of all modules", sum(len(hooks or ()) for hooks in everywhere))]


class Interrupted(Exception):
    """Something in a user's code."""


@pytest.mark.filterwarnings("ignore:.* trainable parameters had no gradient:stabilizer.StabilizerWarning")
@pytest.mark.parametrize("breaks", [False, True])
def test_B090_no_hook_is_left_behind(breaks: bool, tmp_path: Path) -> None:
    def loss(module: Plain, batch: Any, number: int) -> torch.Tensor:
        if breaks and number == 2:
            raise Interrupted
        return loss_of(module.model, batch)

    module, optimizers = Plain(make_transformer(unused=True), loss=loss), []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=0.05))
        return optimizers[-1]

    module.make_optimizer = make_optimizer
    before = _all_hooks(module)
    assert len(before) > 500
    callback = norm_logger()
    for version in ("first", "second"):
        if breaks:
            with pytest.raises(Interrupted):
                fit(module, tmp_path, callbacks=[callback], version=version)
        else:
            fit(module, tmp_path, callbacks=[callback], version=version)
        assert _all_hooks(module) == before
        assert all(count == 0 for _, count in _hooks(optimizers[-1])), "on the optimizer"
    num_steps = 2 if breaks else 3
    assert callback.norm_history().steps == list(range(2 * num_steps)), "a step was counted twice"
    assert list(read_run(tmp_path / "second").scalars["grad_norm/total"]) == list(range(num_steps, 2 * num_steps))


def test_B090_a_layer_that_never_ran_is_named_once(tmp_path: Path) -> None:
    module = Plain(make_transformer(unused=True))
    with pytest.warns(StabilizerWarning) as caught:
        fit(module, tmp_path, callbacks=[norm_logger()], max_steps=8)
    [message] = [str(warning.message) for warning in caught if warning.category is StabilizerWarning]
    assert "'model.unused.weight', 'model.unused.bias'" in message
    assert set(read_run(tmp_path / "run").scalars["grad_norm/layer/model.unused"].values()) == {0.0}


@pytest.mark.parametrize("use_reentrant", [True, False])
@covers("single")
def test_B110_checkpointed_blocks_count_once(use_reentrant: bool, tmp_path: Path) -> None:
    expected = _run(Plain(), tmp_path / "plain").ours()
    model: Any = make_transformer()
    for number in (1, 3):
        model.layers[number] = Checkpointed(model.layers[number], use_reentrant=use_reentrant)
    checkpointed = _run(Plain(model), tmp_path / "checkpointed").ours()
    assert checkpointed.keys() == expected.keys()
    for tag, points in expected.items():
        assert checkpointed[tag] == pytest.approx(points, rel=TOLERANCE), tag
