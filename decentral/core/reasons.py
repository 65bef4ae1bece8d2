"""Why something was refused, failed, or was given up: every reason that a peer names, on the wire and in its journal.

docs/PROTOCOL.md has a table of them, and tests/test_docs.py compares it with this file. Another peer may send a word
that is not here, so a reason that was received is plain text; a member compares equal to its own text.
"""

from enum import StrEnum


class Reason(StrEnum):
    """One word for each reason; its value is what travels and what the journal shows."""

    # The format
    VERSION = "version"  # the header has another version of the protocol
    UNKNOWN = "unknown"  # there is no message of that name
    FIELDS = "fields"  # the message has other fields than ours, or one is out of its bounds
    GARBAGE = "garbage"  # the bytes are not a header, or not a record
    OVERSIZE = "oversize"  # a header or a blob is larger than its bound
    UNEXPECTED = "unexpected"  # the message does not belong here

    # The transport
    DEADLINE = "deadline"  # no answer came in time
    UNREACHABLE = "unreachable"  # no peer listens at that address
    CUT = "cut"  # the stream ended early
    RESOURCES = "resources"  # this machine cannot ask: it has no open file or no memory left
    SILENT = "silent"  # a peer has left two questions unanswered

    # The run and its parts
    RUN = "run"  # the message belongs to another run
    ALGORITHM = "algorithm"  # this run uses another gossip algorithm
    FRAGMENT = "fragment"  # this peer has no such fragment
    SPAN = "span"  # this peer does not hold these layers
    OFFSET = "offset"  # the state has no byte at that offset

    # A blob
    DIGEST = "digest"  # the bytes do not have the digest that was announced
    SHAPE = "shape"  # the sections are not those of this fragment or micro-batch
    DIFFERS = "differs"  # a donor's numbers are far from those of two other holders
    CODEC = "codec"  # a section is written with an unknown codec
    LEVELS = "levels"  # quantised numbers lie outside their codec's levels
    NAN = "nan"  # a number is not finite
    MAGNITUDE = "magnitude"  # a number is finite, but larger than any that training gives
    VOCABULARY = "vocabulary"  # a target is not a token

    # Records in the DHT
    IDENTITY = "identity"  # the key does not belong to that peer
    SIGNATURE = "signature"  # the signature does not fit
    EXPIRED = "expired"  # the record, or an invitation, has expired, or the record would last too long
    AHEAD = "ahead"  # the record is of a clock that is further ahead than a record lives

    # Membership of a private swarm
    UNINVITED = "uninvited"  # the peer has not proved that the swarm's founder has invited it
    REVOKED = "revoked"  # the founder has revoked the peer's invitation
    PERMISSION = "permission"  # the peer's invitation does not allow this

    # Snapshots and exchanges
    REPLAY = "replay"  # this snapshot, or a later one, was already taken
    STALE = "stale"  # the snapshot is older than a minute and than two windows
    NOTHING_NEWER = "nothing-newer"  # there is nothing that the asker does not have
    OPPOSED = "opposed"  # its progress points against ours, or nowhere: it counts for nothing
    ALONE = "alone"  # there was no partner
    FAILED = "failed"  # every partner failed

    # This peer cannot do it now
    BUSY = "busy"  # this peer takes no more work at present
    NOT_READY = "not-ready"  # this peer does not train yet, or has not come that far
    STRANGER = "stranger"  # this peer knows no record of the asker, and answers only what a newcomer has to ask
    LEAVING = "leaving"  # this peer leaves the swarm
    GONE = "gone"  # this peer no longer works on it, or has gone

    # Micro-batches
    LATE = "late"  # the time for it is over
    MOVED = "moved"  # another peer has asked for the same, or it took another route
    TRIED = "tried"  # it has failed at as many peers as may be tried
    FORGOTTEN = "forgotten"  # what its backward pass needs is no longer here
    COUNTED = "counted"  # its gradients count already

    # Synchronous rounds
    ROUND = "round"  # the message belongs to another round
    ORIGIN = "origin"  # the report or sum is another member's
    HOPS = "hops"  # the route does not lead through the model
    NUMBER = "number"  # a micro-batch is named twice
    VERSIONS = "versions"  # there are not as many versions as fragments
    WITHOUT = "without"  # a member does not have it, and will no longer take it
    EXPELLED = "expelled"  # the asker is not a member of that round
    RESTARTED = "restarted"  # the member acted in that round before it came back
    APART = "apart"  # the others train in a larger round
    DIVERGED = "diverged"  # a fragment has another version than the other holders'

    # Changes of span
    DONORS = "donors"  # no peer gives the state
    MEMORY = "memory"  # the device does not have the memory
    DISK = "disk"  # the state could not be written
    NO_WEIGHTS = "no-weights"  # the run starts from the weights of a folder that this peer has not
    NEEDED = "needed"  # too few others hold what would be given up
    PROMISED = "promised"  # this peer has granted a replica lease on it
    MOVING = "moving"  # this peer is giving that fragment up itself
    YIELDED = "yielded"  # another peer gives the same fragment up, and goes first
    REPLANNED = "replanned"  # a better plan wants another span
    LEGS = "legs"  # stage executions under way took too long


OTHER_REASON = "other"  # a word that another peer has made up


def known_reason(text: str) -> str:
    """Return the text if it is a reason of ours or none at all: what counts by reason counts by few."""
    return text if text in _REASONS else OTHER_REASON


_REASONS = frozenset({"", *map(str, Reason)})

SILENT = (Reason.UNREACHABLE, Reason.DEADLINE, Reason.CUT)
"""Why a question has failed whose peer may not be there any more."""
