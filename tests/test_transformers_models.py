"""Trainers of other kinds: adapters, checkpointing of activations, a gradient scaler, GradLoc."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaForCausalLM

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNoiseScaleCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
    attach,
)
from tests.trainer_runs import (
    LEARNING_RATE,
    VOCABULARY,
    Rows,
    make_llama,
    make_trainer,
    micro_batches,
    reference,
)

TOLERANCE = 1e-5


def test_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = get_peft_model(make_llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    expected = reference(num_steps=3, accumulation=1, num_ranks=1, model=model)
    norms = GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None)
    trainer = make_trainer(
        "single",
        tmp_path,
        model=model,
        callbacks=[StabilizerTrainerCallback([norms, GradLocCallback()])],
        max_grad_norm=0.0,
    )
    trainer.train()
    history = norms.norm_history()
    adapted = {name: norms for name, norms in expected[0]["norms"].items() if "lora" in name}
    assert history.totals.tolist() == pytest.approx([step["total"] for step in expected], rel=1e-3)
    first = sum(value**2 for value in adapted.values()) ** 0.5
    assert float(history.totals[0]) == pytest.approx(first, rel=TOLERANCE)
    assert all("layers" in name for name in history.layer_names)


def test_checkpointed_activations(tmp_path: Path) -> None:
    totals = []
    for is_on in (False, True):
        norms = GradNormCallback(heatmap_every_n_steps=None)
        trainer = make_trainer(
            "single",
            tmp_path,
            callbacks=[StabilizerTrainerCallback([norms, GradLocCallback()])],
            activation_checkpointing=is_on,
            max_grad_norm=0.0,
        )
        trainer.train()
        assert trainer.model.is_activation_checkpointing is is_on
        totals.append(norms.norm_history().totals)
    torch.testing.assert_close(totals[0], totals[1], rtol=TOLERANCE, atol=0)


def test_a_gradient_scaler(tmp_path: Path) -> None:
    """Norms are those of the unscaled gradient; an overflow is the scaler's."""
    expected = reference(num_steps=3, accumulation=1, num_ranks=1, max_norm=0.5)
    norms = GradNormCallback(heatmap_every_n_steps=None)
    losses = LossMeanVarCallback(windows=(2,), every_n_steps=1, warmup_steps=0)
    own: list[tuple[int, dict[str, float]]] = []
    trainer = make_trainer(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([norms, losses], log=lambda values, step: own.append((step, values)))],
        max_grad_norm=0.5,
    )
    # transformers has none on a CPU, where float16 does not train: its accelerator takes any.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    assert norms.norm_history().totals.tolist() == pytest.approx([step["total"] for step in expected], rel=TOLERANCE)
    points = {(tag, step): value for step, values in own for tag, value in values.items()}
    for number, step in enumerate(expected):
        last = expected[max(0, number - 1) : number + 1]
        mean = sum(one["loss"] for one in last) / len(last)
        assert not number or points["loss/mean_2", number + 1] == pytest.approx(mean, rel=TOLERANCE)
        assert points["grad_norm/total_after", number + 1] == pytest.approx(step["after"], rel=TOLERANCE)
    shown = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert shown == pytest.approx([step["total"] for step in expected], rel=TOLERANCE)


#: A token that nobody else has.
_RARE = VOCABULARY - 1
POSITION = 7


class _Planted(Rows):
    """Rows with a token in one of them that no other has.

    Args:
        at: Which row.
    """

    def __init__(self, at: int) -> None:
        super().__init__(64)
        self.ids[self.ids == _RARE] = 0
        self.ids[at, POSITION] = _RARE


