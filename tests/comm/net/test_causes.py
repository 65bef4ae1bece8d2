"""What a user is told of a failed dial: libp2p's cause, without its address and calls."""

import pytest

from decentral.comm.net.libp2p import _last_line


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "failed to dial:\n  * [/ip4/127.0.0.1/tcp/1] dial tcp4 127.0.0.1:1: connect: connection refused",
            "connection refused",
        ),
        ("  * [/ip4/10.0.0.1/tcp/1] dial tcp4 0.0.0.0:4001->10.0.0.1:1: i/o timeout", "i/o timeout"),
        ("failed to negotiate security protocol: peer id mismatch: expected a, but remote key matches b", None),
    ],
)
def test_the_cause_of_a_failed_dial(said: str, cause: str | None) -> None:
    assert _last_line(OSError(said)) == (cause or said)
