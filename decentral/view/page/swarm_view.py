"""Compute the state that the live page shows from lines of journals and DHT records, and the changes of the state.

    take(peer, line)     update from a line of this peer's journal, or from a line of a page source (source_lines.py)
    tick(now)            about once a second: find silent peers, compute the swarm's totals, list problems
    snapshot() changes() the whole state for a new browser, and what has changed since the last update

Start reading at `SwarmView`. It does no I/O, and its memory is bounded. If the page reads a peer's own journal, the
peer counts as silent when it writes no lines. Any other peer counts as silent when a source reports that the peer does
not answer. Control characters are removed from texts that peers chose, and the page never interprets these texts.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from decentral.core.ids import PeerId, suffix
from decentral.core.journal import events as journal
from decentral.core.journal.field_kinds import OUTCOMES, MeasuredLink
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import KINDS
from decentral.core.times import duration
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase
from decentral.view.page.goal import amount_of, goal_json, towards_time
from decentral.view.page.leaders import LEADER_ROW, Leaders
from decentral.view.page.link_view import LINK_ROW, LinkTable
from decentral.view.page.peer_view import LIVE, LOST, ROW, PageState, PeerView, gone_words
from decentral.view.page.problems import Problem, RecentTroubles, RunKind
from decentral.view.page.source_lines import FactsLine, MissedLine, NowLine, PageLine, PlaceLine, RecordLine
from decentral.view.page.timeline import Timeline
from decentral.view.page.totals import TOTAL_SERIES, Totals, totals_of

PEERS_SHOWN = 4096  # at most this many peers are shown; a new peer replaces one that is gone, or else is left out
ROWS_AT_ONCE = 250  # an update has at most this many peers; further changed peers follow in the next updates
SERIES_SHOWN = 12  # a chart of more peers than this shows the median and the middle 80% instead of each peer's loss
UNWRITTEN_S = 30.0  # a peer counts as silent after this time without a journal line; usually there is one each second
SILENT_GAPS = 4  # a peer counts as silent only after a pause this many times as long as its longest recent pause
MISSED_S = 3.0  # a peer that another peer cannot reach counts as silent after this time without a journal line
PLAN_CHARS = 1000
EVENTS_SHOWN = 300
EVENTS_AT_ONCE = 100  # an update of the page has at most this many events; older ones are left out


@dataclass(slots=True)
class EventLog:
    """Store of the latest events. A row is [number of the event, Unix time, number of the peer, level, text]."""

    rows: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    count: int = 0
    _settled: int = 0

    def add(self, t: Seconds, peer: int, level: str, words: str) -> None:
        """Add an event, unless the last row has the same peer, level and words."""
        if self.rows and self.rows[-1][2:] == [peer, level, words]:
            return
        self.count += 1
        self.rows.append([self.count, round(t, 1), peer, level, words])

    def changed(self) -> list[list[Any]]:
        """Return the rows that were added since the last call of `settle`, but only the latest EVENTS_AT_ONCE rows."""
        return [row for row in self.rows if row[0] > self._settled][-EVENTS_AT_ONCE:]

    def settle(self) -> None:
        """Mark all rows as sent, so that `changed` does not return them again."""
        self._settled = self.count


@dataclass(slots=True)
class SwarmView:
    """The state of a swarm that the live page shows."""

    facts: JsonObject = field(default_factory=dict)
    now: Seconds = 0.0
    peers: dict[str, PeerView] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    links: LinkTable = field(default_factory=LinkTable)
    events: EventLog = field(default_factory=EventLog)
    totals: Totals = field(default_factory=Totals)
    plan: JsonObject = field(default_factory=dict)
    leaders: Leaders = field(default_factory=Leaders)
    troubles: RecentTroubles = field(default_factory=RecentTroubles)
    problems: list[Problem] = field(default_factory=list)
    uncounted: int = 0  # number of lines ignored because their peers exceed PEERS_SHOWN
    _by_suffix: dict[str, PeerView] = field(default_factory=dict)
    _changed: dict[int, PeerView] = field(default_factory=dict)
    _numbers: int = 0
    # Numbers of the peers that were removed since the last call of `changes`.
    _forgotten: deque[int] = field(default_factory=lambda: deque(maxlen=PEERS_SHOWN))

    def take(self, peer: str, line: PageLine) -> None:
        """Update the view from a line of a peer's journal or of a source.

        Args:
            peer: The id of the peer whose journal has the line; "" if the source wrote the line.
            line: The next line of this peer. Lines of several peers come roughly in the order of their times.
        """
        t, event = line.t, line.event
        self.now = max(self.now, t)
        match event:
            case NowLine():
                self.learn({"virtual": True})
            case FactsLine(facts=facts):
                self.learn(facts)
            case PlaceLine():
                if (placed := self._view(event.peer, t)) is not None:
                    placed.device.place(event.device, event.region, event.throttle)
                    self._changed[placed.number] = placed
            case RecordLine():
                self._recorded(t, event)
            case MissedLine():
                self._missed(t, event.peer, event.reason, event.certain)
            case _:
                if (view := self._view(peer, t)) is not None:
                    self._own_line(view, t, event)

    def learn(self, facts: JsonObject) -> None:
        """Add named facts about the run, such as its settings."""
        self.facts |= facts

    def tick(self, now: Seconds) -> None:
        """Find silent peers, compute totals and list problems, as of Unix time `now`."""
        self.now = max(self.now, now)
        for view in self.peers.values():
            self._look_after(view)
        self.totals = totals_of(self.peers.values(), self.totals, self.now)
        for name, value in self.totals.series().items() if self.totals.live else ():
            self.timeline.put(name, self.now, value, total=name in TOTAL_SERIES)
        self.leaders.tick(self.now)
        self.problems = self.troubles.problems(self.peers.values(), self.now, self._run_kind())

    def snapshot(self) -> JsonObject:
        """Return the whole state as JSON for a new browser. This does not mark any change as sent."""
        fixed = {"row": ROW, "link_row": LINK_ROW, "leader_row": LEADER_ROW}
        fixed |= {"kinds": KINDS, "outcomes": OUTCOMES, "live_states": LIVE}
        rows = [view.row() for view in self.peers.values()]
        events = list(self.events.rows)
        return fixed | self._state(rows, self.links.newest(), events, 0)

    def changes(self) -> JsonObject:
        """Return the changes since the last call as JSON, for at most ROWS_AT_ONCE peers, and mark them as sent.

        `forgotten` has the numbers of the peers that are not shown any more.
        """
        rows = [self._changed.pop(one).row() for one in list(self._changed)[:ROWS_AT_ONCE]]
        found = self._state(rows, self.links.changed(), self.events.changed(), self.timeline.changed)
        found["forgotten"] = list(self._forgotten)
        self._forgotten.clear()
        self.links.settle()
        self.events.settle()
        self.timeline.settle()
        return found

    def history(self, one: int) -> JsonObject | None:
        """Return the loss of the peer with this number and the swarm's tokens over time; None if it is not shown."""
        view = next((view for view in self.peers.values() if view.number == one), None)
        return None if view is None else self.timeline.since(0, ["tokens", view.loss_series])

    def _state(self, rows: list[Any], links: list[Any], events: list[Any], first: int) -> JsonObject:
        names = [*self.totals.series(), "held_out", *self._drawn()]
        timeline = self.timeline.since(first, names)
        whole = {"facts": self.facts, "now": round(self.now, 1), "totals": self.totals.to_json(), "plan": self.plan}
        parts = {"peers": rows, "links": links, "events": events, "timeline": timeline, "problems": self.problems}
        rest = {"lost": self._lost(), "goal": self._goal(), "leaders": self.leaders.rows}
        return whole | parts | rest | {"uncounted": self.uncounted}

    def _lost(self) -> list[int]:
        """Return the numbers of the peers that ended or fell silent without a goodbye and have not come back."""
        return [view.number for view in self.peers.values() if view.state in LOST]

    def _goal(self) -> JsonObject:
        """Return the swarm's goal and how far it is as JSON (goal.py): the command's goal, or that of the peers."""
        goal = amount_of(str(self.facts.get("stop_after", "")))
        since = self.facts.get("since")
        if goal is not None and goal.kind == "s" and isinstance(since, int | float):
            return goal_json(str(goal), [towards_time(goal.value, since, self.now)])
        training = [view.goal for view in self.peers.values() if view.state is PageState.TRAINING]
        known = [(str(one.goal), towards) for one in training if (towards := one.towards(self.now)) is not None]
        return goal_json(known[0][0] if known else "", [towards for _, towards in known])

    def _drawn(self) -> Iterable[str]:
        """Return the names of all peers' loss series, or [] if there are more than SERIES_SHOWN series."""
        known = [view for view in self.peers.values() if view.loss_series in self.timeline.series]
        return [view.loss_series for view in known] if len(known) <= SERIES_SHOWN else []

    def _own_line(self, view: PeerView, t: Seconds, event: journal.JournalEvent | None) -> None:
        was_live = view.live
        view.follow(t, event)
        self._changed[view.number] = view
        match event:
            case journal.JoinedLine():
                view.become(PageState.TRAINING, t)
            case journal.StepLine():
                if not was_live:
                    self.events.add(t, view.number, journal.GOOD, "is back")
                if event.loss is not None:
                    self.timeline.put(view.loss_series, t, event.loss)
            case journal.ExchangeLine():
                self._exchange(view, t, event)
            case journal.EvalLine():
                self._evaluated(view, t, event.loss)
            case journal.StatusLine():
                view.device.span(event.first, event.last)
                view.network.window(event.window_s, event.bound)
                view.progress.utilised(event.mfu)
                self._measured(view, event.links)
            case journal.PlanLine():
                said = {"reason": plain_text(event.reason, PLAN_CHARS), "digest": plain_text(event.digest)}
                self.plan = {"peer": view.number, "t": t, "cost": event.cost} | said
            case journal.MoveLine(outcome="done"):
                view.device.span(event.first, event.last)
            case journal.PeerJoinedLine():
                self._met(t, event)
            case journal.PeerLeftLine():
                self._missed(t, event.peer, event.reason)
            case journal.GoodbyeLine():
                self._missed(t, event.peer, "left")
            case journal.StatementLine():
                self.leaders.read(event)
            case journal.StoppedLine():
                view.become(PageState.LEFT, t, event.reason)
        if isinstance(event, journal.HeldLine | journal.StartedLine | journal.StoppedLine):
            self.troubles.held(view.number)
        if event is not None and (found := journal.told(event)) is not None:
            level, words = found
            self.events.add(t, view.number, level, words)
            if isinstance(event, journal.UnheldLine):
                self.troubles.unheld(view.number, range(event.first, event.last), words)
            else:
                self.troubles.told(t, view.number, level, words)
        view.hear(t)

    def _run_kind(self) -> RunKind:
        layers = self.facts.get("layers")
        return RunKind(layers if isinstance(layers, int) else 0, self.facts.get("algorithm") == "synchronous")

    def _evaluated(self, view: PeerView, t: Seconds, loss: float | None) -> None:
        if view.progress.judged(t, loss, view.own) and loss is not None:
            self.timeline.put("held_out", t, loss)

    def _exchange(self, view: PeerView, t: Seconds, line: journal.ExchangeLine) -> None:
        self.troubles.exchanged(t, line.outcome, line.reason)
        if (other := self._view(line.partner or "", t)) is not None:
            self.links.exchanged(view.number, other.number, t, line.outcome)

    def _measured(self, view: PeerView, links: Iterable[MeasuredLink]) -> list[PeerView]:
        """Record a peer's measurements of its links; return the peers at the other ends that the view knows."""
        partners = []
        for link in links:
            view.network.measured(link.bytes_per_s, link.round_trip_s, view.own)
            other = self._by_suffix.get(suffix(PeerId(link.partner)))
            if other is not None and other is not view:
                self.links.measured(view.number, other.number, link.bytes_per_s, link.round_trip_s)
                partners.append(other)
        return partners

    def _met(self, t: Seconds, line: journal.PeerJoinedLine) -> None:
        """Update the view of a peer that has joined, according to another peer's journal."""
        view = self._view(line.peer, t)
        if view is None or view.own or view.is_gone_since(t):
            return
        view.device.met(line.device, line.region)
        view.device.called(line.name)
        view.hear(t)
        self._changed[view.number] = view
        if view.become(PageState.TRAINING, t):
            self.events.add(t, view.number, journal.GOOD, "joined")

    def _recorded(self, t: Seconds, line: RecordLine) -> None:
        view, record = self._view(line.peer, t), line.record
        if view is None:
            return
        view.recorded(t, record)
        self.leaders.take(PeerId(line.peer), record)
        self._changed[view.number] = view
        if view.own or view.is_gone_since(t):
            return
        if view.progress.loss is not None:
            self.timeline.put(view.loss_series, t, view.progress.loss)
        self._evaluated(view, t, record.standing.held_out)
        links = (MeasuredLink(end, rate, latency_ms / 1e3) for end, rate, latency_ms in record.standing.links)
        for partner in self._measured(view, links):
            self.links.exchanged(view.number, partner.number, t, "")
        if view.become(PageState.TRAINING if record.phase is PeerPhase.TRAINING else PageState.JOINING, t):
            self.events.add(t, view.number, journal.GOOD, "is present")

    def _missed(self, t: Seconds, peer: str, why: str, certain: bool = False) -> None:
        """Record a report that a peer does not answer, or has said goodbye (`why` is "left").

        If `certain`, the peer's process has ended. If not, and the page reads the peer's own journal, the report is
        only stored, and `_look_after` decides whether the peer is silent. A goodbye turns "silent" into "left".
        """
        view = self.peers.get(peer)
        if view is None or not (view.live or (view.state is PageState.SILENT and why == "left")):
            return
        if certain:
            self._gone(view, t, PageState.ENDED, why)
        elif view.own:
            view.doubt(t, why)
        else:
            self._gone(view, t, PageState.LEFT if why == "left" else PageState.SILENT, why)

    def _look_after(self, view: PeerView) -> None:
        """Mark a training peer as silent if the page reads its journal and the journal has had no line for too long."""
        if not view.own or view.state is not PageState.TRAINING:
            return
        quiet_s = self.now - view.heard
        if view.doubted > view.heard and quiet_s > MISSED_S:
            self._gone(view, self.now, PageState.SILENT, f"{view.why}, says another peer")
        elif quiet_s > max(UNWRITTEN_S, SILENT_GAPS * view.gap_s):
            self._gone(view, self.now, PageState.SILENT, f"no line in its journal for {duration(quiet_s)}")

    def _gone(self, view: PeerView, t: Seconds, state: PageState, why: str) -> None:
        if view.become(state, t, why):
            self.troubles.held(view.number)
            self._changed[view.number] = view
            self.events.add(t, view.number, journal.PLAIN if state is PageState.LEFT else journal.BAD, gone_words(view))

    def _view(self, peer: str, t: Seconds) -> PeerView | None:
        """Return the view of the peer with this id; create it if needed. None for "", or if PEERS_SHOWN is reached."""
        view = self.peers.get(peer) or self.peers.get(peer := plain_text(peer))
        if view is None and peer and (len(self.peers) < PEERS_SHOWN or self._forget_one()):
            view = PeerView(self._numbers, peer, since=t)
            self._numbers += 1
            self.peers[peer] = self._by_suffix[suffix(PeerId(peer))] = self._changed[view.number] = view
        self.uncounted += view is None and peer != ""
        return view

    def _forget_one(self) -> bool:
        """Remove the peer that left longest ago, or else was lost longest ago; return False if no peer is gone."""
        known = (view for view in self.peers.values() if not view.live)
        gone = min(known, key=lambda view: (view.state in LOST, view.since), default=None)
        if gone is None:
            return False
        self.totals.forget(gone)
        del self.peers[gone.peer]
        self._forgotten.append(gone.number)
        self._by_suffix.pop(suffix(PeerId(gone.peer)), None)
        self._changed.pop(gone.number, None)
        self.timeline.drop(gone.loss_series)
        self.links.drop(gone.number)
        return True