class _Scaled(torch.nn.Module):
    """A head whose logits are far too large where the rare token is read."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.inner, self.weight = model.lm_head, model.lm_head.weight
        self._ids = torch.zeros(0)
        model.model.embed_tokens.register_forward_pre_hook(self._see)

    def _see(self, module: torch.nn.Module, args: tuple[Tensor]) -> None:
        (self._ids,) = args

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.inner(hidden)
        return torch.where((self._ids == _RARE).unsqueeze(-1), 300.0 * logits, logits)


def _faulty(*, dropout: float = 0.0) -> LlamaForCausalLM:
    model = make_llama(dropout=dropout)
    model.lm_head = _Scaled(model)
    return model


@pytest.mark.parametrize(("accumulation", "is_scaled"), [(1, True), (2, True), (2, False)])
def test_a_token_is_found_and_training_is_the_same_bit_for_bit(
    tmp_path: Path, accumulation: int, is_scaled: bool
) -> None:
    weights, found = [], None
    for localizes in (True, False):
        localizer = GradLocCallback(
            rule={"name": "robust_log", "warmup_steps": 4}, warmup_steps=5, dump_dir=str(tmp_path)
        )
        suite: list[StabilizerCallback] = [localizer] if localizes else [GradNormCallback()]
        trainer = make_trainer(
            "single",
            tmp_path,
            model=_faulty(dropout=0.1),
            dataset=_Planted(2 * (8 * accumulation - 1) + 1),
            callbacks=[StabilizerTrainerCallback(suite, log=lambda *_: None)],
            gradient_accumulation_steps=accumulation,
            max_steps=9,
            max_grad_norm=0.0,
        )
        # Without it each loss is a mean of its own, which the trainer divides by the number of micro-batches.
        trainer.model_accepts_loss_kwargs = is_scaled
        trainer.train()
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        found = localizer.incidents if localizes else found
    assert found is not None
    (incident,) = found
    (token,) = incident.tokens
    assert (incident.step, token.micro_batch, token.row, token.position) == (7, accumulation - 1, 1, POSITION)
    # The fault is below the gate: what arrives there is normal, so that halves are tried.
    assert incident.reproducible
    assert incident.num_passes <= 16
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.covers(feature="noise scale", strategy="single", host="transformers")
def test_the_noise_scale_is_that_of_a_loop_with_the_same_gradients(tmp_path: Path) -> None:
    """Whose losses are divided by the tokens of the whole step, as a trainer divides them, and which says so."""
    found = []
    noise = GradNoiseScaleCallback(every_n_steps=1, min_samples=2, batch_unit="tokens")
    rows: list[tuple[dict[str, float], int]] = []
    trainer = make_trainer(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([noise], log=lambda values, step: rows.append((values, step)))],
        gradient_accumulation_steps=4,
        max_steps=4,
        max_grad_norm=0.0,
    )
    trainer.train()
    found.append({(tag, step - 1): value for values, step in rows for tag, value in values.items()})
    rows = []
    model = make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    noise = GradNoiseScaleCallback(every_n_steps=1, min_samples=2, batch_unit="tokens", loss_reduction="sum")
    with attach(
        None, model=model, optimizer=optimizer, callbacks=[noise], log=lambda values, step: rows.append((values, step))
    ) as handle:
        for step in micro_batches(num_steps=4, accumulation=4, num_ranks=1):
            num_tokens = sum(int((piece["labels"][:, 1:] != -100).sum()) for (piece,) in step)
            for (piece,) in step:
                own = int((piece["labels"][:, 1:] != -100).sum())
                loss = model(**piece).loss
                (loss * own / num_tokens).backward()
                handle.record_loss(loss, weight=own)
            optimizer.step()
            optimizer.zero_grad()
    found.append({(tag, step): value for values, step in rows for tag, value in values.items()})
    assert any(tag.startswith("gns/noise_scale") for tag, _ in found[0])
    assert found[0].keys() == found[1].keys()
    assert found[0] == pytest.approx(found[1], rel=1e-3, nan_ok=True)


def test_a_clip_and_a_search_in_one_run(tmp_path: Path) -> None:
    """The same thresholds serve both, and a skip reaches the trainer's optimizer."""
    rule = {"name": "robust_log", "warmup_steps": 4, "min_ratio": 20}
    clip = AdaptiveClipThreshold(rule=rule, on_spike="skip_step", warmup_cap=None)
    localizer = GradLocCallback(warmup_steps=5, dump_dir=str(tmp_path))
    trainer = make_trainer(
        "single",
        tmp_path,
        model=_faulty(),
        dataset=_Planted(15),
        callbacks=[StabilizerTrainerCallback([clip, localizer], log=lambda *_: None)],
        max_steps=9,
    )
    trainer.train()
    assert clip.num_skipped() == 1
    assert [incident.threshold_of for incident in localizer.incidents] == ["total (AdaptiveClipThreshold)"]
