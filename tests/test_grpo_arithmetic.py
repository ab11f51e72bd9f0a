"""The example of GRPO with faults: each kind is found and typed, its clip repairs it, and what the long runs wrote."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.examples.arithmetic import make_prompts, make_tokenizer, score
from stabilizer.examples.grpo_arithmetic import CLIPS, Setting, main, train
from stabilizer.examples.grpo_faults import KINDS, Faults, Kind, StoredInput, clip_advantages, log_probs
from stabilizer.examples.grpo_report import ARMS, REPAIRS, Run, collapsed_at
from stabilizer.rollout import SeqClip, TokenClip
from tests.event_files import read_run
from tests.grpo_runs import make_grpo

RESULT = Path(__file__).parent / "data" / "grpo_arithmetic.json"
DOCS = Path(__file__).parents[1] / "docs" / "guides" / "grpo_arithmetic.md"
#: Thresholds after 8 steps, three faults at the end.
SMALL = Setting(steps=21, batch_size=16, warmup_steps=8, interval=1, max_probes=12)
FIRST = 18
_STAGES = ("none", "TokenClip", "TokenClip, SeqClip", "all three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def bare(folder: Path) -> dict[str, Run]:
    """A short run with faults of each kind and nothing to repair them."""
    return {kind: train(kinds=[kind], setting=SMALL, folder=folder / "bare" / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def repaired(folder: Path) -> dict[str, Run]:
    """The same with the clip that is made for each."""
    return {
        kind: train(
            [REPAIRS[kind]], kinds=[kind], setting=SMALL, folder=folder / kind, tensorboard=REPAIRS[kind] == "LayerClip"
        )
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_found_and_typed(bare: dict[str, Run], kind: Kind) -> None:
    run = bare[kind]
    planted = {step: (row, position) for step, _, row, position in run.planted}
    assert list(planted) == [FIRST, FIRST + 1, FIRST + 2]
    incidents = {incident.step: incident for incident in run.incidents}
    assert {incident.type for step, incident in incidents.items() if step in planted} == {KINDS[kind]}
    # What is sampled differs between processors: after eight steps of warm-up one of three may stay under the limit.
    found = sorted(set(planted) & set(incidents))
    assert len(found) >= 2
    first = incidents[found[0]]
    row, position = planted[found[0]]
    assert first.reproducible
    assert {token.row for token in first.tokens} == {row}
    if position is not None:
        assert max(first.tokens, key=lambda token: token.share or 0.0).position == position
    if kind == "sequence_ratio":
        assert all(token.log_ratio is not None and token.log_ratio < 11.51 for token in first.tokens)


@pytest.mark.parametrize("kind", ["token_ratio", "sequence_ratio"])
def test_a_clip_of_ratios_leaves_no_spike_and_healthy_steps_alone(
    bare: dict[str, Run], repaired: dict[str, Run], kind: Kind
) -> None:
    before, after = bare[kind], repaired[kind]
    assert not [incident for incident in after.incidents if incident.type in ("A.1", "A.2")]
    assert FIRST not in {incident.step for incident in after.incidents}
    # Same faults, and the same samples until the first of them.
    assert [step for step, *_ in after.planted] == [step for step, *_ in before.planted]
    assert after.planted[0] == before.planted[0]
    num = FIRST // 4 + 1
    assert after.rewards[:num] == before.rewards[:num]
    assert after.rewards != before.rewards


def test_a_clip_of_layers_clips_the_faulty_block(repaired: dict[str, Run], folder: Path) -> None:
    run = repaired["layer"]
    [incident] = [incident for incident in run.incidents if incident.step == FIRST]
    assert incident.type == "B"
    worst = max(incident.layers, key=lambda layer: layer.ratio or 0.0).name
    [events] = (folder / "layer").rglob("events.out.tfevents.*")
    scalars = read_run(events.parent).scalars
    assert [rate > 0 for rate in scalars[f"clip/layer_rate/{worst}"].values()][-1]
    assert not any(scalars["clip/layer_rate/lm_head"].values())
    assert {"train/reward", "gradloc/incidents"} <= scalars.keys()


def test_the_loss_of_trl_takes_advantages_by_token(tmp_path: Path) -> None:
    """The gradient of a dropped token is exactly 0, and those of all others are what they were."""
    seen: dict[str, Any] = {}

    def look(trainer: Any, batch: dict[str, Tensor]) -> None:
        if trainer._step == 0:
            # What samples and what trains are one policy so far.
            seen["log_probs"] = log_probs(trainer.model, batch), batch["old_per_token_logps"].clone()
            seen["mask"] = batch["completion_mask"].bool()
        if trainer._step == 1:
            row = int(batch["advantages"].argmin())
            batch["completion_mask"][row, :4] = 1
            batch["old_per_token_logps"][row, 2] = -20.0
            whole = _by_token(trainer, batch)
            current = log_probs(trainer.model, batch)
            clips = [TokenClip(mode="mis", bounds=(None, 1e5))]
            batch["advantages"] = clip_advantages(batch, current, clips=clips)
            seen["gradients"] = whole, _by_token(trainer, batch), (row, 2)

    trainer = make_grpo("single", tmp_path, inject=look, num_iterations=2, max_steps=2, max_grad_norm=0.0)
    trainer.train()
    ours, theirs = seen["log_probs"]
    torch.testing.assert_close(ours[seen["mask"]], theirs[seen["mask"]], rtol=1e-4, atol=1e-5)
    whole, part, place = seen["gradients"]
    assert whole[place].abs() > 1e3
    assert part[place] == 0
    whole[place] = 0
    assert torch.equal(whole, part)
    assert (part != 0).sum() > 10


def _by_token(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    """Gradient of TRL's loss by the log-probs."""
    kept, original = [], trainer._get_per_token_logps_and_entropies

    def keeping(*args: Any, **kwargs: Any) -> Any:
        kept.append(original(*args, **kwargs))
        return kept[-1]

    trainer._get_per_token_logps_and_entropies = keeping
    loss = trainer.compute_loss(trainer.model, batch)
    trainer._get_per_token_logps_and_entropies = original
    (gradient,) = torch.autograd.grad(loss, kept[0][0])
    found: Tensor = gradient
    return found


