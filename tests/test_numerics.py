"""NumericsCallback in one process: each verdict, what is told, and a run that nothing was done to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, NumericsCallback, attach
from stabilizer.errors import StabilizerWarning
from stabilizer.numerics.report import NumericsReport
from tests.localize_loops import Fault, Plan, run
from tests.numerics_runs import MICRO_BATCH, STEP, Trouble, findings_of, make_numerics, train, weights
from tests.stateful import differences
from tests.test_grad_loc_identity import FAULTS, PLAN
from tests.test_grad_loc_identity import train as train_lively
from tests.tiny_loops import no_log

pytestmark = [
    pytest.mark.covers(feature="broken steps told apart", strategy="single", host="plain"),
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
]
#: Kind, verdict, layer, micro-batch of what each fault leads to.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "token": ("spike", "repeats", "lm_head", MICRO_BATCH),
    "nan_token": ("nonfinite_loss", "repeats", "lm_head", MICRO_BATCH),
    "once": ("spike", "transient", "lm_head", MICRO_BATCH),
    "nan_once": ("nonfinite_gradient", "transient", "lm_head", MICRO_BATCH),
    "differently": ("spike", "nondeterministic", "lm_head", MICRO_BATCH),
    "reduction": ("nonfinite_gradient", "transient", "layers.0", None),
    "nan_weight": ("nonfinite_parameter", None, "layers.0", None),
    "flipped_weight": ("corrupt_parameter", None, "layers.0", None),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_verdict_on_each_fault(kind: str, tmp_path: Path) -> None:
    [finding], _ = train(tmp_path, Trouble(kind))
    found = (finding.kind, finding.verdict, finding.layer, finding.micro_batch)
    assert (finding.step, finding.rank) == (STEP, 0)
    assert found == EXPECTED[kind]
    assert finding.host
    assert finding.remedy
    text = (tmp_path / f"step_{STEP}/report.json").read_text()
    report = NumericsReport.from_json(text)
    assert (report.kind, report.verdict, report.text) == (finding.kind, finding.verdict, finding.text)
    assert [row.rank for row in report.ranks] == [0]


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    assert train(tmp_path, Trouble("healthy"))[0] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["healthy", "token", "once", "reduction", "flipped_weight"])
def test_the_weights_are_those_of_a_run_without_it(kind: str, tmp_path: Path) -> None:
    found, model = train(tmp_path, Trouble(kind))
    _, plain = train(tmp_path, Trouble(kind), callbacks=False)
    assert bool(found) == (kind != "healthy")
    expected = weights(plain)
    assert all(torch.equal(value.nan_to_num(), expected[name].nan_to_num()) for name, value in weights(model).items())


@pytest.mark.parametrize("recomputes", [None, "reentrant", "not reentrant"])
def test_no_trace_is_left_of_what_is_run_again(recomputes: str | None, tmp_path: Path) -> None:
    """Random numbers of all kinds, buffers, metrics and memories of the model's own."""
    without = train_lively(PLAN, [], recomputes=recomputes)
    callback = make_numerics(tmp_path, trigger_ratio=3.0, warmup_steps=10, cooldown_steps=0)
    found = train_lively(PLAN, [callback], recomputes=recomputes)
    assert [(one.step, one.verdict) for one in findings_of(callback)] == [(fault.step, "repeats") for fault in FAULTS]
    assert differences(found, without) == []


def test_grad_loc_is_asked_for_the_token_of_what_repeats(tmp_path: Path) -> None:
    [finding], _ = train(tmp_path, Trouble("token"), with_grad_loc=True)
    token = f"token at rank 0, micro-batch {MICRO_BATCH}, row 1, position 3"
    assert finding.verdict == "repeats"
    assert token in finding.text
    report = json.loads((tmp_path / f"step_{STEP}/report.json").read_text())
    assert token in report["grad_loc"]
    assert (Path(report["grad_loc_folder"]) / "incident.json").exists()
    assert "GradLocCallback beside" not in finding.remedy


def test_grad_loc_is_not_asked_about_the_machine(tmp_path: Path) -> None:
    [finding], _ = train(tmp_path, Trouble("once"), with_grad_loc=True)
    assert finding.verdict == "transient"
    assert "GradLoc" not in finding.text
    assert not (tmp_path / "grad_loc").exists()
    assert "ECC" in finding.remedy
    assert finding.host is not None
    assert finding.host in finding.remedy


def test_evidence_has_the_norms_of_the_step_and_of_its_replays(tmp_path: Path) -> None:
    [finding], _ = train(tmp_path, Trouble("once"), max_replays=2)
    evidence = finding.evidence
    assert evidence["num_replays"] == 2
    assert evidence["local_norm"] == pytest.approx(1e4 * evidence["replayed_norm"], rel=1e-4)
    assert evidence["ratio"] == pytest.approx(evidence["norm"] / evidence["threshold"], rel=1e-5)
    report = NumericsReport.from_json((tmp_path / f"step_{STEP}/report.json").read_text())
    assert report.ranks[0].step_norm == pytest.approx(evidence["local_norm"])
    assert report.ranks[0].replay_norms == (evidence["replayed_norm"],) * 2


def test_a_difference_of_two_percent_is_one_and_of_half_a_percent_none(tmp_path: Path) -> None:
    for factor, verdict in ((1.02, "nondeterministic"), (1.005, "repeats")):

        class Unsteady(Trouble):
            def loss(self, model: nn.Module, batch: Any) -> Tensor:
                loss = super().loss(model, batch)
                return loss * factor if self.num_calls > 2 * (STEP + 1) else loss  # noqa: B023

        [finding], _ = train(tmp_path / verdict, Unsteady("token"))
        assert finding.verdict == verdict


