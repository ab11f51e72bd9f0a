"""A GRPO trainer of TRL whose batches and layers can be at fault, and which TokenClip and SeqClip repair."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trl.trainer.grpo_trainer import GRPOTrainer

from stabilizer.rollout import SeqClip, TokenClip, token_log_ratios

__all__ = ["KINDS", "Faults", "FaultyTrainer", "Kind", "StoredInput", "clip_advantages", "log_probs"]

Kind: TypeAlias = Literal["token_ratio", "sequence_ratio", "layer"]
#: What can go wrong, and how GradLoc calls it.
KINDS: dict[Kind, str] = {"token_ratio": "A.1", "sequence_ratio": "A.2", "layer": "B"}

#: What a rollout engine reports of a probability that has underflowed: log(1e-9).
_UNDERFLOW = -20.7
#: What the other policy's log-probs do not fall below, so that no single ratio is extreme.
_FLOOR = -10.0
#: By how much the scale of one token's stored activations is wrong: one bit of an exponent.
_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class Faults:
    """What goes wrong, and when.

    - "token_ratio": a rollout engine reports a wrong log-prob for one token, log(1e-9).
    - "sequence_ratio": it reports log-probs of another policy for one sequence, as a replica with wrong weights would;
      for the one that the two policies agree about least.
    - "layer": a block keeps what its linear layers get in few bits for the backward, with one scale a token, and one of
      these is wrong. What the block computes is right, and so are the gradients of all others.

    Attributes:
        kinds: Which can happen.
        interval: Steps from one fault to the next, in the mean.
        first: None is earlier: thresholds need 50 steps to warm up.
        seed: Of steps and places.
    """

    kinds: Sequence[Kind] = ()
    interval: int = 12
    first: int = 60
    seed: int = 0

    def at(self, step: int) -> Kind | None:
        """What goes wrong at a step.

        Args:
            step: From 0.

        Example:
            >>> [Faults(kinds=["layer"], interval=2).at(step) for step in (0, 60, 61, 62)]
            [None, 'layer', 'layer', None]
        """
        if not self.kinds or step < self.first:
            return None
        drawn = torch.rand(2, generator=self.generator(step))
        happens = step == self.first or float(drawn[0]) < 1 / self.interval
        return self.kinds[int(drawn[1] * len(self.kinds))] if happens else None

    def generator(self, step: int) -> torch.Generator:
        """Random numbers of a step.

        Args:
            step: From 0.
        """
        return torch.Generator().manual_seed(1_000_003 * self.seed + step)


class FaultyTrainer(GRPOTrainer):
    """Plants faults in what it has sampled and scored, then clips.

    A subclass that overrides `_prepare_inputs` is all that TokenClip and SeqClip need in TRL: its loss takes advantages
    of one value a token, so that a token whose advantage is 0 sends no gradient.

    Attributes:
        faults: What goes wrong; nothing unless set.
        other: The policy whose log-probs a sequence gets by "sequence_ratio".
        clips: Applied one after the other.
        planted: Step -> kind and row and position in the micro-batch; a sequence has no position.
    """

    faults = Faults()
    other: nn.Module | None = None
    clips: Sequence[TokenClip | SeqClip] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planted: dict[int, tuple[Kind, int, int | None]] = {}
        self._policy = cast("nn.Module", self.model)
        self._blocks = [_store_inputs(block) for block in cast("Any", self.model).model.layers]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        for linear in itertools.chain(*self._blocks):
            linear.place = None
        made = super()._prepare_inputs(generation_batch)
        if not self._policy.training:
            return made
        batch = {key: value.clone() if isinstance(value, Tensor) else value for key, value in made.items()}
        kind = self.faults.at(self.state.global_step)
        if kind is not None:
            self._plant(kind, batch)
        if self.clips:
            batch["advantages"] = clip_advantages(batch, log_probs(self._policy, batch), clips=self.clips)
        return batch

    def _plant(self, kind: Kind, batch: dict[str, Tensor]) -> None:
        generator, old = self.faults.generator(self.state.global_step), batch["old_per_token_logps"]
        # The loss bounds ratios where the advantage is positive; where it is negative there is no limit.
        weights = (-batch["advantages"]).clamp(min=0)
        if not weights.any():
            return
        row = int(torch.multinomial(weights, 1, generator=generator))
        position: int | None = int(torch.multinomial(batch["completion_mask"][row].float(), 1, generator=generator))
        if kind == "token_ratio":
            old[row, position] = _UNDERFLOW
        elif kind == "sequence_ratio":
            assert self.other is not None
            theirs, position = log_probs(self.other, batch).clamp(min=_FLOOR), None
            apart = ((log_probs(self._policy, batch) - theirs) * batch["completion_mask"]).sum(dim=1)
            row = int(torch.where(weights > 0, apart, -torch.inf).argmax())
            old[row] = theirs[row]
        else:
            assert position is not None
            number = int(torch.randint(len(self._blocks), (1,), generator=generator))
            for linear in self._blocks[number]:
                # Where a token is predicted, one before it.
                linear.place = (row, batch["prompt_ids"].shape[1] + position - 1)
        self.planted[self.state.global_step] = (kind, row, position)


def clip_advantages(batch: Mapping[str, Tensor], logp_train: Tensor, *, clips: Sequence[TokenClip | SeqClip]) -> Tensor:
    """Advantages by token, 0 where a clip drops the token.

    Only the clips' masks are used: TRL's loss has the ratio in it already, which weights would count twice.

    Args:
        batch: As TRL prepares it, with `old_per_token_logps`, `completion_mask`, both (B, T), and `advantages`, (B,).
        logp_train: Log-probs under the policy in training, (B, T).
        clips: In any order.

    Returns:
        Shape (B, T).

    Example:
        >>> batch = {"advantages": torch.tensor([-1.0]), "completion_mask": torch.ones(1, 2)}
        >>> batch["old_per_token_logps"] = torch.tensor([[-0.5, -20.0]])
        >>> clip_advantages(batch, torch.tensor([[-0.5, -0.4]]), clips=[TokenClip(mode="mis")])
        tensor([[-1., -0.]])
    """
    mask = batch["completion_mask"].bool()
    log_ratios = token_log_ratios(logp_train, logp_rollout=batch["old_per_token_logps"], mask=mask)
    for clip in clips:
        mask = mask & clip(log_ratios, mask=mask).mask
    return batch["advantages"].unsqueeze(1) * mask


@torch.no_grad()
def log_probs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probs of the tokens of completions.

    Args:
        model: A causal language model of transformers.
        batch: As TRL prepares it, with token numbers and masks of prompts and completions.

    Returns:
        Shape (B, T).
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return F.log_softmax(logits.float(), dim=-1).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)


class StoredInput(nn.Linear):
    """A linear layer that keeps its input for the backward with a scale a token, of which one can be wrong.

    Attributes:
        place: Row and position whose scale is wrong; `None` for none.
    """

    place: tuple[int, int] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """The product with the weight, which is right in any case.

        Args:
            hidden: Shape (B, T, inputs).
        """
        if self.place is None or not torch.is_grad_enabled():
            return super().forward(hidden)
        product: Tensor = _Kept.apply(hidden, self.weight, self.place)  # type: ignore[no-untyped-call]
        bias: Tensor | None = self.bias
        return product if bias is None else product + bias


def _store_inputs(block: nn.Module) -> list[StoredInput]:
    """Change all linear layers of a block, with their weights as they are."""
    found = [module for module in block.modules() if isinstance(module, nn.Linear)]
    for linear in found:
        linear.__class__ = StoredInput
    return cast("list[StoredInput]", found)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, place: tuple[int, int]) -> Tensor:
        kept = hidden.clone()
        kept[place] *= _SCALE
        ctx.save_for_backward(kept, weight)
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        kept, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).T @ kept.flatten(0, 1), None
