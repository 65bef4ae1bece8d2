"""Define the messages between peers, with a bound on each field. A question has one answer; both may have a blob.

docs/PROTOCOL.md has a table of all questions with their answers.
`decode` in comm/wire/codec.py checks every field against its bound before any other code sees the message.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, Strict

from decentral.comm.wire.invitations import MAX_PROOF_BYTES, MAX_REVOCATIONS_BYTES
from decentral.comm.wire.message_fields import (
    MOST_SECTIONS,
    Count,
    Digest,
    Index,
    Peer,
    Run,
    SealedPlan,
    SealedRecord,
    Sections,
    Sequences,
    ShortHash,
    UnixTime,
    Word,
)
from decentral.core.config import MAX_CONFIG_BYTES
from decentral.core.plain_text import plain_text
from decentral.core.units import MiB

VERSION = 12
MAX_BLOB_BYTES = 1 << 34  # no blob may be larger; for most questions, the sender allows much less in the answer
MAX_PROBE_BYTES = 4 * MiB
MAX_CHUNK_BYTES = 4 * MiB
MAX_PATIENCE_S = 75.0  # a peer may delay its answer by at most this, to wait for the snapshot or sum that is asked for
MAX_ROUTE_S = 3600.0  # a micro-batch may take at most this long to pass through all stages, forward and back
MAX_HOPS = 64
MAX_EXECUTIONS = 256  # most executions in a list of a CommitDecision or CommitQuery, or micro-batches in a RoundReport
MAX_MEMBERS = 128
MAX_KNOWN = 256
MAX_PLANS = 8  # a RecordsQuery or its answer names at most this many plans; peers store no more plans than this
MAX_NEWCOMERS = 16
MOST_FOLLOWED = 1 << 61  # larger round and step numbers are ignored: the next number could exceed the type Count


class Question:
    """A message that expects an answer. Each subclass says which peers may ask; other peers are refused."""

    __slots__ = ()
    for_strangers: ClassVar[bool] = False  # whether peers without a known record, such as newcomers, may ask
    for_lookers: ClassVar[bool] = False  # whether Permission.LOOK is enough to ask in a private swarm


@dataclass(frozen=True, slots=True)
class RunQuestion(Question):
    """A question about one run. A peer of another run refuses the question."""

    run: Run


@dataclass(frozen=True, slots=True)
class Hello(Question):
    """Asks which run the peer is in, and for the run's config."""

    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    run: Run = ""  # the run that the sender expects; a peer of another run refuses; "": any run


@dataclass(frozen=True, slots=True)
class Welcome:
    """The run that the answering peer is in, and the run's config."""

    run: Run
    config: Annotated[str, Strict(), Field(max_length=MAX_CONFIG_BYTES)]  # a JSON object


@dataclass(frozen=True, slots=True)
class MembershipProof(Question):
    """Proves that the sender holds an invitation to a private swarm. The answer is the other peer's proof.

    In a private swarm a peer sends it before any other question. `read_proof` (comm/wire/invitations.py) verifies it.
    """

    proof: Annotated[bytes, Strict(), Field(min_length=1, max_length=MAX_PROOF_BYTES)]


@dataclass(frozen=True, slots=True)
class Ping(Question):
    """Asks for a Pong with the same nonce, to measure the latency."""

    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    nonce: Count


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a Ping, with the Ping's nonce."""

    nonce: Count


@dataclass(frozen=True, slots=True)
class Probe(Question):
    """Measures bandwidth: upload by this question's blob, download by the answer's blob of `download_bytes` bytes."""

    for_lookers: ClassVar[bool] = True
    download_bytes: Annotated[int, Strict(), Field(ge=0, le=MAX_PROBE_BYTES)]


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to a Probe: how many bytes the Probe's blob had. The blob of this answer measures the download."""

    received_bytes: Count


@dataclass(frozen=True, slots=True)
class RecordsQuery(RunQuestion):
    """Asks for what the sender lacks: records of peers, a newer list of revocations, and plans.

    `own` is the sender's record; empty if it has published none. `known` has hashes (`record_gossip.short`) of the
    peers whose records it does not need. `revocations` is the number of its list of revocations; `revoked` is a newer
    list that it passes on, or empty. `plans` has hashes of the signed plans that it has; None: it wants no plans.
    """

    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    own: SealedRecord
    known: Annotated[tuple[ShortHash, ...], Field(max_length=MAX_KNOWN)]
    revocations: Count = 0
    revoked: Annotated[bytes, Strict(), Field(max_length=MAX_REVOCATIONS_BYTES)] = b""
    plans: Annotated[tuple[ShortHash, ...], Field(max_length=MAX_PLANS)] | None = None


