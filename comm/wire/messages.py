"""What peers say to each other. Each question (Ask) has one answer; either may carry a blob.

    question            blob             answer            blob              what for
    Hello               -                Welcome           -                 a newcomer asks for the run and its config
    MembershipProof     -                MembershipProof   -                 private swarm: both prove to be members
    Ping                -                Pong              -                 latency
    Probe               up to 4 MiB      Probed            up to 4 MiB       bandwidth, up and down
    Pull                -                Snapshot          the snapshot      one-sided exchange; allreduce, by number
    StateRequest        -                StateChunk        a piece of it     a newcomer fetches a fragment's state
    Offer               -                Load              -                 when could you execute it, and how far?
    ForwardRequest      hidden, targets  BackwardResponse  hidden gradient   a micro-batch through layers `first` and on
    ForwardStatusQuery  -                Done              -                 the gradient is late: still under way?
    CommitDecision      -                Done              -                 count these gradients, forget those
    CommitQuery         -                CommitDecision    -                 what became of these executions?
    LeaseRequest        -                Done              -                 a promise to go on holding a fragment
    RoundQuery          -                RoundStatus       -                 synchronous: which round, and its members
    CollectRequest      -                RoundReport       -                 synchronous: a member's report ...
                                         Snapshot          a gradient sum    ... and its sum of a fragment's gradients
    any                 -                Refused           -                 the reason, in one word

Every field has a bound, and is checked against it before anything else looks at the message (comm/wire/codec.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, Strict

from decentral.comm.wire.invitations import MAX_PROOF_BYTES
from decentral.core.config import MAX_CONFIG_BYTES
from decentral.core.fragments import Layout
from decentral.core.plain_text import plain_text
from decentral.core.units import MiB

VERSION = 5

MAX_BLOB_BYTES = 1 << 34  # for any blob; each question has a tighter bound for its answer
MAX_PROBE_BYTES = 4 * MiB
MAX_CHUNK_BYTES = 4 * MiB
MAX_PATIENCE_S = 75.0  # of a Pull or a CollectRequest
MAX_ROUTE_S = 3600.0  # for a micro-batch, there and back; less than a transport gives an answer
MAX_HOPS = 64  # in a route
MAX_EXECUTIONS = 256  # in one CommitDecision
MAX_MEMBERS = 128  # in a synchronous round
MAX_NEWCOMERS = 16  # in one RoundReport
MOST_FOLLOWED = 1 << 61  # a round or a step of others from which we count on: ours never outgrows a Count

NAME = r"^[A-Za-z0-9._-]*$"  # of a run, a peer, a reason: it is shown, and means itself on any terminal
Run = Annotated[str, Strict(), Field(max_length=64, pattern=NAME)]
Sequences = Annotated[int, Strict(), Field(gt=0, lt=1 << 20)]  # in a micro-batch
Peer = Annotated[str, Strict(), Field(max_length=64, pattern=NAME)]
Word = Annotated[str, Strict(), Field(min_length=1, max_length=32, pattern=NAME)]
Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
Index = Annotated[int, Strict(), Field(ge=0, lt=1 << 20)]
Digest = Annotated[bytes, Strict(), Field(min_length=16, max_length=16)]
UnixTime = Annotated[float, Strict(), Field(ge=0, lt=1e11, allow_inf_nan=False)]
Sections = Annotated[Layout, Field(max_length=16)]


class Question:
    """A message that asks. Its class says who gets an answer; all others are refused."""

    __slots__ = ()
    for_strangers: ClassVar[bool] = False  # also a peer whose record is not known: what newcomers have to ask
    for_lookers: ClassVar[bool] = False  # in a private swarm also a member whose invitation is only to look


@dataclass(frozen=True, slots=True)
class RunQuestion(Question):
    """A question about a run, which a peer of another run refuses."""

    run: Run


@dataclass(frozen=True, slots=True)
class Hello(Question):
    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    run: Run = ""  # empty: any run that this peer is in


@dataclass(frozen=True, slots=True)
class Welcome:
    run: Run
    config: Annotated[str, Strict(), Field(max_length=MAX_CONFIG_BYTES)]  # plain JSON: core/received.py


@dataclass(frozen=True, slots=True)
class MembershipProof(Question):
    """The first question to a peer of a private swarm, and its answer: comm/wire/invitations.py reads the proof."""

    proof: Annotated[bytes, Strict(), Field(min_length=1, max_length=MAX_PROOF_BYTES)]


@dataclass(frozen=True, slots=True)
class Ping(Question):
    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    nonce: Count


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: Count


@dataclass(frozen=True, slots=True)
class Probe(Question):
    """The blob is the upload; the answer's blob shall have `download_bytes`."""

    for_lookers: ClassVar[bool] = True
    download_bytes: Annotated[int, Strict(), Field(ge=0, le=MAX_PROBE_BYTES)]


