"""A real peer that uploads to a server which accepts connections and never answers: it trains on, and checkpoints."""

import sys

import pytest

from tests.commands.peer_processes import TINY, Peers
from tests.processes import piped

pytestmark = pytest.mark.swarm

NEVER_ANSWERS = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    kept = []
    while True:
        kept.append(server.accept())
        print("connected", flush=True)
"""
STEPS = 30  # the test waits for so many more, however long that takes


def test_a_peer_whose_store_never_answers_trains_on(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="needs the extra upload: pip install s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with piped(sys.executable, "-c", NEVER_ANSWERS) as server:
        assert server.stdout is not None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.stdout.readline().strip()}")
        often = ("--set", "swarm.checkpoint_every_s=1")
        peers.start("ann", *TINY, *often, "--upload", "s3://bucket/runs")
        assert server.stdout.readline() == "connected\n"

        def saved() -> int:
            return len(peers.lines("ann", "checkpoint"))

        def steps() -> int:
            return max((line["step"] for line in peers.lines("ann", "step")), default=0)

        begun, written = steps(), saved()
        peers.until("more steps and checkpoints", lambda: steps() >= begun + STEPS and saved() > written)
        assert peers.lines("ann", "upload") == []  # the upload hangs still
        assert peers.lines("ann", "error") == []
        peers.processes["ann"].kill()  # at an orderly end, the upload of the last checkpoint would have 30 s