def test_clips_combine_and_leave_the_sign() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    old = -torch.ones(3, 3)
    current = old + torch.tensor([[0.1, 12.0, 0.1], [6.0, 5.8, 90.0], [11.0, 0.0, -0.1]])
    batch = {"advantages": torch.tensor([-1.0, 2.0, -0.5]), "completion_mask": mask, "old_per_token_logps": old}
    token, sequence = CLIPS["TokenClip"], CLIPS["SeqClip"]
    assert isinstance(sequence, SeqClip)
    alone = clip_advantages(batch, current, clips=[token])
    assert alone.tolist() == [[-1, 0, -1], [2, 2, 0], [-0.5, -0.5, -0.5]]
    # Without the token that is dropped already, the first sequence is fine.
    assert clip_advantages(batch, current, clips=[token, sequence]).tolist() == [[-1, 0, -1], [0] * 3, [-0.5] * 3]
    assert clip_advantages(batch, current, clips=[sequence]).tolist() == [[0] * 3, [0] * 3, [-0.5] * 3]


def test_a_wrong_scale_changes_one_tokens_part_of_one_weight() -> None:
    linear = nn.Linear(6, 4).double()
    faulty = StoredInput(6, 4).double()
    faulty.load_state_dict(linear.state_dict())
    faulty.place = (1, 2)
    sent = torch.randn(2, 5, 4, dtype=torch.float64)
    inputs = [torch.randn(2, 5, 6, dtype=torch.float64).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    outputs = [module(hidden) for module, hidden in zip((linear, faulty), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(sent)
    assert inputs[0].grad is not None
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(faulty.bias.grad, linear.bias.grad)
    extra = (2.0**16 - 1) * torch.outer(sent[1, 2], inputs[0][1, 2].detach())
    assert linear.weight.grad is not None
    torch.testing.assert_close(faulty.weight.grad, linear.weight.grad + extra)


def test_faults_come_at_their_rate_and_again_with_the_same_seed() -> None:
    faults = Faults(list(KINDS), interval=10, seed=3)
    kinds = [faults.at(step) for step in range(2060)]
    assert set(kinds[:60]) == {None}
    counts = {kind: kinds.count(kind) for kind in KINDS}
    assert 160 < sum(counts.values()) < 240
    assert min(counts.values()) > 40
    assert kinds == [Faults(list(KINDS), interval=10, seed=3).at(step) for step in range(2060)]
    assert kinds != [Faults(list(KINDS), interval=10, seed=4).at(step) for step in range(2060)]


def test_right_answers_have_the_whole_reward() -> None:
    tokenizer = make_tokenizer()
    for row in make_prompts(20):
        step, _, start = row["prompt"].split()
        right = " ".join(str((int(start) + place * int(step)) % 10) for place in range(1, 9))
        assert score(row["prompt"], right) == 1
        assert score(row["prompt"], f"{right} 0 0") == 1
        assert score(row["prompt"], right[:7]) == 0.5
        assert tokenizer.decode(tokenizer.encode(right)) == right
        # A wrong sum costs what it is, and what goes on from it rightly is right.
        assert score(
            row["prompt"], " ".join(str((int(start) + 1 + place * int(step)) % 10) for place in range(1, 9))
        ) == (7 / 8)
    assert score("+4 from 3", "") == score("+4 from 3", "+4 from") == 0


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5] * 20, None),
        ([0.5] * 10 + [0.26] * 20, None),
        ([0.5] * 10 + [0.1] * 20, 15),
        # Two bad means are no collapse.
        ([0.5] * 10 + [0.0, 0.0, 0.1, 0.9] + [0.5] * 10, None),
        ([0.1] * 4, None),
    ],
)
def test_a_collapse_is_a_lasting_fall_under_half_of_the_best(rewards: list[float], expected: int | None) -> None:
    assert collapsed_at(rewards) == expected


