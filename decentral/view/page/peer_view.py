"""Store what the page shows of one peer. The source is the peer's journal or, without a journal, its DHT record."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from decentral.core.journal.events import CheckpointLine, JournalEvent, PeerFacts, StartedLine, StepLine
from decentral.core.journal.field_kinds import MOST_LAYERS, OUTCOMES
from decentral.core.journal.peer_totals import ExchangeTotals, PeerTotals, WorkDone
from decentral.core.peer_names import PEER_NAME_CHARS
from decentral.core.plain_text import plain_text
from decentral.core.time_spent import KINDS, TimeSpent
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerRecord
from decentral.view.page.goal import GoalView

SPEED_S = 10.0  # tokens/s are an exponential moving average with this time constant
LOSS_SHARE = 0.1  # weight of a new loss in its exponential moving average
REASONS_SHOWN = 4  # a peer's row shows at most this many reasons of exchanges that failed or had no partner
BOUND_CHARS = 32
NOT_BOUND = "nothing"


class PageState(StrEnum):
    """What the live page says that a peer does. `map.js` and `style.css` have the states' colours."""

    JOINING = "joining"
    TRAINING = "training"
    LEFT = "left"  # with a goodbye message
    SILENT = "silent"  # others do not reach the peer
    ENDED = "ended"  # the process ended without a goodbye message


LIVE = (PageState.JOINING, PageState.TRAINING)  # a peer in one of these states is in the swarm
LOST = (PageState.SILENT, PageState.ENDED)  # a peer in one of these states is gone without a goodbye
ROW = (  # browsers get a peer as a list of these values
    *("number", "peer", "state", "why", "since", "heard", "device", "region", "software", "throttle", "first", "last"),
    *("memory_bytes", "step", "tokens", "tokens_per_s", "loss", "held_out", "shares", "exchanges", "reasons"),
    *("sent_bytes", "received_bytes", "up", "down", "latency_s", "window_s", "evaluated", "name", "bound", "saved"),
    *("mfu", "own"),
)


@dataclass(slots=True)
class DeviceView:
    """What the page shows of a peer's name, device, region, software and layers."""

    device: str = ""
    name: str = ""  # the name that the user gave the peer; "" if not known
    region: str = ""
    software: str = ""
    throttle: float = 1.0  # each step takes this many times as long, to imitate a slower device; 1.0: full speed
    memory_bytes: int = 0
    first: int = 0  # the peer holds the layers from `first` to `last` - 1; (0, 0): not known
    last: int = 0

    def place(self, device: str, region: str, throttle: float) -> None:
        """Set device, region and throttle to the values in the peer's own journal or in a PlaceLine."""
        self.device = plain_text(device)
        self.region = plain_text(region) or self.region
        self.throttle = throttle or 1.0

    def called(self, name: str) -> None:
        """Set the peer's name, unless it is ""."""
        self.name = plain_text(name, PEER_NAME_CHARS) or self.name

    def span(self, first: int, last: int) -> None:
        """Set the layers to [first, last). Do nothing if `last` is not above `first`, or exceeds MOST_LAYERS."""
        if first < last <= MOST_LAYERS:
            self.first, self.last = first, last

    def met(self, device: str, region: str) -> None:
        """Set device and region to the values that another peer's journal contains."""
        self.device, self.region = plain_text(device), plain_text(region)

    def recorded(self, record: PeerRecord, own: bool) -> None:
        """Update from the peer's DHT record. With `own`, device and layers come from the peer's journal instead."""
        self.called(record.profile.name)
        self.region = self.region or plain_text(record.profile.region)
        self.software, self.memory_bytes = plain_text(record.profile.software), record.profile.memory_bytes
        if not own:
            self.device = plain_text(record.profile.device)
            self.span(record.first, record.last)


