"""Training does not notice local norms: graph, bits, memory, copies, failures, the device."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from stabilizer import sensors as sensors_module
from stabilizer.parameters import ParameterIndex
from stabilizer.sensors import Sensors
from tests.counting import HostReadError, fake_cuda
from tests.models import TinyTransformer, loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients
from tests.models import token_batch as tokens
from tests.test_sensors import norms_of, started, taken

pytestmark = pytest.mark.norms

TOLERANCE = 1e-5


def num_hooks(model: nn.Module) -> int:
    """All hooks on a model's parameters and modules."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    on_tensors = [len(getattr(p, kind, None) or ()) for p in model.parameters() for kind in kinds]
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(on_tensors) + sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    model = make_transformer()
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)  # type: ignore[method-assign]
    sensors, index = started(model)
    loss_of(model, tokens()).backward()
    expected = norms_of(reference_gradients(make_transformer(), [tokens()]))
    assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE)


def test_the_graph_of_a_compiled_model_stays_whole() -> None:
    model = make_transformer()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = norms_of(reference_gradients(model, [tokens()]))
    counters.clear()
    loss_of(compiled, tokens()).backward()
    sensors, index = started(compiled)
    for _ in range(2):
        loss_of(compiled, tokens()).backward()
        assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE)
    sensors.close()
    loss_of(compiled, tokens()).backward()
    assert counters["stats"]["unique_graphs"] == 1, "our hooks made it compile again"
    assert not counters["graph_break"]


def _train(steps: int, *, with_sensors: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(make_transformer(), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sensors = Sensors(model, ParameterIndex(model))
    if with_sensors:
        sensors.start()
    for step in range(steps):
        for micro_batch in range(2):
            loss_of(model, tokens(step=step, micro_batch=micro_batch)).backward()
            assert (sensors.take() is not None) == with_sensors
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_training_is_the_same_bit_for_bit() -> None:
    pairs = zip(_train(20, with_sensors=True), _train(20, with_sensors=False), strict=True)
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def test_no_gradient_is_kept_or_copied() -> None:
    model = make_transformer(dim=192, num_layers=1)
    sensors, _ = started(model)
    seen: dict[str, tuple[int, StorageWeakRef]] = {}

    def look(name: str, gradient: Tensor) -> None:
        seen[name] = (gradient.data_ptr(), StorageWeakRef(gradient.untyped_storage()))

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: look(name, gradient))
    loss_of(model, tokens()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert seen[name][0] == parameter.grad.data_ptr(), f"{name}: accumulated into a copy"
    assert not any(storage.expired() for _, storage in seen.values())
    model.zero_grad()
    # Not yet taken: what waits are norms only.
    kept = [name for name, (_, storage) in seen.items() if not storage.expired()]
    assert not kept
    assert sensors.take() is not None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_of_its_own() -> None:
    model = make_mlp()
    sensors, _ = started(model)
    loss_of(model, mlp_batch()).backward(create_graph=True)
    squares = sensors.take()
    assert squares is not None
    assert not squares.requires_grad
    model.zero_grad()


def test_start_and_close_as_often_as_one_likes() -> None:
    model = make_mlp()
    sensors = Sensors(model, ParameterIndex(model))
    sensors.close()
    assert num_hooks(model) == 0
    for _ in range(2):
        sensors.start()
        sensors.start()
        assert num_hooks(model) == 4
        loss_of(model, mlp_batch()).backward()
        assert sensors.take() is not None
        loss_of(model, mlp_batch()).backward()
        sensors.close()
        sensors.close()
        assert num_hooks(model) == 0
        assert sensors.take() is None, "what came before close() is gone"
        loss_of(model, mlp_batch()).backward()
        assert sensors.take() is None


def test_copies_of_the_model_have_no_hooks() -> None:
    model = make_mlp()
    plain = torch.zeros(3, requires_grad=True)
    sensors, _ = started(model, parameters=[*model.parameters(), plain])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        pickle.loads(pickle.dumps(plain))
    assert [num_hooks(each) for each in copies] == [0, 0, 0]
    assert num_hooks(model) == 4
    for each in copies:
        loss_of(each, mlp_batch()).backward()
    assert sensors.take() is None


def test_a_failure_of_ours_does_not_end_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mlp()
    sensors, _ = started(model)

    def fail(*args: Any) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(sensors_module, "_norm", fail)
    loss_of(model, mlp_batch()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sensors.take() is None
    assert sensors.reason == "MemoryError: no room"
    assert num_hooks(model) == 0
    sensors.start()
    assert num_hooks(model) == 0, "what does not work is not tried again"


def _feed(model: nn.Module) -> None:
    """Call the hooks by hand: a fake device has no backward pass."""
    for parameter in model.parameters():
        for hook in (parameter._backward_hooks or {}).values():
            hook(torch.zeros_like(parameter))


def test_the_host_does_not_wait_for_a_device() -> None:
    with fake_cuda():
        for dtype in (torch.float32, torch.bfloat16):
            with torch.device("cuda"):
                model = TinyTransformer(num_layers=2)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            sensors, index = started(model)
            for _ in range(3):
                _feed(model)
                squares = sensors.take()
                assert sensors.reason is None
                assert squares is not None
                assert (squares.device.type, squares.dtype, len(squares)) == ("cuda", torch.float32, len(index))
            sensors.close()


def test_a_hook_that_reads_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors_module, "_norm", lambda tensor: torch.as_tensor(tensor.sum().item()))
    with fake_cuda():
        with torch.device("cuda"):
            model = TinyTransformer(num_layers=1)
        sensors, _ = started(model)
        _feed(model)
        assert sensors.take() is None
        assert str(sensors.reason).startswith(HostReadError.__name__)