@dataclass(frozen=True, slots=True)
class PeerRecords:
    """The answer to a RecordsQuery: what its sender lacks: records, revocations, and plans with their proposers."""

    run: Run
    records: Annotated[tuple[tuple[Peer, SealedRecord], ...], Field(max_length=MAX_KNOWN)]
    revoked: Annotated[bytes, Strict(), Field(max_length=MAX_REVOCATIONS_BYTES)] = b""
    plans: Annotated[tuple[tuple[Peer, SealedPlan], ...], Field(max_length=MAX_PLANS)] = ()


@dataclass(frozen=True, slots=True)
class Pull(RunQuestion):
    """Asks for a fragment's newest snapshot with a `seq` above `after`; if `exact`, only for `seq` = `after` + 1.

    If there is no such snapshot yet, or only one from before `since` (unix seconds), the answer may wait up to
    `patience_s` for the next one, which all peers publish at about the same time. `sections` names slices to add.
    """

    fragment: Index
    after: Count
    since: UnixTime
    patience_s: Annotated[float, Strict(), Field(ge=0, le=MAX_PATIENCE_S, allow_inf_nan=False)]
    exact: Annotated[bool, Strict()] = False
    sections: Annotated[tuple[Word, ...], Field(max_length=MOST_SECTIONS)] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a peer has trained of a fragment in one window of steps; `layout` lists the sections of the blob.

    Window `seq` has `tokens` tokens and lasted `lasted_s` (0: unknown). `time` is when the blob was published, `digest`
    its digest. In a synchronous round it is a sum of gradients; `time` is 0.
    """

    run: Run
    fragment: Index
    seq: Count
    tokens: Count
    time: UnixTime
    layout: Sections
    digest: Digest
    lasted_s: Annotated[float, Strict(), Field(ge=0, lt=1e9, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of a peer that has done what it was asked to do; to a ForwardStatusQuery, this answer means yes."""


@dataclass(frozen=True, slots=True)
class StateRequest(RunQuestion):
    """Asks for `length` bytes of a fragment's training state, from byte `offset` on."""

    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True
    fragment: Index
    offset: Count
    length: Annotated[int, Strict(), Field(gt=0, le=MAX_CHUNK_BYTES)]
    kept: Annotated[bool, Strict()] = False  # True: ask for the state on the peer's disk of a fragment that it gave up


@dataclass(frozen=True, slots=True)
class StateChunk:
    """The answer to a StateRequest: the blob is the piece from byte `offset` on of a state of `total` bytes.

    `step` is the step of the learning-rate schedule that the state has reached. In a synchronous run `version` is the
    fragment's version (comm/rounds/contributions.py); in any other run it is 16 zero bytes.
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
    """Asks how soon the peer could execute a micro-batch of `sequences` sequences, from layer `first` on."""

    first: Index
    sequences: Sequences
    drawn: UnixTime = 0.0  # as in a ForwardRequest


@dataclass(frozen=True, slots=True)
class Load:
    """The answer to an Offer: how soon the peer could execute the micro-batch through layers [first, `last`).

    The work queued before the micro-batch takes about `wait_s` seconds. Then its forward pass takes `seconds` seconds.
    """

    run: Run
    wait_s: Annotated[float, Strict(), Field(ge=0, lt=1e9, allow_inf_nan=False)]
    seconds: Annotated[float, Strict(), Field(ge=0, lt=1e9, allow_inf_nan=False)]
    last: Index


@dataclass(frozen=True, slots=True)
class ForwardRequest(RunQuestion):
    """Asks the peer to execute micro-batch (origin peer, number) from layer `first` on. A BackwardResponse answers.

    The blob has the hidden values that enter layer `first`, and the targets. The sender waits `patience_s` seconds for
    the answer. The origin peer may still commit the execution in the next `hold_s` seconds. `drawn` is when the origin
    peer began the micro-batch, by that peer's clock; it orders micro-batches and never measures a duration.
    """

    origin: Peer
    number: Count
    first: Index
    sequences: Sequences
    patience_s: Annotated[float, Strict(), Field(ge=0, le=MAX_ROUTE_S, allow_inf_nan=False)]
    hold_s: Annotated[float, Strict(), Field(ge=0, le=MAX_ROUTE_S, allow_inf_nan=False)]
    layout: Sections
    round: Count = 0  # number of the synchronous round in which the micro-batch is computed; 0 in asynchronous training
    drawn: UnixTime = 0.0


@dataclass(frozen=True, slots=True)
class Hop:
    """One stage of a micro-batch's route: the peer that executed layers [first, last)."""

    peer: Peer
    first: Index
    last: Index


@dataclass(frozen=True, slots=True)
class BackwardResponse:
    """The answer to a ForwardRequest. The blob is the loss's gradient with respect to the request's hidden values.

    `loss` is summed over `tokens` tokens; `hops` is the rest of the route, from the answering peer to the model's end.
    """

    run: Run
    loss: Annotated[float, Strict(), Field(ge=0, lt=1e18, allow_inf_nan=False)]
    tokens: Count
    hops: Annotated[tuple[Hop, ...], Field(max_length=MAX_HOPS)]
    layout: Sections


