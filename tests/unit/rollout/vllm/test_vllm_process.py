"""A server that is ended is not asked twice how it feels."""

from __future__ import annotations

import os
import time

from fake_server import FakeServer, error, serving, slow
from lowpeak.rollout.vllm.command import Server
from lowpeak.rollout.vllm.process import ServerProcess


def test_a_server_that_refuses_to_give_its_requests_up_is_ended_all_the_same():
    fake = FakeServer()
    fake.answers = {"/pause": lambda body: (500, error("dead")), "/health": slow(4.0)}
    with serving(fake):
        process = ServerProcess(Server("m", port=fake.port), os.environ, command=lambda server: ["sleep", "60"])
        process.start()
        began = time.monotonic()
        process.stop()
        assert time.monotonic() - began < 3
        assert process.status() is not None
        assert [path for path, body in fake.calls] == ["/pause?mode=abort"]
