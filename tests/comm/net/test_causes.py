"""What a user is told of a failed dial: libp2p's cause, without its address and calls."""

import pytest

from decentral.comm.net.causes import DialFailure, dial_failure, failed_at, last_line


@pytest.mark.parametrize(
    ("said", "cause", "kind"),
    [
        (
            "failed to dial:\n  * [/ip4/127.0.0.1/tcp/1] dial tcp4 127.0.0.1:1: connect: connection refused",
            "connection refused",
            DialFailure.NOBODY_LISTENS,
        ),
        (
            "  * [/ip4/10.0.0.1/tcp/1] dial tcp4 0.0.0.0:4001->10.0.0.1:1: i/o timeout",
            "i/o timeout",
            DialFailure.SILENCE,
        ),
        (
            "  * [/ip6/2001:db8::1/tcp/1] dial tcp6 [2001:db8::1]:1: connect: network is unreachable",
            "network is unreachable",
            DialFailure.NO_ROUTE,
        ),
        (
            "* [/ip4/10.0.0.1/tcp/1] failed to negotiate security protocol: "
            "peer id mismatch: expected QmA, but remote key matches QmB",
            "another peer (QmB) answers there",
            DialFailure.ANOTHER_PEER,
        ),
        ("failed to negotiate security protocol: EOF", None, DialFailure.OTHER),
    ],
)
def test_the_cause_of_a_failed_dial_and_its_kind(said: str, cause: str | None, kind: DialFailure) -> None:
    assert last_line(OSError(said)) == (cause or said)
    assert dial_failure(last_line(OSError(said))) is kind


def test_the_addresses_of_a_failed_dial_are_those_that_libp2p_has_dialled_now() -> None:
    said = "all dials failed\n  * [/ip4/10.0.0.1/tcp/1] dial tcp4 10.0.0.1:1: i/o timeout\n"
    assert failed_at(said + "  * [/ip4/10.0.0.1/tcp/2] dial backoff\n    ... skipping 9 errors ...") == [
        "/ip4/10.0.0.1/tcp/1"
    ]
