"""The events of a peer's journal. Each event has a class, whose fields are in the same order as in a line.

A class is named after its event: `PeerJoinedLine` is the content of a `peer_joined` line. A field without a default is
always written; a field with a default is written only if it has another value. lines.py converts between events and
lines. tests/test_docs.py compares these classes with the table in docs/PROTOCOL.md.

`told` describes an event in words for people who read the dashboard or a report.
"""

from dataclasses import dataclass
from typing import assert_never

from decentral.core.journal import field_kinds as kind
from decentral.core.plain_text import plain_text
from decentral.core.times import precise
from decentral.core.units import plural

TOLD_CHARS = 300  # people are shown at most this many characters of a reason
REPEAT_S = 60.0  # an error that lasts is written again at this interval; readers treat an older error as over


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """The peer's own description when it starts: identity, name, device, region, goal, and layers [first, last)."""

    peer: kind.Peer
    run: kind.Run
    addresses: kind.Words
    device: kind.Word
    throttle: kind.Number
    kernels: kind.Text  # the implementation of the gossip kernels that this machine uses, and why
    region: kind.Word
    first: kind.Layer
    last: kind.Layer
    name: kind.Word = ""  # the name that the user gave the peer with --name
    stop_after: kind.Word = ""  # the amount of --stop-after, such as `90s`; "" without a goal


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLine(PeerFacts):
    """Event: the process has started, knows its run and begins to join the swarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedLine(PeerFacts):
    """Event: a new journal file begins, because the old file is full; the line repeats the latest `started` line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLine:
    """Event: the peer is an island: several devices, one process for each, that train as one peer."""

    ranks: kind.Facts  # one row for each rank: its `pid`, `device` and `memory_bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLine:
    """Event: the peer has the model's state and begins to train."""

    peers: kind.Count
    donors: kind.Peers
    seconds: kind.Number  # time since the beginning of the join


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorFailedLine:
    """Event: a donor sent no state, or its state differs from the state of other peers."""

    peer: kind.Peer
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedLine:
    """Event: the peer leaves the swarm in an orderly way, and its process ends."""

    reason: kind.Text
    unsaved: kind.Text = ""  # why the last checkpoint failed; "" if it did not fail


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Event: totals over the optimizer steps since the previous `step` line; written about once a second."""

    step: kind.Count
    lr_step: kind.Count
    tokens: kind.Count
    micro_batches: kind.Count
    loss: kind.MaybeNumber  # mean of the finite losses, nats per token
    lost: kind.Count = 0  # number of losses that are not finite
    seconds: kind.Number  # seconds that the training thread spent on training
    dropped: kind.Count = 0  # steps that trained nothing, because their gradients were not finite
    aside: kind.NumberByName  # seconds that the training thread spent on other work, by kind


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLine:
    """Event: the held-out loss of the live weights was measured."""

    tokens: kind.Count
    loss: kind.GivenNumber  # nats per token
    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """Event: a checkpoint is on the disk."""

    step: kind.Count  # learning-rate step of the checkpoint
    bytes: kind.Count
    seconds: kind.Number  # time from copying the weights to the finished file; training continues meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLine:
    """Event: the upload of a checkpoint to the destination `train.upload` has succeeded or failed."""

    outcome: kind.Outcome
    name: kind.Word = ""  # folder of the upload at its destination; journals do not contain the destination itself
    step: kind.Count  # learning-rate step of the checkpoint
    bytes: kind.Count
    sent_bytes: kind.Count  # bytes that were sent; files that the destination already has are not sent again
    seconds: kind.Number
    reason: kind.Text = ""  # why the upload failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLine:
    """Event: an exchange of a fragment with a partner has ended."""

    fragment: kind.Count
    partner: kind.MaybePeer  # None if the outcome is `solo`
    outcome: kind.Outcome
    reason: kind.Text
    seconds: kind.Number
    sent_bytes: kind.Count
    received_bytes: kind.Count
    age_s: kind.MaybeNumber = None  # age of the partner's snapshot when it was merged


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutLine:
    """Event: a synchronous round continued without a peer's report, or without the peer's sum for a fragment."""

    round: kind.Count
    peer: kind.Peer
    fragment: kind.MaybeCount  # None if the whole report was missing
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindLine:
    """Event: the peer fell behind the other members of synchronous rounds, and fetches the state again."""

    round: kind.Count
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLine:
    """Event: an optimizer step used the gradients of the stage executions in `of`."""

    of: tuple[kind.CountedExecution, ...]
    round: kind.MaybeCount = None  # number of the synchronous round; None in asynchronous training


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedLine:
    """Event: the gradients of the stage executions in `of` were discarded."""

    of: tuple[kind.CountedExecution, ...]
    void: kind.Count  # number of executions in `of` that were aborted
    reason: kind.Text = ""  # `nan` if the sum of the gradients was not finite
    round: kind.MaybeCount = None  # number of the synchronous round; None in asynchronous training


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLine:
    """Event: an optimizer step trained each fragment in `of` on micro-batches that passed through several peers."""

    of: tuple[tuple[kind.GivenLayer, kind.GivenLayer, kind.GivenCount], ...]  # (first layer, end layer, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """Event: an audit ended: several peers repeated one stage execution, and all their gradients were compared."""

    verdict: kind.Verdict
    wrong: kind.MaybePeer = None  # the peer whose gradient differs from those of all other peers
    left: kind.MaybeNumber = None  # the wrong peer still receives this share, 0 to 1, of its usual micro-batches
    of: tuple[kind.GivenWord, kind.GivenCount, kind.GivenLayer]  # audited execution: origin, number, first layer
    peers: kind.Peers  # the audited peer, then the other peers in the order of their answers
    cosine: kind.Numbers  # cosine similarity of the two gradients in each pair of answers
    ratio: kind.Numbers  # for each pair of answers: norm of the later gradient over norm of the earlier gradient
    loss: kind.Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedLine:
    """Event: this peer abandoned a micro-batch of its own data before the micro-batch had passed through all layers."""

    number: kind.Count
    reason: kind.Text
    tries: kind.Count


@dataclass(frozen=True, slots=True, kw_only=True)
class UnheldLine:
    """Event: for 10 s no training peer has held layers [first, last); no micro-batch can pass through the model."""

    reason: kind.Text
    first: kind.Layer
    last: kind.Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLine:
    """Event: every layer is held by a training peer again, after an `unheld` line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """Event: this peer adopted a plan that says which peer holds which layers."""

    digest: kind.Word
    cost: kind.Number  # throughput that this peer expects from the plan, tokens/s
    reason: kind.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLine:
    """Event: a change of this peer's span to layers [first, last) has succeeded or failed."""

    outcome: kind.Outcome
    reason: kind.Text  # why the move failed
    why: kind.Word
    first: kind.Layer
    last: kind.Layer
    donors: kind.Peers
    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLine:
    """Event: this peer copied to its own disk a fragment that only one other peer holds, or failed to do so."""

    fragment: kind.Count
    outcome: kind.Outcome
    reason: kind.Text  # why the copy failed
    step: kind.Count  # learning-rate step of the state
    bytes: kind.Count
    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLine:
    """Event: the bytes sent and received since the process started, written every 10 s."""

    sent_bytes: kind.Count
    received_bytes: kind.Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusLine:
    """Event: the peer's layers, window length and links, written after the join and with each `traffic` line."""

    first: kind.Layer
    last: kind.Layer
    window_s: kind.Number
    bound: kind.Word  # what makes windows longer than the config says: `link`, `cores` or `swarm`; "" if nothing does
    mfu: kind.MaybeNumber  # model FLOPs utilisation: share of the device's measured FLOP/s that training uses
    links: kind.MeasuredLinks  # the eight links that were measured last


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressesLine:
    """Event: the addresses that this peer publishes from now on; they replace the previous ones."""

    addresses: kind.Words


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoinedLine:
    """Event: another peer was added to the roster."""

    peer: kind.Peer
    device: kind.Word
    region: kind.Word
    name: kind.Word = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLeftLine:
    """Event: another peer was dropped from the roster."""

    peer: kind.Peer
    reason: kind.Text  # `left`, `silent` or `expired`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeLine:
    """Event: a silent peer was dropped, but its last record, which was read later, says that the peer left in order."""

    peer: kind.Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """Event: the peer keeps a signed record of itself or of another peer, from which contributions are computed."""

    peer: kind.Peer
    key: kind.Word  # the DHT key that the signature covers
    record: kind.Text  # the record in base64


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """Event: how many malformed messages and records have come from other peers since the process started."""

    by_reason: kind.CountByName  # reason -> number; reasons that begin with `record-` are about records in the DHT


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedLine:
    """Event: a list of revoked invitations has arrived from the swarm's founder."""

    number: kind.Count  # a list with a higher number replaces this one
    peers: kind.Peers  # peers that the list excludes from the swarm


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine:
    """Event: an error occurred; afterwards the peer either continues or stops."""

    reason: kind.Text
    times: kind.Count = 0  # how often the same error has occurred again since its previous line


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLine:
    """Event: the machine's clock has jumped; the peer continues as before."""

    jumped_s: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedLine:
    """Event: the process was suspended, for example while its machine slept."""

    seconds: kind.Number


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLine:
    """Event: the disk refused `lines` journal lines before this line; those lines are lost."""

    lines: kind.GivenCount
    since: kind.MaybeNumber = None  # Unix time of the first lost line
    reason: kind.Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookLine:
    """Event: messages to `--on-event` or `--webhook` were not delivered; totals since the process started."""

    hook: kind.Word  # the flag of the hook: `--on-event` or `--webhook`
    delivered: kind.Count
    failed: kind.Count
    dropped: kind.Count  # messages that were dropped because the queue was full
    reason: kind.Text = ""  # why the last message failed


