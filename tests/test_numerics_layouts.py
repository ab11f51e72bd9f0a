"""NumericsCallback where ranks hold pieces of layers, and where a run has several optimizers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import attach
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.localize_loops import Plan, batches
from tests.numerics_runs import MICRO_BATCH, STEP, Trouble, findings_of, make_numerics, plain_findings, train
from tests.sharding import mesh_1d
from tests.test_grad_loc_tensor_parallel import LAYOUTS, loss_of_tokens, make_model
from tests.tiny_loops import no_log

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
#: Fault -> kind and verdict; losses are not told.
EXPECTED = {
    "token": ("spike", "repeats"),
    "nan_token": ("nonfinite_loss", "repeats"),
    "once": ("spike", "transient"),
    "differently": ("spike", "nondeterministic"),
}


def _quiet() -> None:
    import warnings

    warnings.simplefilter("ignore", StabilizerWarning)


class Both(Trouble):
    """The fault of a group: all of its ranks have the same data, and the same loss."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a model that is split."""
        self.num_calls += 1
        loss, fault = loss_of_tokens(model, batch), 2 * STEP + MICRO_BATCH + 1
        if self.kind == "once" and self.num_calls == fault:
            return loss * 1e4
        return loss * 1e4 * self.num_calls if self.kind == "differently" and self.num_calls >= fault else loss


def _split(rank: int, world_size: int, layout: str, kind: str, folder: str) -> Any:
    _quiet()
    trouble = Both(kind)
    torch.manual_seed(0)
    model = LAYOUTS[layout](make_model(), mesh=mesh_1d(name="tensor"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    callback = make_numerics(folder)
    handle = attach(None, model=model, optimizer=optimizer, callbacks=[callback], loss_fn=trouble.loss, log=no_log)
    with handle:
        for rows in batches(Plan(**{**trouble.plan, "steps": STEP + 1}), 0):
            for batch in rows:
                handle.record_batch(batch)
                trouble.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return plain_findings(findings_of(callback))


def check(own: Any, other: Any, kind: str, *, is_local: bool = True) -> None:
    """Both ranks say the same, of the first one of them."""
    assert own == other
    [one] = own
    assert (one["kind"], one["verdict"], one["step"]) == (*EXPECTED[kind], STEP)
    if kind == "once" and not is_local:
        assert (one["rank"], one["micro_batch"]) == (None, None)
        assert "what they were in the step is not known" in one["text"]
    else:
        assert (one["rank"], one["micro_batch"]) == (0, MICRO_BATCH)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(layout, kind) for layout in ("tp", "sequence") for kind in EXPECTED],
)
@pytest.mark.slow
@pytest.mark.covers(feature="broken steps told apart", strategy="tp", host="plain")
def test_ranks_of_a_tensor_parallel_group_judge_together(layout: str, kind: str, tmp_path: Path) -> None:
    """Under sequence parallelism no rank's own norms are known while training."""
    own, other = run_distributed(_split, layout, kind, str(tmp_path), timeout=90)
    check(own, other, kind, is_local=layout == "tp")


def _sharded(rank: int, world_size: int, strategy: str, kind: str, folder: str) -> Any:
    _quiet()
    findings, _ = train(folder, Trouble(kind, rank=rank, owner=0), strategy=strategy)
    return plain_findings(findings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.covers(feature="broken steps told apart", strategy="fsdp1", host="plain")
def test_the_same_under_fsdp1(kind: str, tmp_path: Path) -> None:
    check(*run_distributed(_sharded, "fsdp1", kind, str(tmp_path), timeout=90), kind)


class Two(nn.Module):
    """Two maps with an optimizer each; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        """The loss of both."""
        loss: Tensor = self.first(x).square().mean() + factor * self.second(x).square().mean()
        return loss


@pytest.mark.covers(feature="broken steps told apart", strategy="single", host="plain")
def test_each_optimizer_has_its_own_findings(tmp_path: Path) -> None:
    """The second one's layers alone are spoilt."""
    torch.manual_seed(0)
    model, callback = Two(), make_numerics(tmp_path)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.first, model.second)]
    handle = attach(None, model=model, optimizer=optimizers, callbacks=[callback], log=no_log)
    generator = torch.Generator().manual_seed(0)
    with handle:
        for step in range(4):
            model(torch.randn(5, 3, generator=generator), math.nan if step == 3 else 1.0).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    found = {one.optimizer_index: one for one in findings_of(callback)}
    assert set(found) == {1}
    assert (found[1].step, found[1].layer) == (3, "second")
    # The first one has moved since the forward: the step cannot be run again as it was.
    assert found[1].verdict == "unknown"
    assert "another optimizer has moved" in found[1].text
