"""What a peer shows its user of strangers: their names, and nothing that a terminal or rich obeys."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from decentral.comm.gossip.exchange import PullTag
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.transport import AskFailed, Found
from decentral.core import jobs
from decentral.core.config import Config, DataConfig, GossipConfig, ModelConfig
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId, short
from decentral.core.journal.events import PeerJoinedLine
from decentral.core.machine import Log
from decentral.core.peer_names import titled
from decentral.core.reasons import Reason
from decentral.core.times import clock_time
from decentral.core.units import Amount
from decentral.model.shape import LoraConfig
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.roster import DEAD_AFTER, RosterEntry
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.view import terminal

RUN, NOW = RunId("gpt-3fa2c1"), 1.7e9
KEY = f"{RUN}/peers"
NAMES = ["\x1b[2J\x1b[H", "\x1b]0;title\x07", "[red]a[/red]", "[/]", "[link=https://example.org]a", "\u202eb", "a\nb\r"]


def node(folder: Path, config: Config, name: str = "", layers: int = 3) -> Node:
    own = Identity.load_or_create(folder / "own.key")
    profile, layout = Profile("cpu", 1 << 30, 1e9, 1e4, name=name), (Section("phi", "int8", 6, 6),)
    fragments = (Fragment(0, 0, 3, 100),)
    made = Node(NodeSetup(config, RUN, own, fragments, [layout], layers, profile, ("/ip4/127.0.0.1/tcp/1",)))
    made.begin(NOW)
    return made


def meet(ours: Node, folder: Path, name: str, number: int = 0) -> list[Log]:
    """Let a node read the record of a stranger with this name; return what it journals."""
    stranger = Identity.load_or_create(folder / f"{number}.key")
    profile = Profile(name, 1 << 30, 1e9, 1e4, region=name, software=name, name=name)
    record = PeerRecord(RUN, NOW, (), profile, 0, 3, 5, 5, 100, phase=PeerPhase.TRAINING)
    sealed = stranger.seal(KEY, records.pack(record), NOW + 60)
    return [one for one in ours.handle(Found(KEY, {stranger.peer: sealed}), NOW) if isinstance(one, Log)]


@pytest.fixture
def met(tmp_path: Path) -> tuple[Node, list[Log]]:
    """A node that has met a stranger for each of these names, and what it journals of them."""
    ours, lines = node(tmp_path, Config()), list[Log]()
    for number, name in enumerate(NAMES):
        lines += meet(ours, tmp_path, name, number)
    assert len(ours.roster.live) == len(NAMES)
    return ours, lines


def test_the_live_view_shows_strangers_names_as_plain_text(met: tuple[Node, list[Log]]) -> None:
    shown = io.StringIO()
    display = terminal.LiveDisplay(Console(file=shown, width=200, highlight=False))
    display.introduce(met[0], Path("folder"))
    display.update(met[0], NOW)
    display.close()
    text = shown.getvalue()
    assert "?(2J?(H" in text
    assert "(red)a(/red)" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_peer_that_joins_says_so_instead_of_figures(
    met: tuple[Node, list[Log]], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, _ = met
    ours.phase = PeerPhase.JOINING
    terminal.LineDisplay().update(ours, NOW)
    assert capsys.readouterr().out == f"starting: joining; known peers: {len(NAMES)}, received: 0 B\n"
    ours.phase = PeerPhase.TRAINING
    terminal.LineDisplay().update(ours, NOW)
    assert capsys.readouterr().out.startswith(f"{clock_time(NOW)}  own step 0  learning-rate step 0  loss ")


def test_a_peer_that_leaves_or_joins_has_a_line(
    met: tuple[Node, list[Log]], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, shown, display = met[0], io.StringIO(), terminal.LineDisplay()
    live = terminal.LiveDisplay(Console(file=shown, width=200, highlight=False))
    ours.phase = PeerPhase.TRAINING
    for one in (display, live):
        one.update(ours, NOW)
    assert "peer " not in capsys.readouterr().out
    gone = sorted(ours.roster.live)[0]
    entry = ours.roster.live.pop(gone)
    who = titled(gone, entry.record.profile.name)
    for one in (display, live):
        one.update(ours, NOW)
    said = f"{clock_time(NOW)}  peer {who} left (peers {len(NAMES)} -> {len(NAMES) - 1})"
    assert capsys.readouterr().out.splitlines()[0] == said
    assert said in shown.getvalue()
    ours.roster.live[gone] = entry
    display.update(ours, NOW)
    said = f"{clock_time(NOW)}  peer {who} joined (peers {len(NAMES) - 1} -> {len(NAMES)})"
    assert capsys.readouterr().out.startswith(said)


def test_a_peer_that_is_lost_is_not_said_to_have_left(met: tuple[Node, list[Log]]) -> None:
    ours, company = met[0], terminal.Company()
    ours.phase = PeerPhase.TRAINING
    assert company.changes(ours) == []
    gone = sorted(ours.roster.live)[0]
    who = titled(gone, ours.roster.live[gone].record.profile.name)
    for _ in range(DEAD_AFTER):
        ours.roster.handle(AskFailed(PullTag(0, 1), gone, Reason.UNREACHABLE, 1.0), NOW)
    assert company.changes(ours) == [f"peer {who} is lost (silent) (peers {len(NAMES)} -> {len(NAMES) - 1})"]


def test_a_first_step_that_takes_long_is_said(met: tuple[Node, list[Log]]) -> None:
    ours = met[0]
    ours.phase, ours.progress.joined_at = PeerPhase.TRAINING, NOW
    assert terminal.first_step(ours, NOW + terminal.LONG_STEP_S - 1) == []
    assert terminal.first_step(ours, NOW + 60) == ["the first step is taking 60 s (train.micro_batch 8)"]
    ours.progress.tokens = 1
    assert terminal.first_step(ours, NOW + 60) == []


def test_a_run_with_adapters_says_what_is_trained(tmp_path: Path) -> None:
    ours = node(tmp_path, Config(model=ModelConfig(depth=1, width=32, lora=LoraConfig(rank=1))))
    assert (
        "0.00 M trained parameters (adapters; the other weights are frozen) in 1 fragment\n"
        in terminal.introduction(ours, tmp_path)
    )


def test_a_journal_has_strangers_names_as_plain_text(met: tuple[Node, list[Log]]) -> None:
    joined = [line.event for line in met[1] if isinstance(line.event, PeerJoinedLine)]
    assert len(joined) == len(NAMES)
    for line in joined:
        for name in ("device", "region", "name"):
            assert getattr(line, name).isprintable()
            assert not set("[]") & set(getattr(line, name))


def test_a_held_out_loss_is_shown_with_its_age(tmp_path: Path) -> None:
    peer = node(tmp_path, Config())
    assert terminal.figures(peer, NOW)["held-out"] == "-"
    peer.progress.handle(jobs.Evaluated(64, 1.8531, 0.1), NOW)
    assert terminal.figures(peer, NOW + 47.2)["held-out"] == "1.853 (47 s ago)"
    assert terminal.figures(peer, NOW + 250)["held-out"] == "1.853 (4 min ago)"


def test_a_peer_that_has_diverged_says_so_once_in_its_last_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer, why = node(tmp_path, Config()), "training has diverged: the mean loss has risen"
    terminal.farewell(peer, tmp_path, why, why)
    (line,) = capfd.readouterr().out.splitlines()
    kept = f"{tmp_path} keeps the previous checkpoint, if there is one"
    assert line == f"stopped ({why}) after 0 tokens since this start, loss -; NOT saved: {kept}"
    terminal.farewell(peer, tmp_path / "gone", why, why)
    assert capfd.readouterr().out.endswith(f"NOT saved: {tmp_path / 'gone'} was deleted\n")


def test_a_peer_that_has_saved_the_whole_model_says_how_to_use_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer = node(tmp_path, Config())
    terminal.farewell(peer, tmp_path, "interrupted")
    assert capfd.readouterr().out.splitlines() == [
        f"stopped (interrupted) after 0 tokens since this start, loss -; saved in {tmp_path}",
        f"use the model with: python -m decentral.generate --state-dir {tmp_path} 'Once upon a time'",
    ]
    terminal.farewell(node(tmp_path, Config(), layers=4), tmp_path, "interrupted")
    assert "generate" not in capfd.readouterr().out


def test_a_newcomer_is_warned_once_if_another_peer_has_its_name(tmp_path: Path) -> None:
    ours, company = node(tmp_path, Config(), "laptop"), terminal.Company()
    for number, name in enumerate(("laptop", "ann")):
        meet(ours, tmp_path, name, number)
    ours.phase = PeerPhase.TRAINING
    (other,) = (peer for peer, entry in ours.roster.live.items() if entry.record.profile.name == "laptop")
    (line,) = company.changes(ours)
    assert line == f"warning: {short(other)} and this peer are both called laptop; --name NAME renames one"
    assert company.changes(ours) == []


def test_the_line_for_others_names_the_flags_without_which_they_cannot_join(tmp_path: Path) -> None:
    plain = terminal.introduction(node(tmp_path, Config()), tmp_path)
    assert plain.endswith("--join /ip4/127.0.0.1/tcp/1")
    own = Config(model=ModelConfig(layers="mine:layers"), data=DataConfig(kind="text", path="/home/me/text"))
    needed = terminal.introduction(node(tmp_path, own), tmp_path)
    assert needed.endswith("--join /ip4/127.0.0.1/tcp/1 --trust-model-code mine:layers --data PATH")
    text = DataConfig(kind="huggingface", path="/home/me/text")
    own = Config(model=ModelConfig(weights=32 * "a"), data=text)
    assert terminal.introduction(node(tmp_path, own), tmp_path).endswith("/tcp/1 --data PATH --tokenizer PATH")
    lora = LoraConfig(rank=8)
    own = Config(model=ModelConfig(weights=32 * "a", lora=lora), data=text)
    assert terminal.introduction(node(tmp_path, own), tmp_path).endswith("/tcp/1 --data PATH --model-from DIR")
    named = text.model_copy(update={"tokenizer": "/home/me/tokenizer"})
    needed = terminal.introduction(node(tmp_path, own.model_copy(update={"data": named})), tmp_path)
    assert needed.endswith("/tcp/1 --data PATH --model-from DIR --tokenizer PATH")


def test_the_line_to_go_on_with_can_be_given_to_a_shell(tmp_path: Path) -> None:
    said = terminal.introduction(node(tmp_path, Config()), Path("/home/my peers/one"))
    assert "continue later with: python -m decentral.peer --state-dir '/home/my peers/one'\n" in said


@pytest.mark.parametrize("algorithm", ["pull", "allreduce"])
def test_a_public_swarm_says_so_and_whether_its_algorithm_is_made_against_hostile_peers(
    algorithm: str, tmp_path: Path
) -> None:
    said = terminal.openness(node(tmp_path, Config(gossip=GossipConfig(algorithm=algorithm))).setup, tmp_path)
    assert said.startswith("this swarm is public")
    assert ("can undo" in said) == (algorithm != "pull")


def test_a_peer_is_shown_with_its_name_wherever_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = node(tmp_path, Config(), name="ann")
    ours.phase, display = PeerPhase.TRAINING, terminal.LineDisplay()
    display.update(ours, NOW)
    meet(ours, tmp_path, "bob")
    display.update(ours, NOW)
    (other,) = ours.roster.live
    assert f"  peer {short(other)} (bob) joined (peers 0 -> 1)\n" in capsys.readouterr().out
    assert f"{short(other)} (bob)" in screen(ours, 80, 24)
    assert f"\npeer {ours.setup.own.peer} (ann) on cpu: " in terminal.introduction(ours, tmp_path)


def screen(ours: Node, width: int, height: int, troubles: tuple[str, ...] = (), color: bool = False) -> str:
    """What the live view draws on a terminal of this size at NOW."""
    shown = io.StringIO()
    environment = {"TERM": "xterm-256color"} | ({} if color else {"NO_COLOR": "1"})
    console = Console(
        file=shown, width=width, height=height, highlight=False, force_terminal=True, _environ=environment
    )
    live = terminal.LiveDisplay(console)
    live.update(ours, NOW, troubles)
    console.print(live._live.renderable)
    return shown.getvalue()


def uncolored(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_peer_of_this_terminal_is_marked_among_others_of_its_name(tmp_path: Path) -> None:
    ours = node(tmp_path, Config(), name="ann")
    ours.phase = PeerPhase.TRAINING
    meet(ours, tmp_path, "ann")
    (other,) = ours.roster.live
    shown = {line for line in uncolored(screen(ours, 80, 24)).splitlines() if "(ann)" in line}
    assert sorted("this one" in line for line in shown) == [False, True]
    assert next(line for line in shown if "this one" in line).startswith(f"{short(ours.setup.own.peer)} (ann)")
    assert next(line for line in shown if "this one" not in line).startswith(f"{short(other)} (ann)")


def test_the_live_view_fits_a_terminal_of_80_columns_and_24_lines(tmp_path: Path) -> None:
    ours = node(tmp_path, Config(), name="ann")
    ours.phase, ours.progress.joined_at = PeerPhase.TRAINING, NOW - 100
    ours.progress.stop_after = Amount(200, "s")
    profile = Profile("a device", 1 << 30, 1e9, 1e4, name="a name of thirty-two characters!")
    record = PeerRecord(RUN, NOW, (), profile, 0, 3, 5, 5, 100, phase=PeerPhase.TRAINING)
    ours.roster.live |= {PeerId(f"Qmstranger{number:06d}"): RosterEntry(record, NOW + 60) for number in range(30)}
    said = screen(ours, 80, 24, ("the disk is full, so the newest checkpoint is two hours old: make room there",))
    lines = uncolored(said).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    for part in ("100 s of 200s, about 100 s left", "held-out", "windows", "checkpoint", "warning: the disk is full"):
        assert part in said
    assert "a name of thirty-two characters!" in said
    assert "more" in lines[-1]


def test_a_wide_terminal_cuts_long_devices_and_regions_and_no_figures(tmp_path: Path) -> None:
    ours = node(tmp_path, Config())
    ours.phase = PeerPhase.TRAINING
    profile = Profile("a device" * 9, 1 << 30, 1e9, 1e6, region="a region" * 9, name="a name of thirty-two characters!")
    record = PeerRecord(RUN, NOW, (), profile, 0, 3, 1_234_567, 5, 100, phase=PeerPhase.TRAINING)
    ours.roster.live |= {PeerId("Qmstranger000000"): RosterEntry(record, NOW + 60)}
    for width in (terminal.WIDE, 120, 200):
        (line,) = {one for one in uncolored(screen(ours, width, 24)).splitlines() if "thirty-two" in one}
        for part in ("(a name of thirty-two characters!)", "a d", "a regiona reg", "1234567", "1,000,000", "0 s ago"):
            assert part in line, width


def test_without_color_the_live_view_has_no_color_and_says_the_same(tmp_path: Path) -> None:
    ours = node(tmp_path, Config())
    ours.phase = PeerPhase.TRAINING
    plain, colored = screen(ours, 80, 24, ("look here",)), screen(ours, 80, 24, ("look here",), color=True)
    assert "\x1b[33m" in colored
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[;m]", plain)
    assert uncolored(plain).splitlines()[1:] == uncolored(colored).splitlines()[1:]  # the first line has a moving bar


def test_plain_lines_have_the_goal_and_the_age_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = node(tmp_path, Config())
    ours.phase, ours.progress.joined_at = PeerPhase.TRAINING, NOW - 100
    ours.progress.stop_after = Amount(200, "s")
    ours.progress.handle(jobs.Saved(7, 100, 0.1), NOW - 12)
    terminal.LineDisplay().update(ours, NOW)
    said = capsys.readouterr().out
    assert "  checkpoint 12 s ago  goal 100 s of 200s, about 100 s left\n" in said
