"""A private swarm as its users meet it: real processes, what each of them says, and with which code it ends."""

import asyncio
import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import FOR_EVER, KEY_BYTES, MAX_HOLDER_CHARS, MOST_REVOKED, Permission
from decentral.comm.wire.messages import Welcome
from decentral.comm.wire.transport import Answer
from decentral.commands import export, generate, invite, plan
from decentral.commands import shared as command
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import invitation_files
from decentral.peers.startup.invitation_files import MOST_INVITED, FounderFile, read_holding
from decentral.peers.startup.visit import say_hello
from tests.comm.wire.invited import founder
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.commands.refusals import JOIN, refusal
from tests.patient_time import LIMIT_S


def run(*arguments: str) -> int:
    return invite.main(arguments)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The state folder in which a private swarm was begun."""
    folder = tmp_path / "founder"
    folder.mkdir()
    FounderFile.create(folder, "gpt")
    return folder


def invited(folder: Path, name: str = "ann", **flags: str) -> Path:
    out = folder.parent / f"{name}.invite"
    more = [part for key, value in flags.items() for part in (f"--{key}", value)]
    assert run("--state-dir", str(folder), "--for", name, "--out", str(out), *more) == 0
    return out


# The command and its files


def test_an_invitation_is_a_secret_file_that_says_for_whom_and_what(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = invited(begun, until="12h", may="look")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one = read_holding(path).invitation
    assert (one.holder, one.may) == ("ann", Permission.LOOK)
    said = capsys.readouterr().out
    assert "for ann to look, for 12.0 hours" in said
    assert "as you would send a password" in said


def test_an_invitation_without_an_end_can_be_read_and_its_founder_goes_on(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = read_holding(invited(begun, until="never")).invitation
    assert one.until == FOR_EVER
    assert "for ann to train, without an end" in capsys.readouterr().out
    assert run("--state-dir", str(begun), "--list") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["valid", "train", "without", "an", "end", "ann"]
    invited(begun, "bob")


def test_the_founder_s_keys_are_for_its_owner_only(begun: Path) -> None:
    assert stat.S_IMODE((begun / "founder.json").stat().st_mode) == 0o600


def test_a_file_that_is_there_is_not_overwritten(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = invited(begun)
    before = path.read_bytes()
    assert run("--state-dir", str(begun), "--for", "bob", "--out", str(path)) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_the_list_shows_who_was_invited_until_when_and_whether_it_counts(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = invited(begun)
    invited(begun, "bob", may="donate")
    assert run("--state-dir", str(begun), "--revoke", str(path)) == 2  # nobody is there to hear of it
    assert "revoked in this folder only, because no running peer's address is known" in capsys.readouterr().err
    assert run("--state-dir", str(begun), "--list") == 0
    _, ann, bob = capsys.readouterr().out.splitlines()
    assert ann.split()[1:3] + ann.split()[-1:] == ["revoked", "train", "ann"]
    assert bob.split()[1:3] + bob.split()[-1:] == ["valid", "donate", "bob"]


@pytest.mark.parametrize(
    ("name", "file"), [("ann", "ann.invite"), ("../ann lee", "ann-lee.invite"), ("/", "peer.invite")]
)
def test_without_a_file_the_invitation_is_in_this_folder_under_its_name(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    """A peer prints the command without --out."""
    monkeypatch.chdir(tmp_path)
    assert run("--state-dir", str(begun), "--for", name) == 0
    assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600
    assert run("--state-dir", str(begun), "--for", name) == 2, "no invitation is overwritten"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give one of --for NAME"),
        (["--for", "ann", "--list"], "give one of"),
        (["--for", "[red]", "--out", "x"], "printable characters, no brackets"),
        (["--for", "ann", "--out", "x", "--until", "soon"], "expected 12h, 30d, 8w"),
        (["--for", "ann", "--out", "x", "--until", "99999d"], "at most ten years"),
        (["--for", "ann", "--out", "x", "--may", "rule"], "--may"),
        (["--revoke", "0123456789abcdef"], "no invitation 0123456789abcdef was made here"),
        (["--revoke", "none.invite"], "cannot read none.invite"),
    ],
)
def test_a_wrong_flag_is_one_line(begun: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--state-dir", str(begun), *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_only_the_founder_invites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--state-dir", str(tmp_path), "--list") == 2
    assert "no private swarm was begun there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"until": 9e9},
        {"until": 10**400},
        {"may": "train"},
        {"run": "gpt"},
        {"secret": "00"},
        {"secret": "00" * KEY_BYTES},
        {"for": 1},
        {"id": None},
    ],
)
def test_a_changed_invitation_is_none(
    begun: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = invited(begun, may="look")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert plan.main(["--join", JOIN, "--invite", str(path)]) == 2
    assert "is not a valid invitation" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"secret": "00"},
        {"secret": "00" * KEY_BYTES},
        {"swarm_key": ""},
        {"run": 7},
        {"number": "3"},
        {"number": 1 << 70},
        {"revoked": ["00"]},
        {"invited": 7},
        {"invited": [7]},
        {"invited": [{}]},
        {"invited": [{"id": "0" * 16, "for": "ann", "until": 10**400, "may": "look"}]},
        {"invited": [{"id": "0" * 16, "for": "ann", "until": 9e9, "may": "rule"}]},
    ],
)
@pytest.mark.parametrize("flags", [["--list"], ["--for", "bob", "--out", "bob.invite"]])
def test_a_damaged_founder_s_file_is_one_line_and_nothing_is_signed(
    begun: Path, change: dict[str, object], flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(begun)
    path = begun / "founder.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = path.read_bytes()
    assert run("--state-dir", str(begun), *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "founder.json is damaged" in line
    assert path.read_bytes() == before


def test_a_clock_that_is_ahead_gives_no_revoked_invitation_back(begun: Path) -> None:
    """By the founder's clock, an hour ahead, the first invitation had expired, and the next list left it out."""
    with FounderFile.open(begun) as ours:
        soon, later = (ours.invite("x", until, Permission.TRAIN).invitation.id for until in (1000.0, 9000.0))
        ours.revoke(soon, 500.0)
        assert ours.revoke(later, 4100.0).ids == {soon, later}