@dataclass(frozen=True, slots=True)
class ExecutionId:
    """The id of a stage execution: micro-batch (origin peer, number), executed from layer `first` on."""

    origin: Peer
    number: Count
    first: Index


@dataclass(frozen=True, slots=True)
class ForwardStatusQuery(RunQuestion):
    """Asks whether the peer is still working on this execution, for which the sender has sent a ForwardRequest."""

    for_strangers: ClassVar[bool] = True
    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class CommitDecision(RunQuestion):
    """Tells a peer to count its gradients of executions in `commit`, and drop its gradients of executions in `abort`.

    Only the origin peer of an execution may commit it.
    """

    for_strangers: ClassVar[bool] = True
    commit: Annotated[tuple[ExecutionId, ...], Field(max_length=MAX_EXECUTIONS)]
    abort: Annotated[tuple[ExecutionId, ...], Field(max_length=MAX_EXECUTIONS)]


@dataclass(frozen=True, slots=True)
class CommitQuery(RunQuestion):
    """Asks the origin peer whether the gradients that the sender computed in these executions count.

    The answer is a CommitDecision. Executions that the answer does not name are still in flight.
    """

    for_strangers: ClassVar[bool] = True
    executions: Annotated[tuple[ExecutionId, ...], Field(max_length=MAX_EXECUTIONS)]


@dataclass(frozen=True, slots=True)
class LeaseRequest(RunQuestion):
    """Asks the peer to promise that it goes on training a fragment, which the sender is about to give up.

    If `over`, the sender instead releases the peer from its earlier promise.
    """

    fragment: Index
    over: Annotated[bool, Strict()] = False


@dataclass(frozen=True, slots=True)
class RoundMember:
    """A member of a synchronous round, and the layers [first, last) that this member trains."""

    peer: Peer
    first: Index
    last: Index


RoundMembers = Annotated[tuple[RoundMember, ...], Field(max_length=MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class RoundQuery(RunQuestion):
    """Asks which synchronous round the peer is in, and who the round's members are.

    The sender has the weights of layers [first, last) as of the start of `round`. If `joining`, the sender wants to
    become a member with these layers.
    """

    for_strangers: ClassVar[bool] = True
    for_lookers: ClassVar[bool] = True  # LOOK is enough to read the status; `joining` needs Permission.DONATE
    round: Count
    first: Index
    last: Index
    joining: Annotated[bool, Strict()]


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """The answer to a RoundQuery: the round that the peer is in, and the round's members.

    A peer that is in no round lists no members; `round` is then the round that its weights belong to.
    """

    run: Run
    round: Count
    members: RoundMembers


@dataclass(frozen=True, slots=True)
class CollectRequest(RunQuestion):
    """Asks for what member `origin` contributes to a round: its report, or its sum of a fragment's gradients.

    This question goes to `origin`, or to another member that needs the same contribution. A member that has
    given `origin` up without a copy of the contribution refuses with the reason `without`. A member that has given
    `origin` up accepts the contribution only from other members. `member` says whether the sender is a member.
    """

    round: Count
    origin: Peer
    fragment: Index | None  # the fragment whose sum of gradients is wanted; None: the origin's report is wanted
    patience_s: Annotated[float, Strict(), Field(ge=0, le=MAX_PATIENCE_S, allow_inf_nan=False)]
    member: Annotated[bool, Strict()]


@dataclass(frozen=True, slots=True)
class CompletedMicroBatch:
    """The route of a micro-batch that has run through the whole model and back, as its origin peer reports it."""

    number: Count
    tokens: Count
    # Both have one entry for each stage: the peer, as an index into the round's members, and the layer after its last.
    members: Annotated[tuple[Index, ...], Field(min_length=1, max_length=MAX_HOPS)]
    ends: Annotated[tuple[Index, ...], Field(min_length=1, max_length=MAX_HOPS)]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A member's report on a round: its completed micro-batches, and the newcomers that it admits to the next round.

    `loss` is summed over the tokens of these micro-batches. `versions` has the version of each of the member's
    fragments at the round's start. Two members have different versions of a fragment if they used different sums of
    gradients in an earlier step.
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
    """The answer of a peer that refuses a question: the reason in one word, and a detail for the user."""

    reason: Word
    detail: Annotated[str, Strict(), Field(max_length=200), AfterValidator(partial(plain_text, most=200))] = ""


LinkMessage = Hello | Welcome | MembershipProof | Ping | Pong | Probe | Probed
GossipMessage = Pull | Snapshot
RecordMessage = RecordsQuery | PeerRecords
StateMessage = StateRequest | StateChunk | LeaseRequest
RouteMessage = Offer | Load | ForwardRequest | BackwardResponse | ForwardStatusQuery | CommitDecision | CommitQuery
RoundMessage = RoundQuery | RoundStatus | CollectRequest | RoundReport
Message = LinkMessage | RecordMessage | GossipMessage | StateMessage | RouteMessage | RoundMessage | Done | Refused
