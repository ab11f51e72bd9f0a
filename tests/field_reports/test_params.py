"""Field reports, area params: which parameters are measured, and what is said of those that have nothing to measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from stabilizer import ParameterIndex, StabilizerWarning, gradient_norms
from stabilizer.callbacks import LayerClipCallback, attach
from tests import reference
from tests.event_files import read_run
from tests.field_reports.clip_tools import clip_now, total_clip
from tests.field_reports.helpers import TOLERANCE, Checkpointed, covers, fit, norm_logger, our_warnings
from tests.launcher import run_distributed
from tests.lightning_variants import Plain
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch
from tests.tiny_loops import no_log


def _adapted(*trainable: str) -> nn.Module:
    model = make_transformer(adapters=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.search(pattern, name) for pattern in trainable))
    return model


def test_B006_frozen_adapters_leave_no_trace(tmp_path: Path) -> None:
    fit(Plain(_adapted("lm_head")), tmp_path, callbacks=[norm_logger(granularity="parameter")])
    layers = {tag for tag in read_run(tmp_path / "run").scalars if "/layer/" in tag}
    assert layers == {"grad_norm/layer/model.lm_head.weight"}
    assert len(ParameterIndex(_adapted("lm_head"))) == 1
    with pytest.raises(ValueError, match=r"^0 of \d+ parameters require a gradient"):
        gradient_norms(_adapted())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_B006_adapters_that_checkpointing_cut_off_are_named(tmp_path: Path) -> None:
    model = _adapted("lora_")
    model.layers[0] = Checkpointed(model.layers[0], use_reentrant=True)
    with pytest.warns(StabilizerWarning) as caught:
        fit(Plain(model), tmp_path, callbacks=[norm_logger()], max_steps=6)
    [message] = [str(warning.message) for warning in caught if warning.category is StabilizerWarning]
    assert message.startswith("4 of 16 trainable parameters had no gradient in the first 3 optimizer steps")
    named = re.findall(r"'(model\.[^']*)'", message)
    assert named == [f"model.layers.0.attention.{p}.lora_{half}.weight" for p in "qv" for half in "ab"]
    zeros = read_run(tmp_path / "run").scalars["grad_norm/layer/model.layers.0"]
    assert zeros == dict.fromkeys(range(6), 0.0)


def test_B006_a_norm_of_exactly_zero_is_said(tmp_path: Path) -> None:
    module = Plain(_adapted("lora_"), loss=lambda module, batch, number: loss_of(module.model, batch) * 0)
    with pytest.warns(StabilizerWarning, match="the total gradient norm is exactly 0 in the first 3 optimizer steps"):
        fit(module, tmp_path, callbacks=[norm_logger()], max_steps=6)


def test_B006_gradients_that_never_come_are_said_for_all(tmp_path: Path) -> None:
    module = Plain(_adapted("lora_"), loss=lambda module, batch, number: module.other.square().sum())
    module.other = nn.Parameter(torch.ones(1))
    with pytest.warns(StabilizerWarning, match="none of the 16 trainable parameters had a gradient"):
        fit(module, tmp_path, callbacks=[norm_logger()])


def _with_gradients() -> nn.Module:
    model = make_mlp()
    loss_of(model, mlp_batch()).backward()
    return model


def test_B022_any_collection_of_parameters_is_taken_once() -> None:
    model = _with_gradients()
    expected = reference.total_norm({name: p.grad for name, p in model.named_parameters()})
    collections: dict[str, Any] = {
        "module": lambda: model,
        "generator": model.parameters,
        "filter": lambda: filter(lambda p: p.requires_grad, model.parameters()),
        "list": lambda: list(model.parameters()),
        "generator expression": lambda: (p for p in model.parameters()),
    }
    for kind, make in collections.items():
        assert gradient_norms(make()).total_norm.item() == pytest.approx(expected, rel=TOLERANCE), kind
        index = ParameterIndex(make())
        for _ in range(2):
            assert [id(p.grad) for p in model.parameters()] == [id(g) for g in index.gradients()], kind
    weight = model.first.weight
    assert weight.grad is not None
    assert gradient_norms(weight).total_norm.item() == pytest.approx(weight.grad.norm().item(), rel=TOLERANCE)


@pytest.mark.parametrize("function", [gradient_norms, ParameterIndex])
def test_B022_a_used_up_generator_is_an_error(function: Any) -> None:
    generator = _with_gradients().parameters()
    function(generator)
    for empty in (generator, [], iter(())):
        with pytest.raises(ValueError, match=r"^0 of 0 parameters .*\(a generator that was used before is empty\)"):
            function(empty)


class _Largest(TorchDispatchMode):
    """Remembers the largest result of any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dense = [t for t in tree_iter(result) if isinstance(t, Tensor) and t.layout == torch.strided]
        self.num_elements = max([self.num_elements, *(t.numel() for t in dense)])
        return result


