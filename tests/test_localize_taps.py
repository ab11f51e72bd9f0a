"""Where a gate goes: in models of many shapes, under wrappers, by name and without one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from stabilizer.gate import Gate
from stabilizer.localize.taps import clean_modules, find_tap, tapped
from tests import sharding
from tests.launcher import run_distributed
from tests.models import make_mlp, make_transformer, token_batch

LastHiddenState = collections.namedtuple("LastHiddenState", ["last_hidden_state", "attentions"])


class Causal(nn.Module):
    """Has an output embedding, as transformers' models do."""

    def __init__(self, *, name: str = "score", tied: bool = False) -> None:
        super().__init__()
        self.model = make_transformer(tied=tied)
        self.model.register_module(name, self.model.lm_head)
        del self.model.lm_head
        self.name = name

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return getattr(self.model, self.name)  # type: ignore[no-any-return]


class Base(nn.Module):
    """Has the method, but nothing to give."""

    def __init__(self, inner: nn.Module | None = None, error: type[Exception] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.error = error
        self.last = nn.Linear(2, 2)

    def get_output_embeddings(self) -> None:
        """None, or an error."""
        if self.error is not None:
            raise self.error


class Holder(nn.Module):
    """Holds models under names: a LightningModule, an adapter, a wrapper."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Forwarding(Holder):
    """Hands on attributes that it does not have, as PEFT's models do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


def test_output_embeddings_are_found_wherever_the_model_is() -> None:
    causal = Causal()
    head = causal.get_output_embeddings()
    wrapped = Forwarding(base_model=Holder(model=causal))
    nests: list[nn.Module] = [
        causal,
        Holder(net=causal),
        wrapped,
        Forwarding(base_model=causal),
        torch.compile(causal, backend="eager"),  # type: ignore[list-item]
        Holder(net=torch.compile(causal, backend="eager")),  # type: ignore[arg-type]
        checkpoint_wrapper(causal),
        Base(causal),
        Base(causal, error=NotImplementedError),
    ]
    for model in nests:
        assert find_tap(model) is head, type(model)


def test_the_outermost_of_two_that_train() -> None:
    outer, reference = Causal(), Causal()
    deep = Holder(tower=Holder(text=Causal()), decoder=outer)
    assert find_tap(deep) is outer.get_output_embeddings()
    reference.requires_grad_(False)
    both = Holder(reference=reference, policy=Holder(model=outer))
    assert find_tap(both) is outer.get_output_embeddings()
    # An adapter trains, the head does not.
    outer.get_output_embeddings().requires_grad_(False)
    assert find_tap(both) is outer.get_output_embeddings()


def test_tied_embeddings_tap_the_head_and_not_the_embedding() -> None:
    causal, gate = Causal(tied=True), Gate()
    head = find_tap(causal)
    assert head is causal.model.score
    assert head.weight is causal.model.embed_tokens.weight
    with tapped(head, gate):
        hidden = causal.model.embed_tokens(token_batch()[0])
        assert not gate.is_used
        head(hidden)
    assert gate.num_units == 24


def test_models_without_an_output_embedding() -> None:
    transformer = make_transformer()
    assert find_tap(transformer) is transformer.lm_head
    assert find_tap(Holder(net=transformer)) is transformer.lm_head
    # A head of that name that something follows is not the last word.
    transformer.add_module("value", nn.Linear(16, 1))
    assert find_tap(transformer) is None
    assert find_tap(Base(make_mlp())) is None
    classifier = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    gate, images = Gate(), torch.randn(5, 3, 8, 8)
    classifier(images)
    assert find_tap(classifier) is None
    with tapped(find_tap(classifier, "2"), gate):
        classifier(images)
    assert gate.num_units == 5
    assert gate.locate(3)[1:] == (3, None)


def wrapped_by_ddp(rank: int, world_size: int) -> list[bool]:
    """Names and output embeddings under wrappers."""
    causal = Causal()
    ddp = DistributedDataParallel(causal)
    found = [find_tap(ddp) is causal.get_output_embeddings(), find_tap(ddp, "model.score") is causal.model.score]
    net = Holder(net=DistributedDataParallel(Holder(module=make_mlp())))
    found.append(find_tap(net, "net.module.second") is net.net.module.module.second)  # type: ignore[union-attr]
    transformer = make_transformer()
    fsdp = sharding.shard_fsdp1(transformer)
    # The wrapper is what the model calls.
    found.append(find_tap(fsdp, "layers.1") is transformer.layers[1])
    found.append(isinstance(transformer.layers[1], sharding.FullyShardedDataParallel))
    found.append(find_tap(fsdp) is transformer.lm_head)
    return found


def test_wrappers_never_show_in_a_name() -> None:
    for found in run_distributed(wrapped_by_ddp):
        assert found == [True] * 6
    model = torch.compile(nn.ModuleDict({"fc": checkpoint_wrapper(nn.Linear(1, 1))}), backend="eager")
    assert list(clean_modules(model)) == ["", "fc"]  # type: ignore[arg-type]


def test_an_unknown_name_is_an_error_that_names_the_closest() -> None:
    model = make_transformer()
    assert find_tap(model, "layers.3.feed_forward.down") is model.layers[3].feed_forward.down
    with pytest.raises(ValueError, match=r"tap='lm_haed' is no module of the model; the closest is 'lm_head'"):
        find_tap(model, "lm_haed")
    with pytest.raises(ValueError, match=r"tap='\?' is no module of the model; the last one is 'lm_head'"):
        find_tap(model, "?")
    with pytest.raises(ValueError, match="tap=''"):
        find_tap(model, "")


@dataclasses.dataclass
class Output:
    """What models of transformers give."""

    loss: Tensor | None
    logits: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The same, not to be changed."""

    loss: Tensor | None
    logits: Tensor


class Giving(nn.Module):
    """Packs a linear map's output."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.linear, self.pack = nn.Linear(2, 3), pack

    def forward(self, x: Tensor) -> Any:
        """Map (..., 2) to a package of (..., 3)."""
        return self.pack(self.linear(x))


PACKED: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda y: y, lambda z: z),
    "tuple": (lambda y: (torch.arange(3), y, y * 0), lambda z: z[1]),
    "list": (lambda y: [None, y], lambda z: z[1]),
    "named tuple": (lambda y: LastHiddenState(y, None), lambda z: z.last_hidden_state),
    "dictionary": (lambda y: {"mask": torch.arange(3), "scores": y}, lambda z: z["scores"]),
    "object": (lambda y: Output(None, y), lambda z: z.logits),
    "frozen": (lambda y: Frozen(None, y), lambda z: z.logits),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("shape", "num_units"), [((4, 5, 2), 20), ((4, 2), 4), ((4, 5, 6, 2), 4)])