@dataclass(slots=True)
class NetworkView:
    """What the peer measures on its links, and the length of its gossip windows. 0.0 means not known."""

    up: float = 0.0  # bytes/s
    down: float = 0.0  # bytes/s
    latency_s: Seconds = 0.0
    window_s: Seconds = 0.0  # duration of local training between two exchanges
    bound: str = ""  # what makes windows long: `link`, `cores`, `swarm` or `nothing`; "" if not known

    def window(self, window_s: Seconds, bound: str) -> None:
        """Set the present length of a gossip window, and what makes it long."""
        self.window_s, self.bound = window_s, plain_text(bound, BOUND_CHARS) or NOT_BOUND

    def measured(self, rate: float, latency_s: Seconds, own: bool) -> None:
        """Update the smallest delay from a measurement of one link and, if `own`, also the largest download rate.

        Args:
            rate: Download rate over the link, in bytes/s.
            latency_s: The link's delay; 0.0 if not measured.
            own: Whether the page reads the peer's own journal. If False, the peer's record gives the download rate.
        """
        self.down = max(self.down, rate) if own else self.down
        self.latency_s = min((known for known in (self.latency_s, latency_s) if known), default=0.0)

    def recorded(self, record: PeerRecord, own: bool) -> None:
        """Update from the peer's DHT record. With `own`, delay and window come from the peer's journal instead."""
        self.up, self.down = record.profile.up, self.down or record.profile.down
        if not own:
            self.latency_s, self.window_s = record.profile.latency_s, record.window_s


@dataclass(slots=True)
class ProgressView:
    """Speed and losses of a peer. The speed and the training loss are exponential moving averages."""

    tokens_per_s: float = 0.0
    loss: float | None = None  # on training data, nats per token
    held_out: float | None = None  # on held-out data, nats per token
    evaluated: Seconds = 0.0  # Unix time of the last evaluation; 0.0: not known
    saved: Seconds = 0.0  # Unix time of the last checkpoint; 0.0: not known
    mfu: float | None = None  # model FLOPs utilisation, from the peer's own journal

    def started(self) -> None:
        """Reset the speed, because the peer has restarted."""
        self.tokens_per_s = 0.0

    def add_steps(self, line: StepLine, since_s: Seconds) -> None:
        """Update speed and loss from a journal line about steps, written `since_s` seconds after the previous line."""
        took = max(1e-3, since_s if self.tokens_per_s else line.seconds)
        share = min(1.0, took / SPEED_S) if self.tokens_per_s else 1.0
        self.tokens_per_s += (line.tokens / took - self.tokens_per_s) * share
        if line.loss is not None:
            self.loss = line.loss if self.loss is None else self.loss + LOSS_SHARE * (line.loss - self.loss)

    def judged(self, t: Seconds, held_out: float | None, own: bool) -> bool:
        """Set the held-out loss. Return whether a chart may show this loss as measured at time `t`.

        The result is False for an unchanged loss. It is also False for the first loss from a DHT record, since a record
        may repeat an old loss. A peer's own journal (`own`) repeats no old loss.
        """
        news = held_out is not None and held_out != self.held_out
        fresh = news and (own or self.held_out is not None)
        again = held_out is not None and own  # a journal line is a new evaluation even if the loss is the same
        self.held_out, self.evaluated = held_out, t if fresh or again else self.evaluated
        return fresh

    def checkpointed(self, t: Seconds) -> None:
        """Record that a checkpoint was on the disk at time `t`."""
        self.saved = t

    def utilised(self, mfu: float | None) -> None:
        """Set the model FLOPs utilisation; None if the peer does not know it."""
        self.mfu = mfu

    def recorded(self, record: PeerRecord) -> None:
        """Set speed and training loss from the peer's record."""
        self.tokens_per_s, self.loss = record.profile.tokens_per_s, record.standing.loss


