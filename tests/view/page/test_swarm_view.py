"""Lines in, rows out: who is there, who is not, how it goes, what has changed; and bounds on all of it."""

import json
import math
from typing import Any

import pytest

from decentral.core import strict_json
from decentral.core.ids import PeerId
from decentral.core.journal.field_kinds import MOST_LAYERS
from decentral.core.journal.lines import Recorded
from decentral.core.plain_text import SHOWN_CHARS
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile, Standing
from decentral.view.page import link_view, swarm_view
from decentral.view.page.peer_view import ROW, PageState
from decentral.view.page.source_lines import PAGE_LINES, RecordLine
from decentral.view.page.swarm_view import SwarmView

A, B = "QmAAAAAAAAAAAAAAAAAAAAAAAAAAAAaaaaaaaa", "QmBBBBBBBBBBBBBBBBBBBBBBBBBBBBbbbbbbbb"


class Told:
    """A view, and short ways to tell it something."""

    def __init__(self) -> None:
        self.view = SwarmView()

    def line(self, owner: str, t: float, event: str, **fields: Any) -> None:
        found = PAGE_LINES.parse({"t": t, "event": event, **fields})
        assert found is not None
        self.view.take(owner, found)

    def record(self, t: float, peer: str, span: tuple[int, int] = (0, 3), region: str = "", **standing: Any) -> None:
        known: dict[str, Any] = {"loss": 1.5, "held_out": 1.7, "shares": (900, 100), "exchanges": (3, 2, 1)}
        profile, first, last = Profile("cpu", 1, 1.0, 70.0, region=region), *span
        told = Standing(**known | standing)
        kept = PeerRecord("run", 1.0, (), profile, first, last, 5, 5, 700, phase=PeerPhase.TRAINING, standing=told)
        self.view.take("", Recorded(t, RecordLine(peer=PeerId(peer), record=kept)))

    def training(self, *peers: str, t: float = 0.0) -> None:
        for peer in peers:
            self.line(peer, t, "started", peer=peer, device="cpu")
            self.line(peer, t, "joined", donors=[], seconds=0.1)
            self.step(peer, t + 1)

    def step(self, peer: str, t: float, loss: float | None = 2.0, tokens: int = 1000) -> None:
        aside = {"gossip": 0.1}
        self.line(peer, t, "step", step=int(t), tokens=tokens, loss=loss, seconds=0.9, aside=aside)

    def row(self, peer: str) -> dict[str, Any]:
        return dict(zip(ROW, self.view.peers[peer].row(), strict=True))

    def words(self) -> list[str]:
        return [row[4] for row in self.view.events.rows]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_row_says_what_the_journal_said(told: Told) -> None:
    told.training(A)
    told.line(A, 2.0, "exchange", fragment=0, partner=B, outcome="failed", reason="deadline", seconds=3.0)
    told.line(A, 3.0, "traffic", sent_bytes=5, received_bytes=6)
    told.line(A, 3.0, "status", first=0, last=4, window_s=2.0, bound="", mfu=0.4, links=[[B[-8:], 1000, 0.05]])
    row = told.row(A)
    assert (row["state"], row["tokens"], row["loss"]) == ("training", 1000, 2.0)
    assert (row["exchanges"], row["reasons"]) == ([0, 0, 1], {"deadline": 1})
    assert (row["sent_bytes"], row["received_bytes"], row["first"], row["last"]) == (5, 6, 0, 4)
    assert (row["shares"][:2], row["mfu"]) == ([0.9, 0.1], 0.4)


def test_a_browser_learns_which_states_count_as_live(told: Told) -> None:
    told.training(A)
    told.line(A, 3.0, "stopped", reason="signal")
    for state in PageState:
        told.view.peers[A].state = state
        assert (state in told.view.snapshot()["live_states"]) is told.view.peers[A].live


def test_tokens_of_all_lives_count_and_exchanges_of_the_present_one(told: Told) -> None:
    told.training(A)
    told.line(A, 2.0, "exchange", partner=B, outcome="done")
    told.training(A, t=10.0)
    assert told.row(A)["tokens"] == 2000
    assert told.row(A)["exchanges"] == [0, 0, 0]