def faulty(folder: Path, faults: tuple[Fault, ...], *, steps: int, **options: Any) -> NumericsCallback:
    callback = make_numerics(folder, **options)
    run(Plan(steps=steps, faults=faults, micro_batches=2), [callback])
    return callback


def test_the_same_kind_of_trouble_rests_and_other_kinds_do_not(tmp_path: Path) -> None:
    spike, nan = (lambda step: Fault(step, ((0, 0, 1, 3),))), (lambda step: Fault(step, ((0, 0, 1, 3),), math.nan))
    callback = make_numerics(tmp_path, cooldown_steps=4)
    clip = AdaptiveClipThreshold(on_nonfinite="skip_step")
    plan = Plan(steps=24, faults=(spike(13), spike(15), nan(16), nan(18), spike(19)), micro_batches=2)
    run(plan, [callback, clip])
    assert [(one.step, one.kind) for one in findings_of(callback)] == [
        (13, "spike"),
        (16, "nonfinite_loss"),
        (19, "spike"),
    ]


def test_after_so_many_incidents_nothing_is_looked_into(tmp_path: Path) -> None:
    faults = tuple(Fault(step, ((0, 0, 1, 3),)) for step in (13, 15, 17))
    with pytest.warns(StabilizerWarning, match="2 incidents in this run"):
        callback = faulty(tmp_path, faults, steps=20, cooldown_steps=0, max_incidents=2)
    assert [one.step for one in findings_of(callback)] == [13, 15]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_run_again_is_unknown_with_the_reason(tmp_path: Path) -> None:
    """The model returns no loss, and the loop has told none."""
    torch.manual_seed(0)
    model, callback = nn.Linear(3, 2), make_numerics(tmp_path, max_incidents=2)
    optimizer, clip = torch.optim.SGD(model.parameters(), lr=0.01), AdaptiveClipThreshold(on_nonfinite="skip_step")
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback, clip], log=no_log):
        for step in range(30):
            loss = model(torch.ones(4, 3)).square().mean()
            (loss * math.nan if step >= 3 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Tried again sooner than after a cooldown.
    assert [(one.step, one.kind, one.verdict) for one in findings_of(callback)] == [
        (3, "nonfinite_gradient", "unknown"),
        (14, "nonfinite_gradient", "unknown"),
    ]
    assert "loss_fn" in callback.findings[0].text


def test_a_parameter_that_no_gradient_shows_is_found_at_the_interval(tmp_path: Path) -> None:
    """A row of the embedding that is never looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = make_numerics(tmp_path, check_parameters_every_n_steps=4)
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
        for step in range(12):
            model(torch.tensor([[0, 1, 2]])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5:
                with torch.no_grad():
                    model[0].weight[7, 1] = math.inf
    [finding] = findings_of(callback)
    assert (finding.kind, finding.step, finding.layer) == ("nonfinite_parameter", 10, "0")
    assert finding.evidence["num_inf"] == 1
    assert "0.weight" in finding.text


def test_a_buffer_that_is_not_finite_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Linear(4, 2)).train()
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = make_numerics(tmp_path, check_parameters_every_n_steps=None)
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], loss_fn=loss_fn, log=no_log):
        for step in range(4):
            if step == 3:
                model[1].running_mean[2] = math.nan  # type: ignore[index,operator,union-attr]
            loss_fn(model, torch.randn(5, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
    [finding] = findings_of(callback)
    assert (finding.kind, finding.step) == ("nonfinite_parameter", 3)
    assert "1.running_mean" in finding.text


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(StabilizerWarning, match="could not be written"):
        [finding], _ = train(tmp_path / "file" / "below", Trouble("token"))
    assert finding.verdict == "repeats"


def test_a_replay_that_fails_is_said_and_training_goes_on(tmp_path: Path) -> None:
    class Failing(Trouble):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            loss = super().loss(model, batch)
            if self.num_calls == 2 * (STEP + 1) + 1:
                raise RuntimeError("only in the replay")
            return loss

    [finding], model = train(tmp_path, Failing("token"))
    assert (finding.verdict, finding.kind) == ("unknown", "spike")
    assert "only in the replay" in finding.text
    _, plain = train(tmp_path, Trouble("token"), callbacks=False)
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(model).items())


def test_findings_go_round_in_a_checkpoint(tmp_path: Path) -> None:
    callback = faulty(tmp_path, (Fault(13, ((0, 0, 1, 3),)),), steps=15)
    torch.save(callback.state_dict(), tmp_path / "state.pt")
    other = make_numerics(tmp_path)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.findings == callback.findings
    assert len(findings_of(other)) == 1


def test_a_short_warm_up_is_that_of_its_own_rule_too(tmp_path: Path) -> None:
    [finding], _ = train(tmp_path, Trouble("token"), rule=None)
    assert (finding.kind, finding.step) == ("spike", STEP)


def test_the_optimizer_s_health_takes_part_and_has_its_charts() -> None:
    callback, model = NumericsCallback(every_n_steps=1, name="own"), nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: list[tuple[dict[str, float], int]] = []
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for _ in range(2):  # at the first step only who has joined the run has seen the first micro-batch
            model(torch.ones(1, 2).bfloat16()).sum().backward()
        optimizer.step()
    assert any(tag.startswith("own/optimizer/swallowed_gradients") for values, _ in rows for tag in values)
    assert any("optimizer/update_ratio" in line for chart in callback.charts() for line in chart.lines)
