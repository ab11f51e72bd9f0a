"""The running noise scale: against its definition, what may enter, kept and restored, and on other devices."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.noise import Estimate, NoiseScale, NoiseScaleReading
from tests.counting import count_collectives, fake_cuda
from tests.reference_noise import ratio_and_error

YES, NO = torch.tensor(True), torch.tensor(False)
NAN, INF = math.nan, math.inf


def _estimate(grad_sq: Any, trace: Any) -> Estimate:
    return Estimate(torch.as_tensor(grad_sq, dtype=torch.float64), torch.as_tensor(trace, dtype=torch.float64))


def _noisy(steps: int, *, seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """Estimates whose true values are 1 and 50, correlated as those of a step are."""
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, steps, generator=generator, dtype=torch.float64)
    return 1 + spread * one, 50 - 4 * one + 3 * other


def _fed(estimates: tuple[Tensor, Tensor], **options: Any) -> NoiseScale:
    running = NoiseScale(**{"device": "cpu", "shape": estimates[0].shape[1:]} | options)
    for grad_sq, trace in zip(*estimates, strict=True):
        running.update(Estimate(grad_sq, trace), valid=YES)
    return running


def _bits(running: NoiseScale) -> list[Any]:
    """State and reading, as text since NaN differs from itself."""
    tensors = [*running.state_dict().values(), *running.compute()]
    return [(tensor.dtype, repr(tensor.tolist())) for tensor in tensors]


# Against the definition.


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 1 - 1e-12])
def test_ratio_and_error_at_every_step(decay: float) -> None:
    grad_sq, trace = _noisy(300)
    running = NoiseScale(decay=decay, device="cpu")
    for step in range(300):
        running.update(Estimate(grad_sq[step], trace[step]), valid=YES)
        reading = running.compute()
        assert reading.num_steps == step + 1
        if step == 0:
            assert reading.noise_scale.item() == pytest.approx((trace[0] / grad_sq[0]).item(), rel=1e-12)
            assert reading.stderr.isnan()
            continue
        x, y = grad_sq[: step + 1].numpy(), trace[: step + 1].numpy()
        expected = ratio_and_error(x, y, decay=decay)
        if step > 20:
            assert (reading.noise_scale.item(), reading.stderr.item()) == pytest.approx(expected, rel=1e-9)


def test_the_error_does_not_lose_digits_to_a_large_mean() -> None:
    grad_sq, trace = _noisy(300, spread=1e-7)
    found = _fed((grad_sq, 50 * grad_sq + 1e-7 * trace), decay=0.9).compute()
    x = grad_sq.numpy()
    expected = ratio_and_error(x, 50 * x + 1e-7 * trace.numpy(), decay=0.9)
    assert found.stderr.item() == pytest.approx(expected[1], rel=1e-4)


def test_layers_do_not_know_of_each_other() -> None:
    pairs = [_noisy(200, seed=seed, spread=spread) for seed, spread in ((1, 0.1), (2, 0.5), (3, 9.0))]
    together = _fed((torch.stack([p[0] for p in pairs], 1), torch.stack([p[1] for p in pairs], 1))).compute()
    for index, pair in enumerate(pairs):
        for value, expected in zip(together, _fed(pair).compute(), strict=True):
            torch.testing.assert_close(value[index], expected, rtol=0, atol=0, equal_nan=True)
    assert together.reliable.tolist() == [True, True, False]


# What may enter.


@pytest.mark.parametrize(
    "bad", [(NAN, 50.0), (1.0, NAN), (INF, 50.0), (1.0, -INF), (NAN, NAN), (1e200, 50.0), (1.0, 1e300)], ids=repr
)
def test_what_is_not_finite_leaves_the_state_as_it_was(bad: tuple[float, float]) -> None:
    running = _fed(_noisy(150))
    before = _bits(running)
    assert running.compute().reliable
    running.update(_estimate(*bad), valid=YES)
    assert _bits(running) == before
    # From the start too.
    fresh = NoiseScale(device="cpu")
    before = _bits(fresh)
    fresh.update(_estimate(*bad), valid=YES)
    assert _bits(fresh)[:2] == before[:2] or bad[0] == 1e200 or bad[1] == 1e300
    assert all(value.isfinite().all() for value in fresh.state_dict().values())


def test_a_step_that_is_not_valid_leaves_the_state_as_it_was() -> None:
    running = _fed(_noisy(150))
    before = _bits(running)
    running.update(_estimate(1.0, 50.0), valid=NO)
    assert _bits(running) == before
    running.update(_estimate(1.0, 50.0), valid=YES)
    assert _bits(running) != before


def test_one_layer_that_is_not_finite_does_not_hold_up_the_others() -> None:
    grad_sq, trace = (value.unsqueeze(1).expand(-1, 2).clone() for value in _noisy(150))
    grad_sq[70, 0] = NAN
    mixed = _fed((grad_sq, trace)).compute()
    assert mixed.num_steps.tolist() == [149, 150]
    left_out = [torch.cat([value[:70, 0], value[71:, 0]]) for value in (grad_sq, trace)]
    assert mixed.noise_scale[0] == _fed((left_out[0], left_out[1])).compute().noise_scale
    assert mixed.noise_scale[1] == _fed(_noisy(150)).compute().noise_scale
    running = _fed((grad_sq, trace))
    running.update(_estimate([1.0, 1.0], [1.0, 1.0]), valid=torch.tensor([True, False]))
    assert running.compute().num_steps.tolist() == [150, 150]


# Whether to believe it.


def test_before_the_first_step_there_is_nothing() -> None:
    reading = NoiseScale(shape=(2,), device="cpu").compute()
    assert isinstance(reading, NoiseScaleReading)
    for value in reading[:4]:
        assert value.isnan().all()
    assert reading.reliable.tolist() == [False, False]
    assert reading.num_steps.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("grad_sq", "trace", "is_number"), [(-1.0, 50.0, False), (1.0, -1.0, False), (-1.0, -50.0, False), (1.0, 0.0, True)]
)
def test_a_noise_scale_below_zero_is_none(grad_sq: float, trace: float, is_number: bool) -> None:
    x, _ = _noisy(150, spread=0.01)
    reading = _fed((grad_sq * x, torch.full_like(x, trace))).compute()
    assert reading.noise_scale.isfinite() == is_number
    assert reading.stderr.isfinite() == is_number
    assert reading.reliable == is_number
    # What it was made of is said as it is.
    assert (reading.grad_sq.item(), reading.trace.item()) == pytest.approx((grad_sq, trace), rel=0.01)


@pytest.mark.parametrize("min_samples", [2, 50, 100, 400])
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999])
def test_a_clear_case_is_reliable_soon_after_min_samples(min_samples: int, decay: float) -> None:
    grad_sq, trace = _noisy(1500, spread=0.05)
    running = NoiseScale(decay=decay, min_samples=min_samples, device="cpu")
    flags = []
    for step in range(600):
        running.update(Estimate(grad_sq[step], trace[step]), valid=YES)
        flags.append(running.compute().reliable.item())
    first = flags.index(True) + 1
    # Short averages need their 1 / (1 - decay) steps only if they are hardly clear.
    expected = min_samples if min_samples >= 50 else min(round(1 / (1 - decay)), 100)
    assert min_samples < first <= max(expected, min_samples) + 10
    assert all(flags[first:])


def test_hardly_clear_needs_a_whole_memory_of_steps() -> None:
    # Deviations that alternate: the denominator is at 3 of its errors all the time, then at 6.
    for errors, expected in ((3.0, 1000), (6.0, 100)):
        spread = math.sqrt(1999) / errors
        running, flags = NoiseScale(decay=0.999, device="cpu"), []
        moments = running.state_dict()
        # As after a long time: sums of weights, means of 1 and 50, and the variance that belongs to the errors.
        weights = [1 / (1 - 0.999), 1 / (1 - 0.999**2)]
        moments["moments"] = torch.tensor([*weights, 1, 50, spread**2 * weights[0], 0, 0, 0], dtype=torch.float64)
        running.load_state_dict(moments)
        for step in range(1200):
            running.update(_estimate(1 + spread * (-1) ** step, 50.0), valid=YES)
            flags.append(running.compute().reliable.item())
        assert abs(flags.index(True) + 1 - expected) <= 1


def test_a_single_huge_step_makes_the_reading_unreliable_until_it_is_forgotten() -> None:
    grad_sq, trace = _noisy(3500, spread=0.05)
    grad_sq[1000], trace[1000] = 1e6, 3e6
    flags, running = [], NoiseScale(device="cpu")
    for step in range(3500):
        running.update(Estimate(grad_sq[step], trace[step]), valid=YES)
        flags.append(running.compute().reliable.item())
    assert all(flags[200:1000])
    # The error, of which 1e6 sqrt(0.01 exp(-t / 100) / 199) is left after t steps, fades later than the mean.
    assert not any(flags[1000:2500])
    assert all(flags[3200:])
    final = running.compute()
    assert abs(final.noise_scale - 50) < 4 * final.stderr


# Kept, restored, and elsewhere.


def test_resumed_from_a_file_it_is_the_same_bit_for_bit() -> None:
    grad_sq, trace = (torch.stack([a, b], 1) for a, b in zip(_noisy(400), _noisy(400, seed=1, spread=3.0), strict=True))
    whole = _fed((grad_sq, trace))
    first = _fed((grad_sq[:170], trace[:170]))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kept = {name: value.clone() for name, value in state.items()}
    second = NoiseScale(shape=(2,), device="cpu")
    second.load_state_dict(state)
    assert _bits(second) == _bits(first)
    for step in range(170, 400):
        second.update(Estimate(grad_sq[step], trace[step]), valid=YES)
    assert _bits(second) == _bits(whole)
    for name, value in state.items():
        assert torch.equal(value, kept[name])


def test_a_state_is_a_copy() -> None:
    running = _fed(_noisy(150))
    before = _bits(running)
    state, reading = running.state_dict(), running.compute()
    kept = [value.clone() for value in reading]
    for value in state.values():
        value.fill_(7)
    assert _bits(running) == before
    running.update(_estimate(3.0, 1.0), valid=YES)
    assert all(torch.equal(value, copy) for value, copy in zip(reading, kept, strict=True))


@pytest.mark.parametrize("change", ["shape", "missing", "extra"])
def test_a_state_that_does_not_fit_is_refused_as_a_whole(change: str) -> None:
    state = _fed(_noisy(50)).state_dict()
    if change == "shape":
        state["num_steps"] = torch.zeros(3)
    elif change == "missing":
        del state["num_steps"]
    else:
        state["other"] = torch.zeros(())
    running = _fed(_noisy(20))
    before = _bits(running)
    with pytest.raises(ValueError, match="noise scale: the saved state has"):
        running.load_state_dict(state)
    assert _bits(running) == before


def test_works_in_inference_mode_and_out_of_it_again() -> None:
    grad_sq, trace = _noisy(150)
    expected = _bits(_fed((grad_sq, trace)))
    with torch.inference_mode():
        running = NoiseScale(device="cpu")
        for step in range(75):
            running.update(Estimate(grad_sq[step], trace[step]), valid=YES)
    for step in range(75, 150):
        running.update(Estimate(grad_sq[step].clone().requires_grad_(), trace[step]), valid=YES)
    assert not running.compute().noise_scale.requires_grad
    assert _bits(running) == expected


def test_the_host_does_not_wait() -> None:
    with fake_cuda(), count_collectives() as collectives:
        valid, values = torch.ones((), dtype=torch.bool, device="cuda"), torch.ones(3, device="cuda")
        running = NoiseScale(shape=(3,), device=torch.device("cuda", 0))
        for _ in range(2):
            running.update(Estimate(values, values), valid=valid)
            assert {value.device.type for value in running.compute()} == {"cuda"}
    assert len(collectives) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "decay=1.0: expected a number above 0 and below 1"),
        ({"decay": 0}, "decay=0: "),
        ({"min_samples": 1}, "min_samples=1: expected a whole number of at least 2"),
        ({"min_samples": 10.0}, "min_samples=10.0: "),
        ({"reliable_z": 1.0}, "reliable_z=1.0: expected a number at least 1.5"),
        ({"reliable_z": NAN}, "reliable_z=nan: "),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseScale(device="cpu", **options)


def test_an_estimate_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the estimate has shape \(2,\): expected \(3,\)"):
        NoiseScale(shape=(3,), device="cpu").update(_estimate([1.0, 1.0], [1.0, 1.0]), valid=YES)