def test_a_peer_that_another_one_misses_is_silent_when_it_writes_nothing_either(told: Told) -> None:
    told.training(A, B)
    told.line(A, 4.0, "peer_left", peer=B, reason="silent")
    told.view.tick(3.0)
    assert told.row(B)["state"] == "training"
    told.view.tick(4.5)
    assert (told.row(B)["state"], told.row(B)["why"]) == ("silent", "silent, says another peer")


def test_a_peer_that_another_one_misses_and_that_goes_on_is_not_silent(told: Told) -> None:
    told.training(A, B)
    told.line(A, 4.0, "peer_left", peer=B, reason="silent")
    told.step(B, 4.5)
    told.view.tick(8.0)
    assert told.row(B)["state"] == "training"


def test_a_peer_whose_process_has_ended_is_not_waited_for(told: Told) -> None:
    told.training(A, B)
    told.line("", 2.5, "missed", peer=B, reason="killed by signal 9", certain=True)
    assert (told.row(B)["state"], told.row(B)["why"]) == ("ended", "killed by signal 9")
    assert told.words()[-1] == "has ended (killed by signal 9)"


def test_a_slow_peer_may_be_quiet_for_longer(told: Told) -> None:
    told.training(A, B)
    told.step(A, 41.0)
    told.step(A, 81.0)
    told.view.tick(81.0 + swarm_view.UNWRITTEN_S + 5)
    assert told.row(A)["state"] == "training"
    assert told.row(B)["state"] == "silent"


def test_a_silent_peer_that_steps_is_back(told: Told) -> None:
    told.training(A)
    told.view.tick(100.0)
    told.step(A, 101.0)
    assert told.row(A)["state"] == "training"
    assert told.words()[-1] == "is back"


def test_a_peer_that_stops_has_left_and_is_not_missed_by_anybody(told: Told) -> None:
    told.training(A, B)
    told.line(B, 2.0, "stopped", reason="interrupted")
    told.line(A, 3.0, "peer_left", peer=B, reason="left")
    told.view.tick(100.0)
    assert told.row(B)["state"] == "left"
    assert told.words().count("left") == 0


def test_a_peer_without_a_journal_here_comes_and_goes_by_what_others_say(told: Told) -> None:
    told.training(A)
    told.line(A, 2.0, "peer_joined", peer=B, device="H100", region="home")
    assert (told.row(B)["state"], told.row(B)["device"], told.row(B)["region"]) == ("training", "H100", "home")
    told.view.tick(500.0)
    told.line(A, 501.0, "peer_left", peer=B, reason="expired")
    assert told.row(B)["state"] == "silent"


@pytest.mark.parametrize("found_silent_by", ["peer_left", "missed"])
def test_a_peer_that_was_taken_for_silent_has_left_once_its_goodbye_is_read(told: Told, found_silent_by: str) -> None:
    told.training(A)
    told.line(A, 2.0, "peer_joined", peer=B, device="H100")
    told.line("" if found_silent_by == "missed" else A, 3.0, found_silent_by, peer=B, reason="silent")
    assert told.row(B)["state"] == "silent"
    told.line(A, 5.0, "goodbye", peer=B)
    assert (told.row(B)["state"], told.view.problems) == ("left", [])
    told.view.tick(6.0)
    assert not any(problem[1] == told.row(B)["number"] for problem in told.view.problems)


def test_what_is_read_late_of_a_peer_that_has_left_brings_it_not_back(told: Told) -> None:
    told.training(A)
    told.line(A, 2.0, "peer_joined", peer=B, device="H100")
    told.line(A, 3.0, "peer_left", peer=B, reason="left")
    told.record(2.9, B)
    told.line(A, 2.5, "peer_joined", peer=B, device="H100")
    assert told.row(B)["state"] == "left"
    told.record(9.0, B)
    assert told.row(B)["state"] == "training"


def test_a_record_tells_of_a_peer_without_a_journal_here(told: Told) -> None:
    told.record(1.0, B, (1, 3))
    row = told.row(B)
    assert (row["loss"], row["tokens_per_s"], row["exchanges"], row["first"]) == (1.5, 70.0, [3, 2, 1], 1)
    assert row["shares"][0] == 0.9


def test_a_journal_knows_better_than_a_record(told: Told) -> None:
    told.training(A)
    told.record(2.0, A, loss=9.0, region="home")
    assert told.row(A)["loss"] == 2.0
    assert told.row(A)["region"] == "home"


