"""The swarm as the page shows it: lines of journals and records go in, what has changed comes out. Pure and bounded.

    take(peer, line)     a line of this peer's journal, or one that a source of the page makes (sources.py)
    tick(now)            about once a second: who is silent, the swarm's totals, what is wrong
    snapshot() changes() what a page gets first, and after each tick

A peer whose own journal is followed is silent when it writes nothing; another one when those that write say so. Texts
that peers chose are made plain here, and the page shows them as text.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from decentral.core.ids import PeerId, suffix
from decentral.core.journal.file import OUTCOMES
from decentral.core.line_fields import Line, count, finite, finite_value, layers, listed, number, text, time_of
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import KINDS
from decentral.core.units import Seconds
from decentral.view.page.events import BAD, GOOD, PLAIN, EventLog, told
from decentral.view.page.link_view import LINK_ROW, LinkTable
from decentral.view.page.peer_view import ROW, PeerView, gone_words
from decentral.view.page.problems import Problem, RecentTroubles, RunKind
from decentral.view.page.timeline import Timeline
from decentral.view.page.totals import TOTAL_SERIES, Totals, totals_of

PEERS_SHOWN = 4096  # beyond them those that have gone are forgotten, and newcomers are only counted
ROWS_AT_ONCE = 250  # peers in one update; the others follow in the next ones
SERIES_SHOWN = 12  # peers whose own loss is drawn; of more the median, and where four fifths of them are
UNWRITTEN_S = 30.0  # without a line of its own; a peer that trains writes one every second, its machine permitting
SILENT_GAPS = 4  # times as long as between its last lines: a slow peer writes less often
MISSED_S = 3.0  # a peer that others miss is silent if it wrote nothing for so long
PLAN_CHARS = 1000


@dataclass(slots=True)
class SwarmView:
    """`facts`: what is known of the run, by name."""

    facts: JsonObject = field(default_factory=dict)
    now: Seconds = 0.0
    peers: dict[str, PeerView] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    links: LinkTable = field(default_factory=LinkTable)
    events: EventLog = field(default_factory=EventLog)
    totals: Totals = field(default_factory=Totals)
    plan: JsonObject = field(default_factory=dict)
    troubles: RecentTroubles = field(default_factory=RecentTroubles)
    problems: list[Problem] = field(default_factory=list)
    uncounted: int = 0  # lines about peers for which there was no room
    _by_suffix: dict[str, PeerView] = field(default_factory=dict)
    _changed: dict[int, PeerView] = field(default_factory=dict)
    _numbers: int = 0  # given to peers so far

    def take(self, peer: str, line: Line) -> None:
        """Takes a line. Lines of one peer come in their order, those of several about in that of their times."""
        t, event = time_of(line), line.get("event")
        if t is None:
            return
        self.now = max(self.now, t)
        match event:
            case "now":
                return
            case "facts" if isinstance(facts := line.get("facts"), dict):
                self.learn(facts)
            case "place" if (placed := self._view(text(line, "peer"), t)) is not None:
                placed.device.place(line)
                self._changed[placed.number] = placed
            case "record":
                self._recorded(line, t)
            case "missed":
                self._missed(line, t)
            case _ if (view := self._view(peer, t)) is not None:
                self._own_line(view, t, str(event), line)

    def learn(self, facts: JsonObject) -> None:
        """Take more of what is known of the run."""
        self.facts |= facts

    def tick(self, now: Seconds) -> None:
        """Time has passed."""
        self.now = max(self.now, now)
        for view in self.peers.values():
            self._look_after(view)
        self.totals = totals_of(self.peers.values(), self.totals, self.now)
        for name, value in self.totals.series().items() if self.totals.live else ():
            self.timeline.put(name, self.now, value, total=name in TOTAL_SERIES)
        self.problems = self.troubles.problems(self.peers.values(), self.now, self._run_kind())

    # What a page gets

    def snapshot(self) -> JsonObject:
        """All that a page shows. It goes on with `changes` from the last time they were settled."""
        fixed = {"row": ROW, "link_row": LINK_ROW, "kinds": KINDS, "outcomes": OUTCOMES}
        rows = [view.row() for view in self.peers.values()]
        events = list(self.events.rows)
        return fixed | self._state(rows, self.links.newest(), events, 0)

    def changes(self) -> JsonObject:
        """What has changed since this was called last."""
        rows = [self._changed.pop(one).row() for one in list(self._changed)[:ROWS_AT_ONCE]]
        found = self._state(rows, self.links.changed(), self.events.changed(), self.timeline.changed)
        self.links.settle()
        self.events.settle()
        self.timeline.settle()
        return found

    def history(self, one: int) -> JsonObject | None:
        """The loss of one peer over time; None if there is no such peer."""
        view = next((view for view in self.peers.values() if view.number == one), None)
        return None if view is None else self.timeline.since(0, ["tokens", view.series])

    def _state(self, rows: list[Any], links: list[Any], events: list[Any], first: int) -> JsonObject:
        names = [*self.totals.series(), "held_out", *self._drawn()]
        timeline = self.timeline.since(first, names)
        whole = {"facts": self.facts, "now": round(self.now, 1), "totals": self.totals.to_json(), "plan": self.plan}
        parts = {"peers": rows, "links": links, "events": events, "timeline": timeline, "problems": self.problems}
        return whole | parts | {"uncounted": self.uncounted}

    def _drawn(self) -> Iterable[str]:
        """Series of single peers, where they are few."""
        known = [view for view in self.peers.values() if view.series in self.timeline.series]
        return [view.series for view in known] if len(known) <= SERIES_SHOWN else []

    # A peer's own journal

    def _own_line(self, view: PeerView, t: Seconds, event: str, line: Line) -> None:
        view.follow()
        self._changed[view.number] = view
        match event:
            case "started" | "continued":
                view.started(t, line)
            case "joined":
                view.become("training", t)
            case "step":
                self._step(view, t, line)
            case "exchange":
                self._exchange(view, t, line)
            case "eval":
                self._evaluated(view, t, finite(line, "loss"))
            case "traffic":
                view.network.moved(line)
            case "status":
                view.device.span(line)
                view.network.window(line)
                self._measured(view, line)
            case "plan":
                said = {"peer": view.number, "reason": text(line, "reason", PLAN_CHARS), "digest": text(line, "digest")}
                self.plan = said | {"t": t, "cost": number(line, "cost")}
            case "move" if line.get("outcome") == "done":
                view.device.span(line)
            case "peer_joined":
                self._met(line, t)
            case "peer_left":
                self._missed(line, t)
            case "goodbye":
                self._missed({**line, "reason": "left"}, t)
            case "stopped":
                view.become("left", t, text(line, "reason"))
        if event in ("held", "started", "stopped"):
            self.troubles.held(view.number)
        if (found := told(line)) is not None:
            level, words = found
            self.events.add(t, view.number, level, words)
            if event == "unheld":
                self.troubles.unheld(view.number, layers(line), words)
            else:
                self.troubles.told(t, view.number, level, words)
        view.hear(t)

    def _run_kind(self) -> RunKind:
        return RunKind(count(self.facts, "layers"), self.facts.get("algorithm") == "synchronous")

    def _step(self, view: PeerView, t: Seconds, line: Line) -> None:
        if not view.live:
            self.events.add(t, view.number, GOOD, "is back")
        view.stepped(t, line)
        if (loss := finite(line, "loss")) is not None:
            self.timeline.put(view.series, t, loss)

    def _evaluated(self, view: PeerView, t: Seconds, loss: float | None) -> None:
        if view.work.judged(t, loss, view.own) and loss is not None:
            self.timeline.put("held_out", t, loss)

    def _exchange(self, view: PeerView, t: Seconds, line: Line) -> None:
        view.work.exchanged(line)
        outcome = text(line, "outcome")
        self.troubles.exchanged(t, outcome, text(line, "reason"))
        if (other := self._view(text(line, "partner"), t)) is not None:
            self.links.exchanged(view.number, other.number, t, outcome)

    def _measured(self, view: PeerView, line: Line) -> list[PeerView]:
        """What it measured of its links: [the end of the partner's id, bytes/s from it, round trip in s] each.

        Returns the partners, the latest used first.
        """
        partners = []
        for one in listed(line, "links"):
            match one:
                case [str(partner), *measured] if len(measured) == 2:
                    rate, latency_s = (max(0.0, finite_value(value) or 0.0) for value in measured)
                    view.network.measured(rate, latency_s, view.own)
                    other = self._by_suffix.get(suffix(PeerId(partner)))
                    if other is not None and other is not view:
                        self.links.measured(view.number, other.number, rate, latency_s)
                        partners.append(other)
        return partners

    # What is said of peers by others

    def _met(self, line: Line, t: Seconds) -> None:
        """Another peer has heard of this one."""
        view = self._view(text(line, "peer"), t)
        if view is None or view.own or view.is_gone_since(t):
            return
        view.device.met(line)
        view.hear(t)
        self._changed[view.number] = view
        if view.become("training", t):
            self.events.add(t, view.number, GOOD, "joined")

    def _recorded(self, line: Line, t: Seconds) -> None:
        view = self._view(text(line, "peer"), t)
        if view is None:
            return
        view.recorded(t, line)
        self._changed[view.number] = view
        if view.own or view.is_gone_since(t):
            return
        if view.work.loss is not None:
            self.timeline.put(view.series, t, view.work.loss)
        self._evaluated(view, t, finite(line, "held_out"))
        for partner in self._measured(view, line):
            self.links.exchanged(view.number, partner.number, t, "")
        if view.become("training" if line.get("phase") == "training" else "joining", t):
            self.events.add(t, view.number, GOOD, "is there")

    def _missed(self, line: Line, t: Seconds) -> None:
        """Somebody does not reach a peer any more, or has read its goodbye, which may come after failed questions."""
        view, why = self.peers.get(text(line, "peer")), text(line, "reason")
        if view is None or not (view.live or (view.state == "silent" and why == "left")):
            return
        if line.get("certain") is True:
            self._gone(view, t, "ended", why)
        elif view.own:
            view.doubt(t, why)
        else:
            self._gone(view, t, "left" if why == "left" else "silent", why)

    def _look_after(self, view: PeerView) -> None:
        """A peer that has written its own journal until now, and does not go on."""
        if not view.own or view.state != "training":
            return
        quiet_s = self.now - view.heard
        if view.doubted > view.heard and quiet_s > MISSED_S:
            self._gone(view, self.now, "silent", f"{view.why}, says another peer")
        elif quiet_s > max(UNWRITTEN_S, SILENT_GAPS * view.gap_s):
            self._gone(view, self.now, "silent", f"no line in its journal for {quiet_s:.0f} s")

    def _gone(self, view: PeerView, t: Seconds, state: str, why: str) -> None:
        if view.become(state, t, why):
            self.troubles.held(view.number)
            self._changed[view.number] = view
            self.events.add(t, view.number, PLAIN if state == "left" else BAD, gone_words(view))

    def _view(self, peer: str, t: Seconds) -> PeerView | None:
        """The peer, from its first line on; None if there is no room for one more."""
        view = self.peers.get(peer)
        if view is None and peer and (len(self.peers) < PEERS_SHOWN or self._forget_one()):
            view = PeerView(self._numbers, peer, since=t)
            self._numbers += 1
            self.peers[peer] = self._by_suffix[suffix(PeerId(peer))] = self._changed[view.number] = view
        self.uncounted += view is None and peer != ""
        return view

    def _forget_one(self) -> bool:
        """Forgets the peer that has been gone for longest; False if none has gone."""
        gone = min((view for view in self.peers.values() if not view.live), key=lambda view: view.since, default=None)
        if gone is None:
            return False
        self.totals.forget(gone)
        del self.peers[gone.peer]
        self._by_suffix.pop(suffix(PeerId(gone.peer)), None)
        self._changed.pop(gone.number, None)
        self.timeline.drop(gone.series)
        self.links.drop(gone.number)
        return True
