"""What a loop observes beside its loss, handed to the callbacks that want it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.observation_meter import observe_for
from stabilizer.errors import warn

__all__ = ["Observing"]


class Observing:
    """Part of a handle: log-probs and signals that its user tells."""

    callbacks: Sequence[StabilizerCallback]
    is_closed: bool
    _has_warned_of_observations = False

    def observe(
        self,
        *,
        logp_train: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        mask: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Tell `RolloutMismatchCallback` of a micro-batch, before the optimizer step; any number of times, on any rank.

        Args:
            logp_train: Log-probs of the sampled tokens under the policy in training, shape (B, T).
            logp_rollout: The same under the policy that generated, shape (B, T).
            mask: Which tokens count, bool or 0 and 1, shape (B, T).
            **signals: See `RolloutMismatchCallback.observe`.

        Raises:
            ValueError: If a name is not known, or a shape does not fit.
        """
        if self.is_closed:
            return
        if not self._has_warned_of_observations and all(callback.observations is None for callback in self.callbacks):
            self._has_warned_of_observations = True
            warn("observe() has nobody to tell: add RolloutMismatchCallback to the callbacks")
        observe_for(self.callbacks, logp_train=logp_train, logp_rollout=logp_rollout, mask=mask, **signals)