def test_a_held_out_loss_has_the_time_of_its_measurement(told: Told) -> None:
    told.training(A)
    told.line(A, 10.0, "eval", tokens=1, loss=2.5, seconds=0.1)
    told.record(20.0, B, held_out=3.0)
    told.view.tick(21.0)
    assert (told.row(A)["evaluated"], told.row(B)["evaluated"]) == (10.0, 0.0)
    assert (told.view.totals.held_out, told.view.totals.evaluated) == (2.5, 10.0)
    told.line(A, 95.0, "eval", tokens=1, loss=2.5, seconds=0.1)
    assert told.row(A)["evaluated"] == 95.0


def test_layers_that_are_held_again_are_no_problem_any_more(told: Told) -> None:
    told.training(A)
    told.line(A, 2.0, "status", first=0, last=4, window_s=2.0, bound="", links=[])
    told.line(A, 3.0, "unheld", reason="no peer that trains holds layers 4 to 5", first=4, last=6)
    told.step(A, 4.0)
    told.view.tick(5.0)
    assert [words for _, _, words in told.view.problems] == ["no peer that trains holds layers 4 to 5"]
    told.line(A, 6.0, "held")
    told.view.tick(7.0)
    assert told.view.problems == []


def test_a_held_out_loss_that_records_repeat_is_drawn_once(told: Told) -> None:
    for t, held_out in ((1.0, 3.0), (2.0, 3.0), (3.0, 2.5), (4.0, 2.5)):
        told.record(t, B, held_out=held_out)
        told.view.tick(t)
    assert told.view.timeline.since(0, ["held_out"])["series"]["held_out"] == [None, None, 2.5, None]


def test_links_have_rates_both_ways_and_the_last_exchange(told: Told) -> None:
    told.training(A, B)
    told.line(A, 2.0, "status", first=0, last=4, links=[[B[-8:], 1000, 0.05]])
    told.line(B, 2.0, "status", first=0, last=4, links=[[A[-8:], 3000, 0.04]])
    told.line(A, 3.0, "exchange", partner=B, outcome="done")
    (row,) = told.view.links.newest()
    assert dict(zip(link_view.LINK_ROW, row, strict=True)) == {
        **{"low": 0, "high": 1, "to_low": 1000, "to_high": 3000, "latency_s": 0.04},
        **{"used_at": 3.0, "outcome": "done", "done": 1, "failed": 0},
    }


def test_the_totals_are_those_of_the_peers_that_train(told: Told) -> None:
    told.training(A, B)
    told.step(B, 2.0, loss=1.0)
    told.view.tick(2.5)
    totals = told.view.totals
    assert (totals.live, totals.training, totals.tokens, totals.step) == (2, 2, 3000, told.row(B)["step"])
    assert totals.loss == pytest.approx(1.95)  # of 2 and 1.9, as the shown loss follows slowly


def test_after_everything_changes_bring_only_what_is_new(told: Told) -> None:
    told.training(A, B)
    told.view.tick(2.0)
    told.view.changes()
    told.step(A, 3.0)
    told.view.tick(3.5)
    changes = told.view.changes()
    assert [row[0] for row in changes["peers"]] == [0]
    assert changes["events"] == []
    assert changes["timeline"]["first"] == 1
    assert told.view.changes()["peers"] == []


def test_changes_put_together_are_everything(told: Told) -> None:
    """What a browser does: it begins with everything, and puts each update in its place."""
    told.training(A, B)
    told.view.tick(2.0)
    told.view.changes()
    known = json.loads(strict_json.dumps(told.view.snapshot()))
    for t in range(3, 500):
        told.step(A, float(t), loss=2.0 - t / 1000)
        if t % 50 == 0:
            told.line(B, float(t), "exchange", partner=A, outcome="done")
        told.view.tick(t + 0.5)
        update = json.loads(strict_json.dumps(told.view.changes()))
        rows = {row[0]: row for row in known["peers"]} | {row[0]: row for row in update["peers"]}
        links = {(row[0], row[1]): row for row in known["links"]} | {(row[0], row[1]): row for row in update["links"]}
        first = update["timeline"]["first"]
        series = {
            name: (known["timeline"]["series"].get(name, [None] * first)[:first] if first else []) + values
            for name, values in update["timeline"]["series"].items()
        }
        events = known["events"] + update["events"]
        known = update | {"peers": list(rows.values()), "links": list(links.values()), "events": events}
        known["timeline"] |= {"series": series}
    everything = json.loads(strict_json.dumps(told.view.snapshot()))
    for name in ("peers", "links", "events", "totals", "problems", "now"):
        assert known[name] == everything[name], name
    assert known["timeline"]["series"] == everything["timeline"]["series"]