def _sparse_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Linear(4, 1))


def sparse_under_ddp(rank: int, world_size: int) -> list[float]:
    model = nn.parallel.DistributedDataParallel(_sparse_model())
    model(torch.tensor([3, 3, 7 + rank])).square().sum().backward()
    return [gradient_norms(model, norm_type=norm_type).total_norm.item() for norm_type in (2, "inf")]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@covers("ddp", "plain")
def test_B068_repeated_rows_of_a_sparse_gradient_count_with_their_sum() -> None:
    model = _sparse_model()
    model(torch.tensor([3, 3, 7])).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients["0.weight"].is_sparse
    assert not gradients["0.weight"].is_coalesced()
    for norm_type in (2, "inf"):
        with _Largest() as largest:
            result = gradient_norms(model, norm_type=norm_type, granularity="parameter")
        assert largest.num_elements < 1000, "the table was made dense"
        layers = reference.layer_norms(gradients, lambda name: name, float(norm_type))
        assert dict(zip(result.layer_names, result.norms.tolist(), strict=True)) == pytest.approx(layers, rel=TOLERANCE)
        assert result.total_norm.item() == pytest.approx(
            reference.total_norm(gradients, float(norm_type)), rel=TOLERANCE
        )
    assert not gradients["0.weight"].is_coalesced(), "the gradient was changed"

    whole = _sparse_model()
    for rank in range(2):
        (whole(torch.tensor([3, 3, 7 + rank])).square().sum() / 2).backward()
    averaged = {name: p.grad for name, p in whole.named_parameters()}
    expected = [reference.total_norm(averaged, norm_type) for norm_type in (2, float("inf"))]
    assert run_distributed(sparse_under_ddp) == [pytest.approx(expected, rel=TOLERANCE)] * 2


def _sparse_gradients() -> tuple[nn.Module, dict[str, Tensor]]:
    model = _sparse_model()
    model(torch.tensor([3, 3, 7])).square().sum().backward()
    return model, {name: p.grad.clone().to_dense() for name, p in _named(model)}


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_B068_clips_of_sparse_gradients() -> None:
    model, raw = _sparse_gradients()
    limit = 0.25 * reference.total_norm(raw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "log": no_log}
    given = [p.grad.clone() for p in model.parameters()]
    with attach(None, callbacks=[total_clip(limit)], **options) as handle:
        handle.measure()  # what is made at the first step is not meant
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        with _Largest() as largest:
            handle.measure()
    assert largest.num_elements < 1000, "the table was made dense"
    assert model[0].weight.grad.is_sparse
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.to_dense(), 0.25 * raw[name])

    model, raw = _sparse_gradients()
    with our_warnings() as messages:
        left = clip_now(model, LayerClipCallback(clip_value={".*": 1e-3}, strict=True))
    torch.testing.assert_close(left.gradients["0.weight"].to_dense(), raw["0.weight"])
    torch.testing.assert_close(left.gradients["1.weight"], raw["1.weight"].clamp(-1e-3, 1e-3))
    [message] = [message for message in messages if "cuts single elements" not in message]
    assert "0.weight" in message, "what could not be cut is named"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_B068_a_bad_sparse_gradient_is_named_and_its_step_skipped() -> None:
    model, _ = _sparse_gradients()
    model[0].weight.grad._values()[0, 0] = torch.nan
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"callbacks": [LayerClipCallback()], "log": no_log}
    with our_warnings() as messages, attach(None, model=model, optimizer=optimizer, **options):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    [message] = messages
    assert message.startswith("step 0: the gradient is not finite in 0.weight (1 NaN); ")