@dataclass(frozen=True, slots=True)
class Probed:
    received_bytes: Count


@dataclass(frozen=True, slots=True)
class Pull(RunQuestion):
    """Asks for a snapshot newer than number `after`; if `exact`, for number `after + 1` and no other.

    If none was published at `since` or later, the answer may wait up to `patience_s` for one: all peers close a
    fragment's window at the same time, so the one that belongs to the asker's window is about to be there.
    `sections` names the sections wanted; if empty, all are.
    """

    fragment: Index
    after: Count
    since: UnixTime
    patience_s: Annotated[float, Strict(), Field(ge=0, le=MAX_PATIENCE_S, allow_inf_nan=False)]
    exact: Annotated[bool, Strict()] = False
    sections: Annotated[tuple[Word, ...], Field(max_length=16)] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A blob that a peer publishes of a fragment. `digest` covers the whole blob; `time` is by the publisher's clock.

    In a synchronous round it is a sum of gradients: `seq` is the round, and `time` is zero.
    """

    run: Run
    fragment: Index
    seq: Count
    tokens: Count
    lr_sum: Annotated[float, Strict(), Field(ge=0, lt=1e12, allow_inf_nan=False)]  # of the window's steps
    time: UnixTime
    layout: Sections
    digest: Digest


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class StateRequest(RunQuestion):
    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    fragment: Index
    offset: Count
    length: Annotated[int, Strict(), Field(gt=0, le=MAX_CHUNK_BYTES)]
    kept: Annotated[bool, Strict()] = False  # the state retained when the layers were given up, not the one that trains


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A piece of the fragment's state, from byte `offset` of `total`.

    `step` is the learning-rate step. `version` is the fragment's in a synchronous run, and zero in any other.
    """

    run: Run
    fragment: Index
    offset: Count
    total: Count
    step: Count
    layout: Sections
    version: Digest = bytes(16)


@dataclass(frozen=True, slots=True)
class Offer(RunQuestion):
    """Asks how soon the peer would be through with a micro-batch of so many sequences, from layer `first` on."""

    first: Index
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class Load:
    """The peer would take the micro-batch as far as layer `last`. What waits before it takes about `wait_s` seconds,
    and its own forward pass `seconds`."""

    run: Run
    wait_s: Annotated[float, Strict(), Field(ge=0, lt=1e9, allow_inf_nan=False)]
    seconds: Annotated[float, Strict(), Field(ge=0, lt=1e9, allow_inf_nan=False)]
    last: Index


@dataclass(frozen=True, slots=True)
class ForwardRequest(RunQuestion):
    """Asks the peer to execute micro-batch (origin peer, number) from layer `first` on. The answer has its gradient.

    `patience_s`: how long the asker waits. `hold_s`: how long the origin peer may still commit it. `drawn`: when the
    origin peer began it, by its own clock; for the order among micro-batches, not to measure times by.
    """

    origin: Peer
    number: Count
    first: Index
    sequences: Sequences
    patience_s: Annotated[float, Strict(), Field(ge=0, le=MAX_ROUTE_S, allow_inf_nan=False)]
    hold_s: Annotated[float, Strict(), Field(ge=0, le=MAX_ROUTE_S, allow_inf_nan=False)]
    layout: Sections
    round: Count = 0  # of synchronous training: the round whose weights it must meet
    drawn: UnixTime = 0.0


@dataclass(frozen=True, slots=True)
class Hop:
    """A peer that executed layers [first, last) of a micro-batch's route."""

    peer: Peer
    first: Index
    last: Index


@dataclass(frozen=True, slots=True)
class BackwardResponse:
    """The answer to a ForwardRequest. The blob is the gradient of the hidden values that came with it.

    `loss` is the sum over `tokens` tokens; `hops` lead from the answering peer to the model's end.
    """

    run: Run
    loss: Annotated[float, Strict(), Field(ge=0, lt=1e18, allow_inf_nan=False)]
    tokens: Count
    hops: Annotated[tuple[Hop, ...], Field(max_length=MAX_HOPS)]
    layout: Sections


@dataclass(frozen=True, slots=True)
class ExecutionId:
    """A stage execution as peers name it: the micro-batch (origin peer, number) from layer `first` on."""

    origin: Peer
    number: Count
    first: Index


