"""The events of a peer's journal: a class for each, with its fields in the order in which a line has them.

A class is named after its event: `PeerJoinedLine` is what a `peer_joined` line says. A field without a default is
always written; one with a default is written only where it differs from it. lines.py makes lines of events, and events
of lines; tests/test_docs.py compares these classes with the table of docs/PROTOCOL.md.

`told` has the words for people, of the page and of reports.
"""

from dataclasses import dataclass
from typing import assert_never

from decentral.core.journal import field_kinds as kind
from decentral.core.plain_text import plain_text

TOLD_CHARS = 300  # of a reason


# A peer's life


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """What the peer is. It holds layers [first, last)."""

    peer: kind.Peer
    run: kind.Run
    addresses: kind.Words
    device: kind.Word
    throttle: kind.Number
    kernels: kind.Text  # which kernels of gossip this machine uses, and why
    region: kind.Word
    first: kind.Layer
    last: kind.Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLine(PeerFacts):
    """The process has found its run and begins to join. A new life of the peer begins with this line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedLine(PeerFacts):
    """The first line of a file that follows a full one: it repeats `started`, of the same life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLine:
    """The peer has several devices; of each rank its `pid device memory_bytes`."""

    ranks: kind.Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLine:
    """The peer has its state and trains. `peers`: others that it knows; `seconds` since it began to join."""

    peers: kind.Count
    donors: kind.Peers
    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorFailedLine:
    """A peer that was asked for the model's state sent none, or one that other peers contradict."""

    peer: kind.Peer
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedLine:
    """The peer ends in order, and says why. `unsaved`: why its last checkpoint failed; "": it did not."""

    reason: kind.Text
    unsaved: kind.Text = ""


# Training


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Optimizer steps were taken: all since the last such line, about once a second.

    `loss` is the mean of those that are finite, `lost` how many are not, `dropped` how many steps trained nothing, as
    their gradients were not finite. `seconds` of training, and `aside` those that the training thread spent otherwise,
    by kind.
    """

    step: kind.Count
    lr_step: kind.Count
    tokens: kind.Count
    micro_batches: kind.Count
    loss: kind.MaybeNumber
    lost: kind.Count = 0
    seconds: kind.Number
    dropped: kind.Count = 0
    aside: kind.NumberByName


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLine:
    """The held-out loss of the live weights, in nats per token, was measured in so many seconds."""

    tokens: kind.Count
    loss: kind.GivenNumber
    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """A checkpoint is on the disk. `seconds` from the snapshot to the disk, while training went on."""

    step: kind.Count
    bytes: kind.Count
    seconds: kind.Number


# Gossip and rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLine:
    """An exchange with a partner is over; with none, if it was `solo`. `age_s` is that of a merged snapshot."""

    fragment: kind.Count
    partner: kind.MaybePeer
    outcome: kind.Outcome
    reason: kind.Text
    seconds: kind.Number
    sent_bytes: kind.Count
    received_bytes: kind.Count
    age_s: kind.MaybeNumber = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutLine:
    """A synchronous round went on without that peer's report (no fragment), or its sum."""

    round: kind.Count
    peer: kind.Peer
    fragment: kind.MaybeCount
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindLine:
    """The peer fell out of the synchronous rounds, and fetches the state anew."""

    round: kind.Count
    reason: kind.Text


