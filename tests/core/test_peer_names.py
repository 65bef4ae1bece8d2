"""Names of peers: bounded, printable, and never without the id that nobody can choose."""

import platform

import pytest

from decentral.core.ids import PeerId
from decentral.core.peer_names import PEER_NAME_CHARS, machine_name, name_of_several, titled

PEER = PeerId("QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojx3kPq2")


def test_a_peer_is_written_with_its_id_before_its_name() -> None:
    assert titled(PEER, "ann-laptop") == "x3kPq2 (ann-laptop)"
    assert titled(PEER, "") == "x3kPq2"


def test_a_name_cannot_control_a_terminal_and_has_an_end() -> None:
    assert titled(PEER, "\x1b[2J[red]\u202e") == "x3kPq2 (?(2J(red)?)"
    assert titled(PEER, "x" * 500) == f"x3kPq2 ({'x' * PEER_NAME_CHARS})"


@pytest.mark.parametrize(
    ("host", "name"), [("ann.example.org", "ann"), ("", ""), ("h\x1b" + "x" * 99, "h?" + "x" * 30)]
)
def test_a_machine_is_called_by_its_host_name(host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: host)
    assert machine_name() == name


@pytest.mark.parametrize(("host", "name"), [("ann.example.org", "ann-2"), ("", "peer-2")])
def test_several_peers_of_a_machine_have_its_name_and_a_number(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: host)
    assert name_of_several(2) == name
    monkeypatch.setattr(platform, "node", lambda: "x" * 99)
    assert len(name_of_several(63)) == PEER_NAME_CHARS