def test_peers_that_have_gone_make_room_for_newcomers(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_view, "PEERS_SHOWN", 2)
    told.training(A, B)
    told.line("C", 3.0, "started", peer="C")
    assert told.view.uncounted == 1
    told.line(A, 4.0, "stopped", reason="interrupted")
    told.training("C", t=5.0)
    told.view.tick(6.0)
    assert set(told.view.peers) == {B, "C"}
    assert told.view.totals.tokens == 3000
    assert told.view.history(0) is None
    assert told.view.changes()["forgotten"] == [0], "browsers forget it, too"
    assert told.view.changes()["forgotten"] == []


def test_an_update_has_a_bounded_number_of_rows_and_the_others_follow(told: Told) -> None:
    told.training(*(f"peer{number}" for number in range(600)))
    told.view.tick(2.0)
    sizes = [len(told.view.changes()["peers"]) for _ in range(4)]
    assert sizes == [swarm_view.ROWS_AT_ONCE, swarm_view.ROWS_AT_ONCE, 100, 0]


def test_the_losses_of_many_peers_are_drawn_as_a_median_and_a_range(told: Told) -> None:
    told.training(*(f"peer{number}" for number in range(40)))
    told.view.tick(2.0)
    assert not [name for name in told.view.snapshot()["timeline"]["series"] if name.startswith("loss ")]
    assert {"median", "low", "high"} <= set(told.view.snapshot()["timeline"]["series"])


HOSTILE = "<img src=x onerror=alert(1)>[red]\x1b[31m\u202e"


@pytest.mark.parametrize(
    "line",
    [
        {"event": "step", "t": 1.0},
        {"event": "step", "t": 1.0, "tokens": "many", "loss": "nan", "seconds": None, "aside": 5},
        {"event": "step", "t": float("nan")},
        {"event": "status", "t": 1.0, "links": [[1], "x", None, [B, 1.0]], "first": {}, "last": []},
        {"event": "record", "t": 1.0, "peer": "new", "record": 5},
        {"event": "record", "t": 1.0, "peer": "new", "record": {"run": "r", "standing": [1, {}, "x"]}},
        {"event": "exchange", "t": 1.0, "partner": 7, "outcome": ["done"], "reason": HOSTILE},
        {"event": "peer_joined", "t": 1.0, "peer": B, "device": HOSTILE, "region": HOSTILE},
        {"event": "peer_joined", "t": 1.0, "peer": B, "name": HOSTILE},
        {"event": "started", "t": 1.0, "peer": A, "name": HOSTILE, "stop_after": HOSTILE},
        {"event": "facts", "t": 1.0, "facts": {"stop_after": HOSTILE, "since": "long"}},
        {"event": "status", "t": 1.0, "bound": HOSTILE},
        {"event": "plan", "t": 1.0, "reason": HOSTILE, "cost": "much"},
        {"event": "joined", "t": 1.0, "donors": 5},
        {"event": "move", "t": 1.0, "outcome": "done", "first": "x", "last": None},
        {"event": "facts", "t": 1.0, "facts": 5},
        {"event": None, "t": 1.0},
        {"event": "step", "t": 10**400, "step": 10**400},
        {"event": "status", "t": 1.0, "links": [[B, math.inf, 0.1], [B, 10**400, -math.inf]]},
        {"event": "status", "t": 1.0, "first": -1e17, "last": 1e17},
        {"event": "exchange", "t": 1.0, "partner": HOSTILE, "outcome": "done", "reason": ""},
        {"event": "started", "t": 1.0, "peer": A, "throttle": -5, "first": 5, "last": 2},
    ],
)
def test_whatever_a_line_has_in_it_the_view_stays_whole_and_its_text_plain(told: Told, line: dict[str, Any]) -> None:
    told.training(A, B)
    if (found := PAGE_LINES.parse(line)) is not None:
        told.view.take(A, found)
    told.view.tick(2.0)
    shown = strict_json.dumps(told.view.snapshot())
    assert "\x1b" not in shown
    assert "\u202e" not in json.loads(shown).__repr__()
    assert all(0 <= peer.device.first <= peer.device.last <= MOST_LAYERS for peer in told.view.peers.values())


