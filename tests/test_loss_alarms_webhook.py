"""examples/webhook_alert.py against a server on this machine."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.examples.webhook_alert import Webhook, post
from tests.launcher import run_distributed
from tests.loss_alarm_loops import BURST, play, watcher


class Server(ThreadingHTTPServer):
    """Keeps what it is sent.

    Attributes:
        bodies: As JSON.
        headers: Of each request.
        delay: Seconds before the answer.
        status: Of the answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.delay, self.status = 0.0, 200

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}/hook/secret"


class Handler(BaseHTTPRequestHandler):
    """Takes a POST."""

    server: Server

    def do_POST(self) -> None:
        """Keep it and answer."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body, parse_constant=pytest.fail))
        self.server.headers.append(self.headers)
        time.sleep(self.server.delay)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_event_is_posted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STABILIZER_WEBHOOK", server.url)
    callback = watcher(Webhook(server.url, headers={"Authorization": "token"}), strict=True)
    play(BURST, callback)
    assert [(body["kind"], body["step"], body["count"]) for body in server.bodies] == [
        ("jump", 80, 1),
        ("jump", 110, 4),
    ]
    assert [body["text"] for body in server.bodies] == [alarm.text for alarm in callback.alarms]
    assert {headers["Content-Type"] for headers in server.headers} == {"application/json"}
    assert {headers["Authorization"] for headers in server.headers} == {"token"}
    post(callback.alarms[0])
    assert len(server.bodies) == 3


def test_nothing_that_goes_wrong_is_raised(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = watcher()
    play(BURST[:90], callback)
    [alarm] = callback.alarms
    server.status, server.delay = 500, 0.0
    with caplog.at_level(logging.WARNING, "stabilizer"):
        Webhook(server.url)(alarm)
        server.status, server.delay = 200, 2.0
        start = time.monotonic()
        Webhook(server.url, timeout=0.2)(alarm)
        assert time.monotonic() - start < 1.5
        Webhook("http://127.0.0.1:9/closed")(alarm)
        monkeypatch.delenv("STABILIZER_WEBHOOK", raising=False)
        post(alarm)
    assert len(caplog.records) == 4
    assert "secret" not in caplog.text
    with pytest.raises(ValueError, match="url='file:///etc/passwd': expected an address"):
        Webhook("file:///etc/passwd")


def _post(rank: int, world_size: int, url: str) -> None:
    Webhook(url)(LossAlarm("jump", 5, 9.0, 2.0, 0.1, 70.0, 5.0, 5, rank=rank))


def test_one_rank_posts(server: Server) -> None:
    run_distributed(_post, server.url, world_size=2)
    assert [body["rank"] for body in server.bodies] == [0]