@dataclass(frozen=True, slots=True)
class ForwardStatusQuery(RunQuestion):
    """Asks whether the peer still computes this execution, which the asker sent."""

    for_strangers: ClassVar[bool] = True
    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class CommitDecision(RunQuestion):
    """Gradients of the executions in `commit` count (only their origin peer may say so); those in `abort` must not."""

    for_strangers: ClassVar[bool] = True
    commit: Annotated[tuple[ExecutionId, ...], Field(max_length=MAX_EXECUTIONS)]
    abort: Annotated[tuple[ExecutionId, ...], Field(max_length=MAX_EXECUTIONS)]


@dataclass(frozen=True, slots=True)
class CommitQuery(RunQuestion):
    """Asks the origin peer for its decision on executions that the asker holds. Those that the answer, a
    CommitDecision, does not name are still under way."""

    for_strangers: ClassVar[bool] = True
    executions: Annotated[tuple[ExecutionId, ...], Field(max_length=MAX_EXECUTIONS)]


@dataclass(frozen=True, slots=True)
class LeaseRequest(RunQuestion):
    """Will you hold this fragment for the next minute? The asker is about to give it up. `over` ends the promise."""

    fragment: Index
    over: Annotated[bool, Strict()] = False


@dataclass(frozen=True, slots=True)
class RoundMember:
    """A member of a synchronous round, and its layers [first, last)."""

    peer: Peer
    first: Index
    last: Index


RoundMembers = Annotated[tuple[RoundMember, ...], Field(max_length=MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class RoundQuery(RunQuestion):
    """Which round are you in, and who are its members? The asker holds layers [first, last) as of the start of `round`.

    If `joining`, it asks to be let in.
    """

    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True  # unless it is to be let in
    round: Count
    first: Index
    last: Index
    joining: Annotated[bool, Strict()]


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """The round that a peer is in, and its members; without members, the round of its weights, since it is in none."""

    run: Run
    round: Count
    members: RoundMembers


@dataclass(frozen=True, slots=True)
class CollectRequest(RunQuestion):
    """Asks what `origin` has to say in this round: its report, or its sum of a fragment's gradients.

    Any member that needs the same may be asked. One that answers `without` has lost the origin: it takes the same only
    from other members from then on. `member` tells that the asker believes to be a member of the round.
    """

    round: Count
    origin: Peer
    fragment: Index | None  # None: the report
    patience_s: Annotated[float, Strict(), Field(ge=0, le=MAX_PATIENCE_S, allow_inf_nan=False)]
    member: Annotated[bool, Strict()]


@dataclass(frozen=True, slots=True)
class CompletedMicroBatch:
    """A micro-batch that came through its route.

    `members` are its stages' places among the round's members, and `ends` the layers up to which each took it.
    """

    number: Count
    tokens: Count
    members: Annotated[tuple[Index, ...], Field(min_length=1, max_length=MAX_HOPS)]
    ends: Annotated[tuple[Index, ...], Field(min_length=1, max_length=MAX_HOPS)]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A member's report on a round: its micro-batches that count, and the newcomers that it lets in.

    `loss` is summed over their tokens. `versions` are those of the fragments that it holds, at the round's start: they
    differ where other sums went into an earlier step.
    """

    run: Run
    round: Count
    own: RoundMember
    micro_batches: Annotated[tuple[CompletedMicroBatch, ...], Field(max_length=MAX_EXECUTIONS)]
    loss: Annotated[float, Strict(), Field(ge=0, lt=1e18, allow_inf_nan=False)]
    newcomers: Annotated[tuple[RoundMember, ...], Field(max_length=MAX_NEWCOMERS)]
    versions: Annotated[tuple[Digest, ...], Field(max_length=4096)]


@dataclass(frozen=True, slots=True)
class Refused:
    reason: Word
    detail: Annotated[str, Strict(), Field(max_length=200), AfterValidator(partial(plain_text, most=200))] = ""


LinkMessage = Hello | Welcome | MembershipProof | Ping | Pong | Probe | Probed
GossipMessage = Pull | Snapshot
StateMessage = StateRequest | StateChunk | LeaseRequest
RouteMessage = Offer | Load | ForwardRequest | BackwardResponse | ForwardStatusQuery | CommitDecision | CommitQuery
RoundMessage = RoundQuery | RoundStatus | CollectRequest | RoundReport
Message = LinkMessage | GossipMessage | StateMessage | RouteMessage | RoundMessage | Done | Refused