# Micro-batches through several peers


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLine:
    """The gradients of these stage executions went into a step. `round`: of a synchronous one."""

    of: tuple[kind.CountedExecution, ...]
    round: kind.MaybeCount = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedLine:
    """The gradients of these stage executions were thrown away.

    `void`: how many of the executions were aborted; `reason`: `nan` where no step could be taken with their sum.
    """

    of: tuple[kind.CountedExecution, ...]
    void: kind.Count
    reason: kind.Text = ""
    round: kind.MaybeCount = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLine:
    """A step with gradients of routes was taken in these fragments: layers [first, last) and tokens of each."""

    of: tuple[tuple[kind.GivenLayer, kind.GivenLayer, kind.GivenCount], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """A stage execution was repeated by other peers. The first of `peers` is the audited one.

    `wrong` is the peer that was alone, and `left` the share of its routes that it keeps. `cosine` and `ratio` (of
    lengths) compare each later answer with each earlier one; `loss` is of each answer.
    """

    verdict: kind.Verdict
    wrong: kind.MaybePeer = None
    left: kind.MaybeNumber = None
    of: tuple[kind.GivenWord, kind.GivenCount, kind.GivenLayer]  # origin peer, number, first layer
    peers: kind.Peers
    cosine: kind.Numbers
    ratio: kind.Numbers
    loss: kind.Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedLine:
    """A micro-batch of this peer's own did not get through, after so many tries."""

    number: kind.Count
    reason: kind.Text
    tries: kind.Count


@dataclass(frozen=True, slots=True, kw_only=True)
class UnheldLine:
    """No training peer has held layers [first, last) for 10 s, so no micro-batch can pass through the whole model."""

    reason: kind.Text
    first: kind.Layer
    last: kind.Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLine:
    """Every layer is held by a training peer again, after an `unheld` line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """A plan was adopted. `cost` is what this peer expects of it, in tokens/s."""

    digest: kind.Word
    cost: kind.Number
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLine:
    """A change of this peer's span to layers [first, last) is over. `why`: what it was for."""

    outcome: kind.Outcome
    reason: kind.Text
    why: kind.Word
    first: kind.Layer
    last: kind.Layer
    donors: kind.Peers
    seconds: kind.Number


# The network, and other peers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLine:
    """What this life has sent and received so far, every 10 s."""

    sent_bytes: kind.Count
    received_bytes: kind.Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusLine:
    """With each `traffic` line, and when the peer has joined: its layers, its windows, its eight latest links.

    `window_s` is how long its windows are, and `bound` what stretches them.
    """

    first: kind.Layer
    last: kind.Layer
    window_s: kind.Number
    bound: kind.Word
    links: kind.MeasuredLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressesLine:
    """The addresses that this peer publishes from now on; they replace the previous ones."""

    addresses: kind.Words


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoinedLine:
    """Another peer was added to the roster."""

    peer: kind.Peer
    device: kind.Word
    region: kind.Word


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLeftLine:
    """Another peer was dropped from the roster. `reason`: `left`, `silent` or `expired`."""

    peer: kind.Peer
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeLine:
    """A peer that had been dropped as silent has left in order: its final record says so, which was read later."""

    peer: kind.Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """Counts, since the start and by reason, of what other peers sent that broke the format.

    A reason that begins with `record-` is of a record in the DHT.
    """

    by_reason: kind.CountByName


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedLine:
    """The founder's revocation list `number` has arrived; it excludes these peers from the swarm."""

    number: kind.Count
    peers: kind.Peers


# This machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine:
    """Something is wrong. `times`: how often it has happened since the last such line, if it repeats."""

    reason: kind.Text
    times: kind.Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLine:
    """The machine's clock has jumped by so much, which changes nothing."""

    jumped_s: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedLine:
    """The process was stopped for so long, for example while its machine slept."""

    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLine:
    """The disk has refused this many lines before this one, the first of them at Unix time `since`."""

    lines: kind.GivenCount
    since: kind.MaybeNumber = None
    reason: kind.Text = ""


LifeLine = StartedLine | ContinuedLine | IslandLine | JoinedLine | DonorFailedLine | StoppedLine
TrainingLine = StepLine | EvalLine | CheckpointLine | ExchangeLine | WithoutLine | BehindLine
RouteLine = CountedLine | UncountedLine | AppliedLine | AuditLine | AbandonedLine | UnheldLine | HeldLine
SpanLine = PlanLine | MoveLine
NetworkLine = TrafficLine | StatusLine | AddressesLine | PeerJoinedLine | PeerLeftLine | GoodbyeLine | RefusedLine
MachineLine = RevokedLine | ErrorLine | ClockLine | SuspendedLine | LostLine
JournalEvent = LifeLine | TrainingLine | RouteLine | SpanLine | NetworkLine | MachineLine
"""What a line of a journal says."""


# What people are told


GOOD, PLAIN, WARNING, BAD = "good", "plain", "warning", "bad"  # how serious an event is


def told(event: JournalEvent) -> tuple[str, str] | None:
    """Return how serious an event is and what people are told of it, in plain text; None: people are told nothing.

    What other peers are said to do (`peer_joined`, `peer_left`, `goodbye`) the page tells itself, since it knows more.
    """
    match event:
        case ContinuedLine():
            return None
        case StartedLine():
            return PLAIN, f"starts on {plain_text(event.device)}"
        case JoinedLine():
            donors = f", state from {len(event.donors)}" if event.donors else ""
            return GOOD, f"joined in {_amount(event.seconds)} s{donors}"
        case StoppedLine():
            return PLAIN, f"stopped: {_said(event.reason)}"
        case PlanLine():
            return PLAIN, f"follows a plan for {_amount(event.cost)} tokens/s: {_said(event.reason)}"
        case MoveLine(outcome="done"):
            return GOOD, f"moved to {_layers(event)} in {_amount(event.seconds)} s"
        case MoveLine():
            return WARNING, f"could not move to {_layers(event)}: {_said(event.reason)}"
        case ErrorLine() | UnheldLine() | BehindLine():
            return BAD, _said(event.reason)
        case HeldLine():
            return GOOD, "all layers have a holder again"
        case DonorFailedLine():
            return WARNING, f"a donor failed: {_said(event.reason)}"
        case RevokedLine():
            return WARNING, "took over a list of revoked invitations"
        case ClockLine():
            return WARNING, f"its machine's clock jumped by {_amount(event.jumped_s)} s"
        case SuspendedLine():
            return WARNING, f"was stopped for {_amount(event.seconds)} s"
        case LostLine():
            return WARNING, f"lost {event.lines:,} lines of its journal: {_said(event.reason)}"
        case AuditLine():
            return (BAD, "found a wrong gradient by an audit") if event.verdict == "wrong" else None
        case StepLine() | EvalLine() | CheckpointLine() | ExchangeLine() | WithoutLine() | TrafficLine() | StatusLine():
            return None
        case CountedLine() | UncountedLine() | AppliedLine() | AbandonedLine() | IslandLine():
            return None
        case AddressesLine() | PeerJoinedLine() | PeerLeftLine() | GoodbyeLine() | RefusedLine():
            return None
        case _:
            assert_never(event)


def _said(reason: str) -> str:
    return plain_text(reason, TOLD_CHARS)


def _layers(event: MoveLine) -> str:
    return f"layers {event.first} to {event.last - 1}" if event.last else "other layers"


def _amount(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