def test_the_command_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    given = ["--fault", "token_ratio", "--steps", "19", "--logdir", str(tmp_path / "log"), "--output", str(output)]
    report = main(given, setting=SMALL)
    assert json.loads(output.read_text()) == report
    assert list(report["runs"]) == ["no clip", "TokenClip"]
    printed = capsys.readouterr().out
    assert "Gradient spike at step 18: A.1" in printed
    assert "of them found as A.1; 0 other finds" in printed
    assert printed.count("reward 0.") == 2
    assert len(printed.splitlines()) < 60
    assert (tmp_path / "log" / "no_clip" / "incidents" / "step_18" / "incident.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"log", "report.json"}


class TestResultOfTheLongRun:
    """`python -m stabilizer.examples.grpo_arithmetic --table --output tests/data/grpo_arithmetic.json` makes it."""

    @pytest.fixture
    def report(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(RESULT.read_text())
        return read

    def test_it_is_the_run_that_the_command_makes(self, report: dict[str, Any]) -> None:
        setting = Setting()
        assert report["setting"]["steps"] == setting.steps
        assert report["setting"]["interval"] == setting.interval
        assert list(report["arms"]) == list(ARMS)
        for runs in report["arms"].values():
            assert list(runs) == ["0", "1", "2"]
            for run in runs.values():
                assert run["end"] == pytest.approx(statistics.fmean(run["rewards"][-5:]), abs=1e-4)
                found = collapsed_at(run["rewards"])
                assert run["collapsed_at"] == (None if found is None else 4 * found + 1)

    def test_the_kinds_are_told_apart(self, report: dict[str, Any]) -> None:
        """Where a fault is found, it is found as what it is."""
        for name, runs in report["arms"].items():
            for run in runs.values():
                for kind, found in run["found"].items():
                    assert not (set(found) & set(KINDS.values())) - {KINDS.get(kind)}, name  # type: ignore[call-overload]
        stages = [statistics.fmean(run["end"] for run in report["arms"][name].values()) for name in _STAGES]
        assert stages == sorted(stages)
        assert stages[-1] > stages[0] + 0.4
        assert stages[-1] > 0.95 * statistics.fmean(run["end"] for run in report["arms"]["no faults"].values())

    def test_the_docs_have_its_numbers(self, report: dict[str, Any]) -> None:
        rows = {
            cells[0]: cells[1:]
            for line in DOCS.read_text().splitlines()
            if line.startswith("|") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
        }
        for name, runs in report["arms"].items():
            cells = [f"{run['collapsed_at'] or '-'} ({run['end']:.2f})" for run in runs.values()]
            mean = statistics.fmean(run["end"] for run in runs.values())
            assert rows[name] == [*cells, f"{mean:.2f}"], name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_reward_rises_within_five_minutes(tmp_path: Path) -> None:
    begin = time.monotonic()
    report = main(["--logdir", str(tmp_path)])
    assert time.monotonic() - begin < 300
    run = report["runs"]["no clip"]
    assert run["collapsed_at"] is None
    assert run["end"] > statistics.fmean(run["rewards"][:5]) + 0.2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_table_comes_out_again(tmp_path: Path) -> None:
    """With one seed: without a clip the run collapses, with all three it learns."""
    arms = main(["--table", "--seeds", "0", "--logdir", str(tmp_path)])["arms"]
    assert arms["none"]["0"]["collapsed_at"] is not None
    assert arms["all three"]["0"]["collapsed_at"] is None
    assert arms["all three"]["0"]["end"] > arms["none"]["0"]["end"] + 0.2
