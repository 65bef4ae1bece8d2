"""One peer as the page shows it: what its own journal says, or what its record in the DHT says."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from decentral.core.journal.events import JournalEvent, PeerFacts, StartedLine, StepLine
from decentral.core.journal.field_kinds import MOST_LAYERS, OUTCOMES
from decentral.core.journal.peer_totals import ExchangeTotals, PeerTotals, WorkDone
from decentral.core.plain_text import plain_text
from decentral.core.time_spent import KINDS, TimeSpent
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerRecord

SPEED_S = 10.0  # time constant of the average of tokens/s
LOSS_SHARE = 0.1  # of the newest step line in the loss that is shown
REASONS_SHOWN = 4
LIVE = ("joining", "training")
ROW = (  # what a peer's row has, in this order
    *("number", "peer", "state", "why", "since", "heard", "device", "region", "software", "throttle", "first", "last"),
    *("memory_bytes", "step", "tokens", "tokens_per_s", "loss", "held_out", "shares", "exchanges", "reasons"),
    *("sent_bytes", "received_bytes", "up", "down", "latency_s", "window_s", "evaluated"),
)


@dataclass(slots=True)
class DeviceView:
    """What the peer is: declared or measured once."""

    device: str = ""
    region: str = ""
    software: str = ""
    throttle: float = 1.0
    memory_bytes: int = 0
    first: int = 0  # span [first, last); none is known where both are 0
    last: int = 0

    def place(self, device: str, region: str, throttle: float) -> None:
        """Take what and where the peer is."""
        self.device = plain_text(device)
        self.region = plain_text(region) or self.region
        self.throttle = throttle or 1.0

    def span(self, first: int, last: int) -> None:
        """Take layers [first, last); there are none where a line lacks them."""
        if first < last <= MOST_LAYERS:
            self.first, self.last = first, last

    def met(self, device: str, region: str) -> None:
        """Take what another peer has heard of it."""
        self.device, self.region = plain_text(device), plain_text(region)

    def recorded(self, record: PeerRecord, own: bool) -> None:
        """Take what its record says, but for what its own journal says better."""
        self.region = self.region or plain_text(record.profile.region)
        self.software, self.memory_bytes = plain_text(record.profile.software), record.profile.memory_bytes
        if not own:
            self.device = plain_text(record.profile.device)
            self.span(record.first, record.last)


@dataclass(slots=True)
class NetworkView:
    """What the peer measures of its links. Rates in bytes/s; 0: not known."""

    up: float = 0.0
    down: float = 0.0
    latency_s: Seconds = 0.0
    window_s: Seconds = 0.0

    def window(self, window_s: Seconds) -> None:
        self.window_s = window_s

    def measured(self, rate: float, latency_s: Seconds, own: bool) -> None:
        """Take what it measured of one link. Only its own journal says what its downlink carries."""
        self.down = max(self.down, rate) if own else self.down
        self.latency_s = min((known for known in (self.latency_s, latency_s) if known), default=0.0)

    def recorded(self, record: PeerRecord, own: bool) -> None:
        """Take what its record says, but for what its own journal says better."""
        self.up, self.down = record.profile.up, self.down or record.profile.down
        if not own:
            self.latency_s, self.window_s = record.profile.latency_s, record.window_s


@dataclass(slots=True)
class ProgressView:
    """How fast the peer trains, and how well, smoothed as people look at it."""

    tokens_per_s: float = 0.0
    loss: float | None = None
    held_out: float | None = None
    evaluated: Seconds = 0.0  # when; 0.0: not known, as a record does not say it

    def started(self) -> None:
        self.tokens_per_s = 0.0

    def stepped(self, line: StepLine, since_s: Seconds) -> None:
        """Take steps whose line comes so long after the peer's line before."""
        took = max(1e-3, since_s if self.tokens_per_s else line.seconds)
        share = min(1.0, took / SPEED_S) if self.tokens_per_s else 1.0
        self.tokens_per_s += (line.tokens / took - self.tokens_per_s) * share
        if line.loss is not None:
            self.loss = line.loss if self.loss is None else self.loss + LOSS_SHARE * (line.loss - self.loss)

    def judged(self, t: Seconds, held_out: float | None, own: bool) -> bool:
        """Take the held-out loss. Return whether it is a new one: a record repeats it, and the first may be old."""
        news = held_out is not None and held_out != self.held_out
        fresh = news and (own or self.held_out is not None)
        again = held_out is not None and own  # its journal has a line for each evaluation
        self.held_out, self.evaluated = held_out, t if fresh or again else self.evaluated
        return fresh

    def recorded(self, record: PeerRecord) -> None:
        """Take what its record says, but for its held-out loss."""
        self.tokens_per_s, self.loss = record.profile.tokens_per_s, record.standing.loss


