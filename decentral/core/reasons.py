"""Every reason that a peer sends or journals when it refuses a message, abandons work, or fails.

The comment behind a reason is its meaning on the documentation's page REASONS. Another peer may send a word that is not
listed, so a received reason is a plain string; a member of `Reason` compares equal to its string.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Why a message was refused, or work abandoned or failed. The value, one word, is sent to peers and journaled."""

    # Reasons about the format of a message
    VERSION = "version"  # the header has another version of the protocol
    UNKNOWN = "unknown"  # no message has that name
    FIELDS = "fields"  # the message lacks a field, has an unknown field, or has a value out of bounds
    GARBAGE = "garbage"  # the bytes cannot be decoded as a header or as a record
    OVERSIZE = "oversize"  # a header or a blob is larger than its bound
    UNEXPECTED = "unexpected"  # a message of this name is not allowed at this point of the protocol

    # Reasons about the transport
    DEADLINE = "deadline"  # no answer in time
    UNREACHABLE = "unreachable"  # nobody accepts connections at the peer's address
    CUT = "cut"  # the stream ended before the whole message had arrived
    RESOURCES = "resources"  # this machine cannot send a request: it has no file descriptor or no memory left
    SILENT = "silent"  # a peer has left two requests unanswered

    # Reasons about the run, its fragments and its layers
    RUN = "run"  # the message belongs to another run
    ALGORITHM = "algorithm"  # the gossip algorithm of this run has no exchange of the requested kind
    FRAGMENT = "fragment"  # this peer does not hold the requested fragment
    SPAN = "span"  # the request names layers that this peer does not hold
    OFFSET = "offset"  # the requested byte offset lies beyond the end of the state

    # Reasons about the content of a received blob
    DIGEST = "digest"  # the bytes do not have the digest (hash) that the sender announced
    SHAPE = "shape"  # the blob's tensors differ in number, names or sizes from those of the fragment or micro-batch
    DIFFERS = "differs"  # a donor's weights are far from those that two other holders of the fragment sent
    CODEC = "codec"  # the blob names a codec that this version does not have
    LEVELS = "levels"  # a quantised number lies outside the range that its codec can produce
    NAN = "nan"  # a received tensor contains NaN or infinity
    MAGNITUDE = "magnitude"  # a received number is finite, but larger than any number in healthy training
    VOCABULARY = "vocabulary"  # a target is not a token of the vocabulary, or all targets are masked

    # Reasons about records in the DHT
    IDENTITY = "identity"  # the key does not belong to that peer
    SIGNATURE = "signature"  # the signature is not valid
    EXPIRED = "expired"  # a record or an invitation has expired, or the lifetime of a record is too long
    AHEAD = "ahead"  # the record's time is in the future by more than the lifetime of a record

    # Reasons about membership of a private swarm
    UNINVITED = "uninvited"  # the peer has not proved that the swarm's founder invited it
    REVOKED = "revoked"  # the founder revoked the invitation
    PERMISSION = "permission"  # the peer's invitation does not allow the requested action

    # Reasons about snapshots and exchanges
    REPLAY = "replay"  # this snapshot, or a later one, was already merged
    STALE = "stale"  # the snapshot is older than two gossip windows and a minute, or the state is of another round
    NOTHING_NEWER = "nothing-newer"  # the requesting peer already has the newest snapshot
    OPPOSED = "opposed"  # the merge gave a partner's window no weight: zero, against ours, a copy, or implausible
    ALONE = "alone"  # the peer found no partner for an exchange of the fragment
    FAILED = "failed"  # the exchanges with all partners failed

    # Reasons about the peer that is asked
    BUSY = "busy"  # this peer has no capacity for more work now; the sender may ask again
    NOT_READY = "not-ready"  # this peer does not train yet, or has not reached the requested step
    STRANGER = "stranger"  # this peer has no record of the requesting peer, and answers only newcomers' requests
    LEAVING = "leaving"  # this peer leaves the swarm
    GONE = "gone"  # this peer has dropped the micro-batch or round, or has left the swarm

    # Reasons about micro-batches
    LATE = "late"  # the deadline of the micro-batch, round or exchange has passed
    MOVED = "moved"  # another request for the same micro-batch replaced this one, or the micro-batch took another route
    TRIED = "tried"  # too many peers failed to compute the micro-batch, so it is given up
    FORGOTTEN = "forgotten"  # this peer has freed the activations that the micro-batch's backward pass needs
    COUNTED = "counted"  # an optimizer step has already used the micro-batch's gradients

    # Reasons about synchronous rounds
    ROUND = "round"  # the message belongs to another round
    ORIGIN = "origin"  # a member was asked for its own report, but sent the report of another member
    HOPS = "hops"  # the peers that computed the micro-batch do not cover all layers of the model
    NUMBER = "number"  # the message names a micro-batch twice, or claims a step number out of bounds
    VERSIONS = "versions"  # the message must give exactly one version of the weights for each fragment
    WITHOUT = "without"  # the member lacks a report or sum that it was asked for, and finishes the round without it
    EXPELLED = "expelled"  # the requesting peer is not a member of the requested round
    RESTARTED = "restarted"  # the member has restarted since it took part in the requested round
    APART = "apart"  # the swarm split: the other members are in another round, which has more members
    DIVERGED = "diverged"  # this peer's weights of a fragment differ from those of most other holders

    # Reasons about changes of a peer's span of layers
    DONORS = "donors"  # no peer offers the state of a fragment that this peer wants to take over
    MEMORY = "memory"  # the device lacks memory
    DISK = "disk"  # the state could not be written
    NO_WEIGHTS = "no-weights"  # the run starts from a folder of pretrained weights, which this peer does not have
    NEEDED = "needed"  # if this peer gave up these fragments, too few other peers would hold them
    PROMISED = "promised"  # this peer has promised others to keep a fragment that it wants to give up
    MOVING = "moving"  # this peer cannot promise to keep the fragment, since it gives the fragment up itself
    YIELDED = "yielded"  # another peer gives up the same fragment now, and goes first
    REPLANNED = "replanned"  # a better plan gives this peer other layers, so it stops the present change
    NOT_DRAINED = "not-drained"  # the peer waited too long for its micro-batches in flight before it changed its layers


OTHER_REASON = "other"  # every text that is not a `Reason` is counted under this word


def known_reason(text: str) -> str:
    """Return `text` if it is a `Reason` or "", else `OTHER_REASON`, to bound the number of different reasons."""
    return text if text in _REASONS else OTHER_REASON


_REASONS = frozenset({"", *map(str, Reason)})

SUSPECT_GONE = (Reason.UNREACHABLE, Reason.DEADLINE, Reason.CUT)
"""The reasons of a failed request that suggest that the asked peer is gone."""
