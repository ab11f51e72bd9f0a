"""What every callback promises. A new one is found here the day it is exported."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import stabilizer.callbacks
from stabilizer import tags
from stabilizer.callbacks import StabilizerCallback
from tests.event_files import read_run
from tests.lightning_models import PACKAGES, make_module, make_trainer

CALLBACKS = [
    value
    for name in stabilizer.callbacks.__all__
    if inspect.isclass(value := getattr(stabilizer.callbacks, name)) and issubclass(value, StabilizerCallback)
]

pytestmark = pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)

COMMON = {"layers": None, "exclude": (), "granularity": "block", "name": "", "strict": False}


def _weights(module: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_arguments_are_keywords_with_the_common_ones(kind: Any) -> None:
    parameters = dict(inspect.signature(kind).parameters)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert {name: parameters[name].default for name in COMMON} == COMMON
    assert "every_n_steps" in parameters
    for name in parameters:
        assert f"{name}: " in (kind.__doc__ or ""), f"{name} is not documented"


@pytest.mark.parametrize("package", PACKAGES)
def test_trains_and_changes_nothing_by_itself(kind: Any, package: str) -> None:
    """Defaults only observe: the weights are those of a run without the callback, bit for bit."""
    weights = []
    for callbacks in ([], [kind()]):
        module = make_module("transformer", package=package, optimizer="adamw")
        make_trainer(max_steps=6, package=package, callbacks=callbacks).fit(module)
        weights.append(_weights(module))
    assert all(map(torch.equal, *weights))


def test_is_a_callback_of_both_packages(kind: Any) -> None:
    import lightning.pytorch
    import pytorch_lightning

    assert issubclass(kind, lightning.pytorch.Callback)
    assert issubclass(kind, pytorch_lightning.Callback)


def test_two_of_a_kind_live_side_by_side(kind: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    make_trainer(callbacks=[kind(), kind(name="again")], logger=logger).fit(make_module("transformer"))
    logged = set(read_run(tmp_path / "run").scalars) - {"epoch"}
    ours = {tag for tag in logged if not tag.startswith("again/")}
    assert {f"again/{tag}" for tag in ours} == logged - ours
    for tag in ours:
        assert any(tag == known or tag.startswith(known + "/") for known in tags.ALL_TAGS), f"{tag} is not in tags.py"


def test_state_goes_round(kind: Any, tmp_path: Path) -> None:
    callback = kind()
    fresh = callback.state_dict()
    make_trainer(callbacks=[callback]).fit(make_module("transformer"))
    for state in (fresh, callback.state_dict()):
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        other = kind()
        other.load_state_dict(loaded)
        assert str(other.state_dict()) == str(state)
    assert callback.next_step() == 3


def test_can_be_copied_and_pickled(kind: Any) -> None:
    callback = kind()
    make_trainer(callbacks=[callback]).fit(make_module("transformer"))
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert str(other.state_dict()) == str(callback.state_dict())


def test_ends_more_than_once(kind: Any) -> None:
    callback = kind()
    module = make_module("transformer")
    trainer = make_trainer(callbacks=[callback])
    trainer.fit(module)
    callback.on_train_end(trainer, module)
    callback.on_exception(trainer, module, RuntimeError("late"))
    callback.teardown(trainer, module, "fit")
    assert callback.next_step() == 3


def test_other_stages_than_fit_are_none_of_its_business(kind: Any) -> None:
    callback = kind(layers=[99])  # would be refused in a fit
    trainer = make_trainer(callbacks=[callback], limit_val_batches=1)
    trainer.validate(make_module("transformer"), verbose=False)
    assert callback.next_step() == 0


def test_an_exception_in_the_training_step_leaves_all_rows_written(kind: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    module = make_module("transformer")
    original = module.training_step

    def breaks(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("out of data")
        return original(batch, batch_idx)

    module.training_step = breaks
    callback = kind()
    trainer = make_trainer(callbacks=[callback], logger=TensorBoardLogger(tmp_path, name="", version="run"))
    with pytest.raises(RuntimeError, match="out of data"):
        trainer.fit(module)
    assert callback.next_step() == 2
    for points in read_run(tmp_path / "run").ours().values():
        assert set(points) <= {0, 1}
    module.training_step = original
    make_trainer(callbacks=[callback]).fit(module)
    assert callback.next_step() == 5