def test_what_has_expired_long_ago_leaves_a_full_list_of_revocations(begun: Path) -> None:
    with FounderFile.open(begun) as ours:
        old, new = (ours.invite("x", until, Permission.TRAIN).invitation.id for until in (1000.0, 1e9))
        others = frozenset(number.to_bytes(8) for number in range(MOST_REVOKED - 1))
        ours.revoked = others | {old}
        with pytest.raises(UserError):
            ours.revoke(new, 2000.0)
        assert ours.revoke(new, 2000.0 + 31 * 86400.0).ids == others | {new}


def test_a_founder_s_file_from_an_old_copy_gives_nothing_back_and_its_next_list_is_taken(begun: Path) -> None:
    copy = (begun / "founder.json").read_bytes()
    with FounderFile.open(begun) as ours:
        ann = ours.invite("ann", 1e9, Permission.TRAIN).invitation.id
        known = [ours.revoke(ann, 0.0), ours.revoke(ann, 0.0)][-1]
    (begun / "founder.json").write_bytes(copy)
    with FounderFile.open(begun) as restored:
        bob = restored.invite("bob", 1e9, Permission.TRAIN).invitation.id
        restored.catch_up(b"no list")
        restored.catch_up(known.packed)
        found = restored.revoke(bob, 0.0)
    assert found.ids == {ann, bob}
    assert found.number > known.number


