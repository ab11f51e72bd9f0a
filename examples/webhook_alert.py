"""Tells a webhook of a loss alarm: a function for `on_alarm`, outside the core, to copy and to change.

In Python, `LossMeanVarCallback(on_alarm=["log", Webhook("https://hooks.example.org/train")])`. In YAML, with the
address in the environment variable STABILIZER_WEBHOOK:

    loss_mean_var: {on_alarm: [log, stabilizer.examples.webhook_alert.post]}
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import TYPE_CHECKING, Any

from stabilizer.errors import logger
from stabilizer.reduction import rank

if TYPE_CHECKING:
    from stabilizer.callbacks.loss_alarms import LossAlarm

__all__ = ["Webhook", "post"]

_VARIABLE = "STABILIZER_WEBHOOK"


class Webhook:
    """Posts alarms as JSON: their fields, and `text`, which chat services show.

    Alarms are the same on every rank, so rank 0 alone posts. What goes wrong is logged and ends nothing. The other
    ranks wait for rank 0 in their next collective, at most for the timeout.

    Args:
        url: Of http or https.
        timeout: Seconds.
        headers: More of them, such as a token.

    Raises:
        ValueError: If it is another kind of address.

    Example:
        >>> Webhook("https://hooks.example.org/train").timeout
        5.0
    """

    def __init__(self, url: str, *, timeout: float = 5.0, headers: dict[str, str] | None = None) -> None:
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}: expected an address that begins with http:// or https://")
        self.url, self.timeout = url, timeout
        self.headers = {"Content-Type": "application/json", **(headers or {})}

    def __call__(self, alarm: LossAlarm) -> None:
        """Post an alarm.

        Args:
            alarm: It.
        """
        if rank() != 0:
            return
        try:
            content: dict[str, Any] = {"text": alarm.text, **json.loads(alarm.to_json())}
            request = urllib.request.Request(
                self.url, data=json.dumps(content).encode(), headers=self.headers, method="POST"
            )
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                answer.read()
        except Exception as error:
            # The address may hold a secret: it is not shown.
            logger.warning("the webhook was not told of the alarm at step %d: %s", alarm.step, error)


def post(alarm: LossAlarm) -> None:
    """Post an alarm to the address in STABILIZER_WEBHOOK; without one it is said on rank 0.

    Args:
        alarm: It.
    """
    url = os.environ.get(_VARIABLE, "")
    try:
        Webhook(url)(alarm)
    except ValueError:
        if rank() == 0:
            logger.warning(
                "%s holds no address of http or https: the alarm at step %d is not sent", _VARIABLE, alarm.step
            )
