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


@dataclass(slots=True)
class NetworkView:
    """What the peer moves. Rates in bytes/s, as it measured them; 0: not known."""

    sent_bytes: int = 0
    received_bytes: int = 0
    up: float = 0.0
    down: float = 0.0
    latency_s: Seconds = 0.0
    window_s: Seconds = 0.0


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
        self.place(line)
        self.span(line)

    def place(self, line: Line) -> None:
        """What and where a line says that it is."""
        self.device.device = text(line, "device")
        self.device.region = text(line, "region") or self.device.region
        self.device.throttle = number(line, "throttle") or 1.0

    def span(self, line: Line) -> None:
        """The layers that a line names."""
        if "last" in line:
            self.device.first, self.device.last = layers(line)

    def stepped(self, t: Seconds, line: Line) -> None:
        """A `step` line."""
        work, tokens, training_s = self.work, count(line, "tokens"), number(line, "seconds")
        took = max(1e-3, t - self.heard if work.tokens_per_s else training_s)
        share = min(1.0, took / SPEED_S) if work.tokens_per_s else 1.0
        work.tokens_per_s += (tokens / took - work.tokens_per_s) * share
        work.step, work.tokens = count(line, "step"), work.tokens + tokens
        if (loss := finite(line, "loss")) is not None:
            work.loss = loss if work.loss is None else work.loss + LOSS_SHARE * (loss - work.loss)
        aside = line.get("aside")
        kinds = {kind: number(aside, kind) for kind in KINDS} if isinstance(aside, Mapping) else {}
        work.spent += TimeSpent(**{**kinds, "training": training_s})
        work.shares = work.spent.shares()

    def judged(self, t: Seconds, held_out: float | None) -> bool:
        """Takes its held-out loss. Whether that is a new one: a record repeats it, and the first may be old."""
        work = self.work
        news = held_out is not None and held_out != work.held_out
        fresh = news and (self.own or work.held_out is not None)
        again = held_out is not None and self.own  # its journal has a line for each evaluation
        work.held_out, work.evaluated = held_out, t if fresh or again else work.evaluated
        return fresh

    def exchanged(self, line: Line) -> None:
        """An `exchange` line."""
        outcome = line.get("outcome")
        if outcome in OUTCOMES:
            self.work.exchanges[outcome] += 1
        if outcome in ("solo", "failed"):
            self.work.reasons[known_reason(text(line, "reason"))] += 1

    def recorded(self, t: Seconds, line: Line) -> None:
        """What its record in the DHT says, but for its held-out loss. Its own journal knows better."""
        device, network, work = self.device, self.network, self.work
        device.region = device.region or text(line, "region")
        device.software, device.memory_bytes = text(line, "software"), count(line, "memory_bytes")
        network.up, network.down = number(line, "up"), network.down or number(line, "down")
        if self.own:
            return
        device.device, self.heard = text(line, "device"), max(self.heard, t)
        self.span(line)
        work.step, work.tokens, work.tokens_per_s = count(line, "step"), count(line, "tokens"), number(line, "speed")
        network.window_s, network.latency_s = number(line, "window_s"), number(line, "latency_s")
        work.loss = finite(line, "loss")
        work.shares = dict(zip(KINDS, numbers(line, "shares"), strict=False))
        work.exchanges = Counter(dict(zip(OUTCOMES, map(int, numbers(line, "exchanges")), strict=False)))
        network.sent_bytes, network.received_bytes = count(line, "sent_bytes"), count(line, "received_bytes")

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
