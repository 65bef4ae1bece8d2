"""Where the page is served: what a user types, and what is said of a port that is taken."""

import argparse
import socket
from pathlib import Path

import pytest

from decentral.commands import local
from decentral.commands.dashboard import main
from decentral.core.errors import UserError
from decentral.view.page import address
from decentral.view.page.address import HERE, PageAddress, link


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("8420", HERE, 8420), ("0", HERE, 0), ("0.0.0.0:80", "0.0.0.0", 80), ("[::1]:8420", "::1", 8420)],
)
def test_an_address_is_read_as_it_is_typed(text: str, host: str, port: int) -> None:
    assert PageAddress.parse(text) == PageAddress(host, port, strict=True)


NOWHERE = (
    "argument --at: expected [HOST:]PORT, such as 9100 or 0.0.0.0:9100; got 'nowhere' "
    "(see python -m decentral.dashboard --help)"
)


@pytest.mark.parametrize("text", ["", "x", ":80", "host:", "host:x", "70000", "-1", "1.5", "٣"])
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected \[HOST:\]PORT"):
        PageAddress.parse(text)


def test_a_port_that_is_taken_is_an_error_if_the_user_chose_it_and_else_another_is_taken() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="choose another port"):
            PageAddress(HERE, port, strict=True).bind()
        with PageAddress(HERE, port).bind() as other:
            assert other.getsockname()[1] != port


def test_a_host_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UserError, match="cannot be used"):
        PageAddress("no.such.host.invalid", 0, strict=True).bind()


def test_without_its_libraries_one_line_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'decentral\[dashboard\]'"):
        PageAddress().bind()


def test_the_link_to_a_page_that_listens_everywhere_leads_to_this_machine() -> None:
    with PageAddress("0.0.0.0", 0, strict=True).bind() as listening:
        assert link(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "expected --join ADDR of a running peer, or a folder with a peer's journal"),
        (
            ["no/such/folder"],
            "no/such/folder is not a folder; give a peer's state folder, or a folder of state folders",
        ),
        (["--at", "nowhere", "."], NOWHERE),
    ],
)
def test_what_the_command_cannot_show_is_said_in_one_line(
    capfd: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(flags) == 2
    assert capfd.readouterr().err == f"error: {said}\n"


def test_a_port_that_is_taken_ends_a_local_swarm_before_any_peer_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        assert local.main(["--dashboard", str(port), "--state-dir", str(tmp_path)]) == 2
    assert f"127.0.0.1:{port} cannot be used" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