def test_a_list_that_nobody_would_take_is_not_signed(begun: Path) -> None:
    with FounderFile.open(begun) as ours:
        full = ours.invite("ann", FOR_EVER, Permission.TRAIN).invitation.id
        ours.revoked = frozenset(number.to_bytes(8) for number in range(MOST_REVOKED))
        with pytest.raises(UserError, match="list of revocations is full"):
            ours.revoke(full, 0.0)
        assert ours.number == 0


def test_a_founder_can_still_read_and_revoke_the_longest_file_of_invitations(begun: Path) -> None:
    with FounderFile.open(begun) as ours:
        first = ours.invite("\U0001f427" * MAX_HOLDER_CHARS, FOR_EVER, Permission.TRAIN).invitation.id
        ours.invited += [{**ours.invited[0], "id": number.to_bytes(8).hex()} for number in range(1, MOST_INVITED)]
        ours.revoked = frozenset(number.to_bytes(8) for number in range(1, MOST_REVOKED))
        ours.save()
        with pytest.raises(UserError, match="10000 invitations"):
            ours.invite("ann", FOR_EVER, Permission.TRAIN)
    with FounderFile.open(begun) as again:
        assert first in again.revoke(first, 0.0).ids


def test_a_restart_remembers_what_was_revoked(begun: Path) -> None:
    with FounderFile.open(begun) as ours:
        holding = ours.invite("ann", FOR_EVER, Permission.TRAIN)
        invitation_files.keep_revocations(begun, ours.revoke(holding.invitation.id, 0.0).packed)
    again = invitation_files.member(begun, holding, PeerId("QmA"), SwarmClock())
    assert again.over() == "revoked"


class Welcoming:
    """A transport to a member that says to be in another run than the one it was asked for."""

    def __init__(self, run: str) -> None:
        self.run = run

    async def connect(self, address: str) -> PeerId:
        return PeerId("QmA")

    async def ask(self, *question: object) -> Answer:
        return Answer(Envelope(Welcome(self.run, "{}")), 0.0, 0.0, 0, 0)


def test_a_member_leads_no_newcomer_into_another_run() -> None:
    """Its folder would have belonged to a public run from then on, and would have gone on as one."""
    ours = RunId("gpt-" + 26 * "a")
    for theirs in ("gpt-123456", "gpt-" + 26 * "b"):
        with pytest.raises(UserError, match=theirs):
            asyncio.run(say_hello(["there"], cast(Libp2p, Welcoming(theirs)), ours))
    contacts, welcome = asyncio.run(say_hello(["there"], cast(Libp2p, Welcoming(ours)), ours))
    assert contacts
    assert welcome


# Peers


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--private", "--join", JOIN], "--private begins a new swarm"),
        (["--invite", "none.invite"], "give --join ADDR"),
        (["--private", "--set", "name=" + "n" * 38], "at most 37 characters"),
    ],
)
def test_a_peer_s_wrong_flags_are_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    assert said in refusal(tmp_path / "peer", *flags)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """The founder of a private swarm, which trains."""
    peers = Peers(tmp_path_factory.mktemp("private"))
    peers.start("founder", "--private", *TINY)
    peers.until("the founder trains", lambda: bool(peers.lines("founder", "joined")))
    yield peers
    peers.end()


def address(peers: Peers) -> str:
    return str(peers.lines("founder", "started")[0]["addresses"][0])


def ended(peers: Peers, name: str) -> tuple[int, list[str]]:
    """The exit code of a peer's process, and its last two lines but those that say how it starts."""
    code = peers.processes[name].wait(LIMIT_S)
    del peers.processes[name]
    lines = (peers.folder / name / "output.txt").read_text().splitlines()
    return code, [line for line in lines if not line.startswith(command.STARTING)][-2:]


@pytest.mark.swarm
def test_an_uninvited_peer_gets_one_line_and_not_a_byte_of_the_config(swarm: Peers) -> None:
    said = refusal(swarm.folder / "uninvited", "--join", address(swarm))
    assert said.endswith("this swarm is private: ask its founder for an invitation, and give it with --invite FILE")
    assert not (swarm.folder / "uninvited" / "run.json").exists()