def test_what_a_module_gives_is_gated_in_its_package(kind: str, shape: tuple[int, ...], num_units: int) -> None:
    pack, unpack = PACKED[kind]
    model, gate = Giving(pack), Gate()
    with tapped(model, gate):
        output = model(torch.ones(shape))
    assert type(output) is type(model(torch.ones(shape)))
    assert gate.num_units == num_units
    gate.set_open(torch.zeros(num_units, dtype=torch.bool))
    unpack(output).sum().backward()
    assert not model.linear.weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_hidden_state_that_a_module_is_given(by_keyword: bool) -> None:
    first, head, gate = nn.Linear(2, 2), nn.Linear(2, 3), Gate()
    with tapped(head, gate, hidden=True):
        hidden = first(torch.ones(4, 5, 2))
        logits = head(input=hidden) if by_keyword else head(hidden)
    assert gate.num_units == 20
    gate.set_open(torch.zeros(20, dtype=torch.bool))
    logits.sum().backward()
    # The head itself is above the gate.
    assert not first.weight.grad.any()  # type: ignore[union-attr]
    assert head.weight.grad.any()  # type: ignore[union-attr]


def test_a_tap_that_is_not_called_leaves_the_gate_unused_and_no_hook_stays() -> None:
    model, gate = make_transformer(), Gate()
    with pytest.raises(KeyError), tapped(model.lm_head, gate), tapped(model.norm, gate, hidden=True):
        raise KeyError
    assert not gate.is_used
    assert not model.lm_head._forward_hooks
    assert not model.norm._forward_pre_hooks
    with tapped(None, gate):
        model(token_batch()[0])
    assert not gate.is_used