@dataclass(slots=True)
class PeerView:
    """`heard`: the time of its own last line, or of its last record."""

    number: int
    peer: str
    state: str = "joining"  # joining, training; left, silent, ended (its process has, without a goodbye)
    why: str = ""  # of the state
    since: Seconds = 0.0  # when the state began
    heard: Seconds = 0.0
    doubted: Seconds = 0.0  # when another peer last missed it
    gap_s: Seconds = 0.0  # the longest between two of its last step lines
    own: bool = False  # whether its own journal is followed
    device: DeviceView = field(default_factory=DeviceView)
    network: NetworkView = field(default_factory=NetworkView)
    progress: ProgressView = field(default_factory=ProgressView)
    totals: PeerTotals = field(default_factory=PeerTotals)  # of its journal; without one, of its record

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def is_gone_since(self, t: Seconds) -> bool:
        """Return whether the peer left at `t` or later, so that a line of time `t` must not revive it."""
        return not self.live and t <= self.since

    @property
    def series(self) -> str:
        """The name of its loss in the timeline."""
        return f"loss {self.number}"

    def become(self, state: str, t: Seconds, why: str = "") -> bool:
        """Whether that is another state than before."""
        changed = state != self.state
        if changed:
            self.state, self.since = state, t
        self.why = plain_text(why)
        return changed

    @property
    def work(self) -> WorkDone:
        """What it has done in its present life."""
        return self.totals.work

    def follow(self, t: Seconds, event: JournalEvent | None) -> None:
        """Take a line of its own journal, which is believed rather than its records from now on."""
        if not self.own:
            self.own, self.totals = True, PeerTotals()
        self.totals.take(t, event)
        match event:
            case StartedLine():
                self.become("joining", t)
                self.progress.started()
            case StepLine():
                self._stepped(t, event)
        if isinstance(event, PeerFacts):
            self.device.place(event.device, event.region, event.throttle)
            self.device.span(event.first, event.last)

    def hear(self, t: Seconds) -> None:
        self.heard = max(self.heard, t)

    def doubt(self, t: Seconds, why: str) -> None:
        """Note that another peer misses it."""
        self.doubted, self.why = max(t, self.doubted), plain_text(why)

    def _stepped(self, t: Seconds, line: StepLine) -> None:
        if self.state != "training":
            self.become("training", t)
        elif self.heard:
            self.gap_s = max(t - self.heard, 0.9 * self.gap_s)
        self.progress.stepped(line, t - self.heard)

    def recorded(self, t: Seconds, record: PeerRecord) -> None:
        """Take what its record in the DHT says, but for its held-out loss. Its own journal knows better."""
        self.device.recorded(record, self.own)
        self.network.recorded(record, self.own)
        if not self.own:
            self.hear(t)
            self.progress.recorded(record)
            self.totals = PeerTotals(work=_work_of(record))

    def row(self) -> list[Any]:
        """The values of ROW, fit for JSON."""
        device, network, progress, work = self.device, self.network, self.progress, self.work
        outcomes, reasons = work.exchanges.outcomes, work.exchanges.reasons.most_common(REASONS_SHOWN)
        shares = [round(share, 3) for share in work.spent.shares().values()] if work.spent.total else None
        why = "" if self.live else self.why
        return [
            *(self.number, self.peer, self.state, why, round(self.since, 1), round(self.heard, 1)),
            *(device.device, device.region, device.software, device.throttle, device.first, device.last),
            *(device.memory_bytes, work.step, self.totals.tokens, round(progress.tokens_per_s, 1)),
            *(_short(progress.loss), _short(progress.held_out), shares),
            *([outcomes[outcome] for outcome in OUTCOMES], dict(reasons)),
            *(work.sent_bytes, work.received_bytes, round(network.up), round(network.down)),
            *(round(network.latency_s, 4), round(network.window_s, 2), round(progress.evaluated, 1)),
        ]


def gone_words(view: PeerView) -> str:
    """What has become of a peer that is not live, in words for people."""
    words = {"left": "left", "silent": f"is silent ({view.why})", "ended": f"has ended ({view.why})"}
    return words[view.state]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _work_of(record: PeerRecord) -> WorkDone:
    """What a record says that its peer has done. Of its time it says the shares."""
    told = record.standing
    ended = Counter({(outcome, ""): count for outcome, count in zip(OUTCOMES, told.exchanges, strict=True)})
    return WorkDone(
        step=record.step,
        tokens=record.tokens,
        spent=TimeSpent.by_kind({kind: share / 1000 for kind, share in zip(KINDS, told.shares, strict=False)}),
        exchanges=ExchangeTotals(ended),
        sent_bytes=told.sent_bytes,
        received_bytes=told.received_bytes,
    )
