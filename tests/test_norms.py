"""Norms of single tensors: precision, dtypes, layouts, and values at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stabilizer.norms import count_nonfinite, largest, norms, square_sums
from stabilizer.segments import Segments

pytestmark = pytest.mark.norms
CPU = torch.device("cpu")


def _exact(tensor: Tensor) -> float:
    return tensor.double().square().sum().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [1, 2047, 2048, 2049, 70_000, 9_000_001])
def test_long_sums_are_precise(numel: int, dtype: torch.dtype) -> None:
    # Equal elements are the worst case: every rounding of a running sum goes the same way.
    tensor = torch.full((numel,), 0.0123, dtype=dtype)
    assert norms([tensor], device=CPU).item() == pytest.approx(_exact(tensor), rel=3e-6)


def test_torch_s_own_norm_would_not_be() -> None:
    """The reason for our own sum; when this fails, torch has become precise and `norms._shortened` can go."""
    tensor = torch.full((38_000_000,), 0.0123)
    assert abs(torch._foreach_norm([tensor])[0].item() / _exact(tensor) - 1) > 1e-3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 5).t(),
        torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
        torch.randn(10, 10)[::2, 1::3],
        torch.randn(()),
        torch.randn(3, 1).expand(3, 4),
    ],
    ids=["transposed", "channels last", "strided", "scalar", "expanded"],
)
def test_layouts(tensor: Tensor) -> None:
    assert norms([tensor], device=CPU).item() == pytest.approx(_exact(tensor), rel=1e-6)
    assert largest([tensor], device=CPU).item() == tensor.abs().max().item()


def test_absent_and_empty_tensors_are_neutral() -> None:
    tensors = [None, torch.empty(0), torch.empty(0, 8), torch.tensor([-2.0])]
    for function in (norms, largest):
        assert function(tensors, device=CPU).tolist() == [0, 0, 0, 2]
    assert count_nonfinite(tensors, device=CPU).tolist() == [0, 0, 0, 0]
    assert norms([], device=CPU).shape == largest([], device=CPU).shape == (0,)


def test_sparse_rows_count_with_their_sum() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1, 2]]), torch.tensor([[3.0], [1.0], [3.0]]), (4, 1))
    assert norms([tensor], device=CPU).item() == 5
    assert largest([tensor], device=CPU).item() == 4


def test_dtypes_may_differ() -> None:
    tensors = [torch.tensor([3.0], dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    result = norms(tensors, device=CPU)
    assert result.dtype == torch.float32
    assert result.tolist() == [3, 3, 3]


def test_half_precision_does_not_overflow() -> None:
    tensor = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert norms([tensor], device=CPU).item() == pytest.approx(60000 * math.sqrt(1000), rel=1e-6)


def test_non_finite_elements_are_seen_by_all_functions() -> None:
    tensors = [torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, -torch.inf]), torch.tensor([1.0])]
    assert torch.isfinite(norms(tensors, device=CPU)).tolist() == [False, False, True]
    assert largest(tensors, device=CPU).tolist() == [math.inf, math.inf, 1]
    assert count_nonfinite(tensors, device=CPU).tolist() == [1, 2, 0]


def test_wide_sums_hold_every_finite_gradient() -> None:
    tensor = torch.full((4,), 3e38)
    assert norms([tensor], device=CPU).isinf().all()
    assert square_sums([tensor], device=CPU).sqrt().item() == pytest.approx(6e38)


def test_segments_keep_nan_apart_and_add_in_order() -> None:
    segments = Segments([2, 0, 2, 0], num_segments=4, device=CPU)
    values = torch.tensor([1.0, torch.nan, 2.0, 3.0])
    assert segments.sum(values).nan_to_num(-1).tolist() == [-1, 0, 3, 0]
    assert segments.max(torch.tensor([1.0, 5.0, 2.0, 3.0])).tolist() == [5, 0, 2, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_measuring_changes_no_bit_when_a_norm_is_not_finite(value: float) -> None:
    from stabilizer import GradientStore, ParameterIndex

    parameters = [torch.nn.Parameter(torch.zeros(3000)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.randn(3000)
    parameters[1].grad[7:9] = value
    before = [parameter.grad.clone().view(torch.int32) for parameter in parameters]
    store = GradientStore(ParameterIndex(parameters), norm_types=(2, "inf"), max_abs_every_n_steps=1)
    store.measure(step=0)
    assert not torch.isfinite(store.view("block").norms).all() or value == 3e38
    assert all(torch.equal(b, p.grad.view(torch.int32)) for b, p in zip(before, parameters, strict=True))