def test_a_name_is_as_long_as_names_are_whoever_wrote_it(told: Told) -> None:
    told.training(A)
    told.line(A, 2.0, "exchange", partner="x" * 200, outcome="done")
    assert max(map(len, told.view.peers)) == SHOWN_CHARS
    assert PAGE_LINES.parse({"t": 2.0, "event": "exchange", "partner": "x" * 100_000, "outcome": "done"}) is None


def test_reasons_that_partners_make_up_do_not_add_up(told: Told) -> None:
    told.training(A)
    for number in range(100):
        told.line(A, 2.0, "exchange", partner=B, outcome="failed", reason=f"word-{number}")
    told.line(A, 2.0, "exchange", partner=B, outcome="failed", reason="deadline")
    assert told.row(A)["reasons"] == {"other": 100, "deadline": 1}


# Lost peers, names, ages, windows and the goal


def test_a_lost_peer_is_listed_until_it_returns_however_long_that_takes(told: Told) -> None:
    told.training(A, B)
    told.line("", 2.5, "missed", peer=B, reason="killed by signal 9", certain=True)
    for now in (3.0, 20.0, 1e6):
        told.step(A, now)
        told.view.tick(now)
        assert told.view.snapshot()["lost"] == told.view.changes()["lost"] == [told.row(B)["number"]]
    told.line(B, 1e6 + 1, "started", peer=B)
    assert told.row(B)["number"] not in told.view.snapshot()["lost"]


def test_a_peer_that_said_goodbye_is_not_lost(told: Told) -> None:
    told.training(A, B)
    told.line(B, 2.0, "stopped", reason="interrupted")
    told.line("", 3.0, "missed", peer=B, reason="its process is gone", certain=True)
    told.view.tick(4.0)
    assert told.view.snapshot()["lost"] == []


def test_a_lost_peer_makes_room_after_those_that_have_left(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_view, "PEERS_SHOWN", 2)
    told.training(A, B)
    told.line("", 2.0, "missed", peer=A, reason="killed", certain=True)
    told.line(B, 3.0, "stopped", reason="interrupted")
    told.training("C", t=4.0)
    assert set(told.view.peers) == {A, "C"}


def test_a_peer_is_named_by_its_journal_by_others_and_by_its_record(told: Told) -> None:
    told.line(A, 0.0, "started", peer=A, name="ann")
    told.line(A, 1.0, "peer_joined", peer=B, device="cpu", name="bob")
    assert (told.row(A)["name"], told.row(B)["name"]) == ("ann", "bob")
    told.record(2.0, "QmC")
    assert told.row("QmC")["name"] == ""


def test_windows_have_what_bounds_them_and_checkpoints_their_time(told: Told) -> None:
    told.training(A, B)
    assert (told.row(A)["bound"], told.row(A)["saved"]) == ("", 0.0)
    told.line(A, 2.0, "status", window_s=4.0, bound="link")
    told.line(B, 2.0, "status", window_s=0.5, bound="")
    told.line(A, 3.0, "checkpoint", step=1, bytes=5, seconds=0.1)
    assert (told.row(A)["window_s"], told.row(A)["bound"], told.row(A)["saved"]) == (4.0, "link", 3.0)
    assert told.row(B)["bound"] == "nothing"


def test_the_goal_is_that_of_the_command_or_of_the_peers(told: Told) -> None:
    told.training(A)
    assert told.view.snapshot()["goal"] == {}
    told.line(A, 10.0, "started", peer=A, stop_after="100s")
    told.line(A, 10.0, "joined")
    told.step(A, 20.0)
    told.view.tick(35.0)
    assert told.view.snapshot()["goal"] == {"text": "100s", "share": 0.25, "left_s": 75}
    told.view.learn({"stop_after": "50s", "since": 10.0})
    assert told.view.snapshot()["goal"] == {"text": "50s", "share": 0.5, "left_s": 25}


def test_a_simulation_says_that_its_clock_is_virtual(told: Told) -> None:
    told.line("", 0.0, "now")
    assert told.view.facts["virtual"] is True