@dataclass(slots=True)
class PeerView:
    """State of one peer on the live page. Times are Unix time."""

    number: int
    peer: str
    state: PageState = PageState.JOINING
    why: str = ""
    since: Seconds = 0.0
    heard: Seconds = 0.0  # time of the last line of the peer's journal, or of its last record
    doubted: Seconds = 0.0  # when another peer last failed to reach this peer
    gap_s: Seconds = 0.0  # longest recent time between two journal lines about steps
    own: bool = False  # whether the page reads the peer's own journal
    device: DeviceView = field(default_factory=DeviceView)
    network: NetworkView = field(default_factory=NetworkView)
    progress: ProgressView = field(default_factory=ProgressView)
    goal: GoalView = field(default_factory=GoalView)
    totals: PeerTotals = field(default_factory=PeerTotals)  # from the peer's journal, or else its record in the DHT

    @property
    def live(self) -> bool:
        """Whether the peer is joining or training."""
        return self.state in LIVE

    def is_gone_since(self, t: Seconds) -> bool:
        """Return whether the peer left, fell silent or ended at time `t` or later, so a report from `t` is outdated."""
        return not self.live and t <= self.since

    @property
    def loss_series(self) -> str:
        """Name of the timeline's series of this peer's loss."""
        return f"loss {self.number}"

    def become(self, state: PageState, t: Seconds, why: str = "") -> bool:
        """Set the state and its reason; return whether the state has changed."""
        changed = state != self.state
        if changed:
            self.state, self.since = state, t
        self.why = plain_text(why)
        return changed

    @property
    def work(self) -> WorkDone:
        """What the peer has done since its last start."""
        return self.totals.work

    def follow(self, t: Seconds, event: JournalEvent | None) -> None:
        """Update from a line of the peer's own journal. After the first line, the journal overrides DHT records."""
        if not self.own:
            self.own, self.totals = True, PeerTotals()
        self.totals.take(t, event)
        self.goal.take(t, event)
        match event:
            case StartedLine():
                self.become(PageState.JOINING, t)
                self.progress.started()
            case StepLine():
                self._read_steps(t, event)
            case CheckpointLine():
                self.progress.checkpointed(t)
        if isinstance(event, PeerFacts):
            self.device.called(event.name)
            self.device.place(event.device, event.region, event.throttle)
            self.device.span(event.first, event.last)

    def hear(self, t: Seconds) -> None:
        """Record a sign of life at time `t`."""
        self.heard = max(self.heard, t)

    def doubt(self, t: Seconds, why: str) -> None:
        """Record that another peer failed to reach this peer at time `t`."""
        self.doubted, self.why = max(t, self.doubted), plain_text(why)

    def _read_steps(self, t: Seconds, line: StepLine) -> None:
        if self.state is not PageState.TRAINING:
            self.become(PageState.TRAINING, t)
        elif self.heard:
            self.gap_s = max(t - self.heard, 0.9 * self.gap_s)
        self.progress.add_steps(line, t - self.heard)

    def recorded(self, t: Seconds, record: PeerRecord) -> None:
        """Update from the peer's DHT record, except the held-out loss and the values from the peer's own journal."""
        self.device.recorded(record, self.own)
        self.network.recorded(record, self.own)
        if not self.own:
            self.hear(t)
            self.progress.recorded(record)
            self.totals = PeerTotals(work=_work_of(record))

    def row(self) -> list[Any]:
        """Return the values of ROW, ready for JSON."""
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
            *(device.name, network.bound, round(progress.saved, 1), progress.mfu, self.own),
        ]


def gone_words(view: PeerView) -> str:
    """Return words for the state of a peer that left, is silent or has ended, such as "is silent (deadline)"."""
    words = {
        PageState.LEFT: "left",
        PageState.SILENT: f"is silent ({view.why})",
        PageState.ENDED: f"has ended ({view.why})",
    }
    return words[view.state]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _work_of(record: PeerRecord) -> WorkDone:
    """Return the work that a peer's DHT record states; in `spent`, shares that sum to 1 replace the seconds."""
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