RARE = [pytest.param(one, marks=pytest.mark.night) for one in ("of another swarm", "to look")]


@pytest.mark.swarm
@pytest.mark.parametrize("whose", ["expired", "revoked", *RARE])
def test_an_invitation_that_does_not_count_gets_one_line(swarm: Peers, whose: str) -> None:
    home = swarm.folder / "founder"
    path = swarm.folder / f"{whose}.invite"
    if whose == "of another swarm":
        holding = founder().invite("ann", 9e9, Permission.TRAIN, os.urandom)
    else:
        with FounderFile.open(home) as ours:
            may = Permission.LOOK if whose == "to look" else Permission.TRAIN
            holding = ours.invite("ann", 1e9 if whose == "expired" else 9e9, may)
    invitation_files.write_holding(path, holding)
    if whose == "revoked":
        assert run("--state-dir", str(home), "--revoke", str(path)) == 0
        swarm.until("the founder's peer knows", lambda: bool(swarm.lines("founder", "revoked")))
    said = {
        "expired": "the invitation has expired",
        "revoked": "founder has revoked the invitation",
        "of another swarm": "so it is in another swarm",
        "to look": "allows only to look",
    }[whose]
    assert said in refusal(swarm.folder / whose, "--join", address(swarm), "--invite", str(path))
    assert not (swarm.folder / whose / "run.json").exists()


@pytest.mark.swarm
def test_an_invited_peer_trains_comes_back_without_its_file_and_stops_when_it_is_revoked(swarm: Peers) -> None:
    path = invited(swarm.folder / "founder", "bob")
    swarm.start("bob", "--join", address(swarm), "--invite", str(path))
    swarm.until("bob exchanges with the founder", lambda: exchanged(swarm, "bob"))
    swarm.processes["bob"].send_signal(signal.SIGINT)
    assert ended(swarm, "bob")[0] == 0
    path.rename(path.with_suffix(".moved"))
    swarm.start("bob")
    since = swarm.lines("bob", "stopped")[-1]["t"]
    swarm.until("bob exchanges again", lambda: exchanged(swarm, "bob", since))
    assert run("--state-dir", str(swarm.folder / "founder"), "--revoke", str(path.with_suffix(".moved"))) == 0
    code, lines = ended(swarm, "bob")
    assert code == 2
    assert lines[-1] == "error: the swarm's founder has revoked this peer's invitation"
    swarm.until("the founder drops bob", lambda: bool(swarm.lines("founder", "peer_left")))
    assert "revoked" in refusal(swarm.folder / "bob")


@pytest.mark.swarm
def test_whoever_may_look_looks(swarm: Peers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = invited(swarm.folder / "founder", "carol", may="look")
    flags = ["--join", address(swarm), "--out", str(tmp_path / "model")]
    assert export.main(flags) == 2
    assert "this swarm is private" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert export.main([*flags, "--invite", str(path)]) == 0
    assert (tmp_path / "model" / "config.json").exists()
    capsys.readouterr()
    assert generate.main(["--join", address(swarm), "--invite", str(path), "--max-tokens", "5", "import"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("import")
    assert f"weights of {swarm.lines('founder', 'started')[0]['peer']} at learning-rate step" in said.err


@pytest.mark.parametrize(("text", "line"), [("2001-01-01", "expected a future date"), ("30", "expected 12h, 30d")])
def test_an_invitation_ends_in_the_future_and_a_bare_number_has_no_unit(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        invite.parse(["--state-dir", "x", "--for", "ann", "--out", "x", "--until", text])


def test_an_invitation_may_end_with_a_day() -> None:
    flags = invite.parse(["--state-dir", "x", "--for", "ann", "--out", "x", "--until", "2999-12-31"])
    assert flags.until > 900 * 365 * 86400