LifeLine = StartedLine | ContinuedLine | IslandLine | JoinedLine | DonorFailedLine | StoppedLine
TrainingLine = StepLine | EvalLine | CheckpointLine | UploadLine | ExchangeLine | WithoutLine | BehindLine
RouteLine = CountedLine | UncountedLine | AppliedLine | AuditLine | AbandonedLine | UnheldLine | HeldLine
SpanLine = PlanLine | MoveLine | CopyLine
NetworkLine = TrafficLine | StatusLine | AddressesLine | PeerJoinedLine | PeerLeftLine | GoodbyeLine | RefusedLine
HostLine = RevokedLine | ErrorLine | ClockLine | SuspendedLine | LostLine | HookLine | StatementLine
JournalEvent = LifeLine | TrainingLine | RouteLine | SpanLine | NetworkLine | HostLine
"""The content of any line of a journal."""


GOOD, PLAIN, WARNING, BAD = "good", "plain", "warning", "bad"  # how serious an event is


def told(event: JournalEvent) -> tuple[str, str] | None:
    """Return an event's severity and one printable line about it for people; None if people are not told about it.

    The result for `peer_joined`, `peer_left` and `goodbye` is None, because the dashboard describes these itself.
    """
    match event:
        case ContinuedLine():
            return None
        case StartedLine():
            return PLAIN, f"starts on {plain_text(event.device)}"
        case JoinedLine():
            donors = f", state from {len(event.donors)}" if event.donors else ""
            return GOOD, f"joined in {precise(event.seconds)}{donors}"
        case StoppedLine():
            return PLAIN, f"stopped: {_said(event.reason)}"
        case PlanLine():
            return PLAIN, f"follows a plan for {_amount(event.cost)} tokens/s: {_said(event.reason)}"
        case MoveLine(outcome="done"):
            return GOOD, f"moved to {_layers(event)} in {precise(event.seconds)}"
        case MoveLine():
            return WARNING, f"could not move to {_layers(event)}: {_said(event.reason)}"
        case ErrorLine() | UnheldLine() | BehindLine():
            return BAD, _said(event.reason)
        case HeldLine():
            return GOOD, "all layers have a holder again"
        case DonorFailedLine():
            return WARNING, f"a donor failed: {_said(event.reason)}"
        case RevokedLine():
            return WARNING, "received the founder's list of revoked invitations"
        case ClockLine():
            return WARNING, f"its machine's clock jumped by {precise(event.jumped_s)}"
        case SuspendedLine():
            return WARNING, f"was stopped for {precise(event.seconds)}"
        case LostLine():
            return WARNING, f"lost {plural(event.lines, 'line')} of its journal: {_said(event.reason)}"
        case HookLine():
            missed = plural(event.failed + event.dropped, "message")
            return WARNING, f"could not deliver {missed} to {plain_text(event.hook)}: {_said(event.reason)}"
        case UploadLine(outcome="failed"):
            return WARNING, f"could not upload its checkpoint: {_said(event.reason)}"
        case AuditLine():
            return (BAD, "found another peer's wrong gradient in an audit") if event.verdict == "wrong" else None
        case StepLine() | EvalLine() | CheckpointLine() | ExchangeLine() | WithoutLine() | TrafficLine() | StatusLine():
            return None
        case CountedLine() | UncountedLine() | AppliedLine() | AbandonedLine() | IslandLine() | CopyLine():
            return None
        case UploadLine() | AddressesLine() | PeerJoinedLine() | PeerLeftLine() | GoodbyeLine() | RefusedLine():
            return None
        case StatementLine():
            return None
        case _:
            assert_never(event)


def _said(reason: str) -> str:
    return plain_text(reason, TOLD_CHARS)


def _layers(event: MoveLine) -> str:
    return f"layers {event.first} to {event.last - 1}" if event.last else "other layers"


def _amount(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
