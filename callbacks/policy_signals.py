"""What a trainer of TRL knows of its policy, read off the batch that its loss is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.hosting import stand_before
from stabilizer.errors import logger, warn

__all__ = ["PolicySignals"]

_LOG_PROBS, _SAMPLING = "_get_per_token_logps_and_entropies", "_generate_and_score_completions"
# The losses whose ratio is clipped on the side that an advantage pushes to.
_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class PolicySignals:
    """Watches a trainer that samples completions and scores them. No collective, and nothing waits for the device.

    Args:
        trainer: One of TRL's.
        observe: Takes what was seen of a micro-batch; see `LoopHandle.observe`.
    """

    def __init__(self, trainer: Any, observe: Callable[..., None]) -> None:
        self._trainer, self._observe = trainer, observe
        self._seen: tuple[Any, ...] = ()
        self._is_on = self._has_rewards = self._has_warned = self._has_failed = False
        self._sampled_at = int(trainer.state.global_step)
        weights = getattr(trainer, "reward_weights", None)
        self._weights = None if weights is None else weights.detach().to("cpu", torch.float64)
        self._undo: list[Callable[[], None]] = []
        if hasattr(trainer, _LOG_PROBS):
            self._undo.append(stand_before(trainer, _LOG_PROBS, self._log_probs))
        if hasattr(trainer, _SAMPLING):
            self._undo.append(stand_before(trainer, _SAMPLING, self._sampling))

    def begin(self) -> None:
        """A loss is about to be computed."""
        self._seen, self._is_on = (), True

    def end(self, inputs: Any) -> None:
        """The loss is computed.

        Args:
            inputs: What it was computed from.
        """
        self._is_on = False
        seen, self._seen = self._seen, ()
        mask = inputs.get("completion_mask") if isinstance(inputs, Mapping) else None
        if self._has_failed or not seen or not isinstance(mask, Tensor) or seen[0].shape != mask.shape:
            return
        try:
            with torch.no_grad():
                self._observe(**self._observed(inputs, *seen))
        except Exception:
            # No collective here: a rank may stop alone.
            self._has_failed = True
            logger.exception("the signals of the policy could not be read off the batch; training goes on without them")

    def close(self) -> None:
        """Put the trainer's methods back."""
        while self._undo:
            self._undo.pop()()

    def _log_probs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        # Those of a reference have no gradient.
        if self._is_on and isinstance(found, tuple) and isinstance(found[0], Tensor) and found[0].requires_grad:
            self._seen = tuple(value.detach() if isinstance(value, Tensor) else None for value in found[:2])
        return found

    def _sampling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if self._trainer.model.training:
            self._has_rewards, self._sampled_at = True, int(self._trainer.state.global_step)
        return made

    def _observed(self, inputs: Mapping[str, Any], current: Tensor, entropies: Tensor | None = None) -> dict[str, Any]:
        completion_mask = inputs["completion_mask"]
        mask = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
        lengths, truncated = self._lengths(inputs)
        found = {
            "mask": mask,
            "entropy": entropies,
            "completion_length": lengths,
            "truncated": truncated,
            "policy_lag": float(self._trainer.state.global_step - self._sampled_at),
            **self._policies(inputs, current),
            **self._rewards(),
        }
        reference, old = inputs.get("ref_per_token_logps"), inputs.get("old_per_token_logps")
        if reference is not None:
            apart = reference - current
            found["kl_ref"] = apart.exp() - apart - 1
            if old is not None and getattr(self._trainer.args, "use_bias_correction_kl", False):
                # As the loss has it: of the policy in training, from what an older one has sampled.
                found["kl_ref"] = found["kl_ref"] * (current - old).exp()
        if old is not None:
            found["clipped"] = self._clipped(inputs, current - old)
        return {name: value for name, value in found.items() if value is not None}

    def _policies(self, inputs: Mapping[str, Any], current: Tensor) -> dict[str, Any]:
        """The policy in training and the one that sampled."""
        old, sampling = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        if sampling is not None:
            return {"logp_train": current if old is None else old, "logp_rollout": sampling}
        if old is not None:
            return {"logp_train": current, "logp_rollout": old, "behaviour_is_old": 1.0}
        if not self._has_warned:
            self._has_warned = True
            warn(
                "the trainer keeps no log-probs by token of the policy that sampled (GRPO does with vLLM, and where a "
                "batch is used more than once: num_iterations, steps_per_generation over gradient_accumulation_steps): "
                "the mismatch of rollouts is not observable; the signals of the policy are logged"
            )
        return {}

    def _clipped(self, inputs: Mapping[str, Any], log_ratios: Tensor) -> Tensor | None:
        trainer = self._trainer
        kind, level = getattr(trainer, "loss_type", None), getattr(trainer, "importance_sampling_level", None)
        if level != "token" or kind not in (*_CLIPPED_LOSSES, "cispo"):
            return None
        advantages: Tensor = inputs["advantages"]
        ratios = log_ratios.exp()
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        if kind == "cispo":
            is_high: Tensor = (ratios > trainer.epsilon_high) & (advantages > 0)
            return is_high.float()
        is_high = (ratios > 1 + trainer.epsilon_high) & (advantages > 0)
        is_low: Tensor = (ratios < 1 - trainer.epsilon_low) & (advantages < 0)
        return (is_low | is_high).float()

    def _lengths(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Tokens of every completion, and whether it was cut off."""
        lengths: Tensor = inputs["completion_mask"].sum(1)
        ends: Sequence[int] | None = getattr(self._trainer, "eos_token_ids", None)
        tokens, longest = inputs.get("completion_ids"), getattr(self._trainer, "max_completion_length", None)
        if not ends or longest is None or not isinstance(tokens, Tensor) or not tokens.shape[1]:
            return lengths, None
        # A completion may end by the token that others are filled up with.
        filler = getattr(getattr(self._trainer, "processing_class", None), "pad_token_id", None)
        ends = [*ends, *([] if filler is None else [filler])]
        # TRL can take those that were cut off out of the loss, and their mask is empty then.
        is_left_out = (lengths == 0) & bool(getattr(self._trainer, "mask_truncated_completions", False))
        lengths = torch.where(is_left_out, tokens.shape[1], lengths)
        last = tokens.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        has_ended = torch.stack([last == end for end in ends]).any(0)
        is_cut: Tensor = is_left_out | ((lengths >= longest) & ~has_ended)
        return lengths, is_cut.float()

    def _rewards(self) -> dict[str, Any]:
        """Of the completions that were sampled last, once; those of all ranks, as TRL has gathered them."""
        if not self._has_rewards:
            return {}
        self._has_rewards = False
        kept = getattr(self._trainer, "_logs", {}).get("rewards")
        if not kept or self._weights is None:
            return {}
        by_function = [torch.tensor(list(values), dtype=torch.float64) for values in kept.values()]
        together = torch.stack(by_function, dim=-1) * self._weights
        rewards = together.nansum(-1).masked_fill(together.isnan().all(-1), torch.nan)
        return {"rewards": rewards, "num_generations": int(self._trainer.num_generations)}
