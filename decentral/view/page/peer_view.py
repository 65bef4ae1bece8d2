"""One peer as the page shows it: what its own journal says, or what its record in the DHT says."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decentral.core.journal.file import OUTCOMES
from decentral.core.line_fields import Line, count, finite, layers, number, numbers, text
from decentral.core.plain_text import plain_text
from decentral.core.reasons import known_reason
from decentral.core.time_spent import KINDS, NO_TIME, TimeSpent
from decentral.core.units import Seconds

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

    def place(self, line: Line) -> None:
        """Take what and where a line says that the peer is."""
        self.device = text(line, "device")
        self.region = text(line, "region") or self.region
        self.throttle = number(line, "throttle") or 1.0

    def span(self, line: Line) -> None:
        """Take the layers that a line names."""
        if "last" in line:
            self.first, self.last = layers(line)

    def met(self, line: Line) -> None:
        """Take what another peer has heard of it."""
        self.device, self.region = text(line, "device"), text(line, "region")

    def recorded(self, line: Line, own: bool) -> None:
        """Take what its record says, but for what its own journal says better."""
        self.region = self.region or text(line, "region")
        self.software, self.memory_bytes = text(line, "software"), count(line, "memory_bytes")
        if not own:
            self.device = text(line, "device")
            self.span(line)


@dataclass(slots=True)
class NetworkView:
    """What the peer moves. Rates in bytes/s, as it measured them; 0: not known."""

    sent_bytes: int = 0
    received_bytes: int = 0
    up: float = 0.0
    down: float = 0.0
    latency_s: Seconds = 0.0
    window_s: Seconds = 0.0

    def moved(self, line: Line) -> None:
        """Take the totals of a line."""
        self.sent_bytes, self.received_bytes = count(line, "sent_bytes"), count(line, "received_bytes")

    def window(self, line: Line) -> None:
        self.window_s = number(line, "window_s")

    def measured(self, rate: float, latency_s: Seconds, own: bool) -> None:
        """Take what it measured of one link. Only its own journal says what its downlink carries."""
        self.down = max(self.down, rate) if own else self.down
        self.latency_s = min((known for known in (self.latency_s, latency_s) if known), default=0.0)

    def recorded(self, line: Line, own: bool) -> None:
        """Take what its record says, but for what its own journal says better."""
        self.up, self.down = number(line, "up"), self.down or number(line, "down")
        if not own:
            self.latency_s = number(line, "latency_s")
            self.window(line)
            self.moved(line)


@dataclass(slots=True)
class WorkView:
    """What the peer has trained. `spent` is of its present life, and so are the exchanges."""

    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    held_out: float | None = None
    evaluated: Seconds = 0.0  # when; 0.0: not known, as a record does not say it
    shares: dict[str, float] = field(default_factory=dict)  # of its training thread's time, by kind
    spent: TimeSpent = NO_TIME
    exchanges: Counter[str] = field(default_factory=Counter)  # by outcome
    reasons: Counter[str] = field(default_factory=Counter)  # of those that failed, or were made alone

    def stepped(self, line: Line, since_s: Seconds) -> None:
        """Take a `step` line, which comes so long after the peer's line before."""
        tokens, training_s = count(line, "tokens"), number(line, "seconds")
        took = max(1e-3, since_s if self.tokens_per_s else training_s)
        share = min(1.0, took / SPEED_S) if self.tokens_per_s else 1.0
        self.tokens_per_s += (tokens / took - self.tokens_per_s) * share
        self.step, self.tokens = count(line, "step"), self.tokens + tokens
        if (loss := finite(line, "loss")) is not None:
            self.loss = loss if self.loss is None else self.loss + LOSS_SHARE * (loss - self.loss)
        aside = line.get("aside")
        kinds = {kind: number(aside, kind) for kind in KINDS} if isinstance(aside, Mapping) else {}
        self.spent += TimeSpent.by_kind({**kinds, "training": training_s})
        self.shares = self.spent.shares()

    def judged(self, t: Seconds, held_out: float | None, own: bool) -> bool:
        """Take the held-out loss. Return whether it is a new one: a record repeats it, and the first may be old."""
        news = held_out is not None and held_out != self.held_out
        fresh = news and (own or self.held_out is not None)
        again = held_out is not None and own  # its journal has a line for each evaluation
        self.held_out, self.evaluated = held_out, t if fresh or again else self.evaluated
        return fresh

    def exchanged(self, line: Line) -> None:
        """Take an `exchange` line."""
        outcome = line.get("outcome")
        if outcome in OUTCOMES:
            self.exchanges[outcome] += 1
        if outcome in ("solo", "failed"):
            self.reasons[known_reason(text(line, "reason"))] += 1

    def recorded(self, line: Line) -> None:
        """Take what its record says, but for its held-out loss."""
        self.step, self.tokens, self.tokens_per_s = count(line, "step"), count(line, "tokens"), number(line, "speed")
        self.loss = finite(line, "loss")
        self.shares = dict(zip(KINDS, numbers(line, "shares"), strict=False))
        self.exchanges = Counter(dict(zip(OUTCOMES, map(int, numbers(line, "exchanges")), strict=False)))


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
    work: WorkView = field(default_factory=WorkView)

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

    def started(self, t: Seconds, line: Line) -> None:
        """A new life: its counts begin anew, its tokens and its losses stay."""
        self.become("joining", t)
        work = self.work
        self.work = WorkView(work.step, work.tokens, 0.0, work.loss, work.held_out, work.evaluated)
        self.device.place(line)
        self.device.span(line)

    def follow(self) -> None:
        """Believe its own journal, which is read from now on, rather than its records."""
        self.own = True

    def hear(self, t: Seconds) -> None:
        self.heard = max(self.heard, t)

    def doubt(self, t: Seconds, why: str) -> None:
        """Note that another peer misses it."""
        self.doubted, self.why = max(t, self.doubted), why

    def stepped(self, t: Seconds, line: Line) -> None:
        """Take a `step` line, which says that it trains."""
        if self.state != "training":
            self.become("training", t)
        elif self.heard:
            self.gap_s = max(t - self.heard, 0.9 * self.gap_s)
        self.work.stepped(line, t - self.heard)

    def recorded(self, t: Seconds, line: Line) -> None:
        """Take what its record in the DHT says, but for its held-out loss. Its own journal knows better."""
        self.device.recorded(line, self.own)
        self.network.recorded(line, self.own)
        if not self.own:
            self.hear(t)
            self.work.recorded(line)

    def row(self) -> list[Any]:
        """The values of ROW, fit for JSON."""
        device, network, work = self.device, self.network, self.work
        return [
            *(
                self.number,
                self.peer,
                self.state,
                "" if self.live else self.why,
                round(self.since, 1),
                round(self.heard, 1),
            ),
            *(device.device, device.region, device.software, device.throttle, device.first, device.last),
            *(device.memory_bytes, work.step, work.tokens, round(work.tokens_per_s, 1), _short(work.loss)),
            *(_short(work.held_out), [round(work.shares.get(kind, 0.0), 3) for kind in KINDS] if work.shares else None),
            *([work.exchanges[outcome] for outcome in OUTCOMES], dict(work.reasons.most_common(REASONS_SHOWN))),
            *(network.sent_bytes, network.received_bytes, round(network.up), round(network.down)),
            *(round(network.latency_s, 4), round(network.window_s, 2), round(work.evaluated, 1)),
        ]


def gone_words(view: PeerView) -> str:
    """What has become of a peer that is not live, in words for people."""
    words = {"left": "left", "silent": f"is silent ({view.why})", "ended": f"has ended ({view.why})"}
    return words[view.state]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
