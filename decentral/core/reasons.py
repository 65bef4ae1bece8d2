"""Why something was refused, failed, or given up: every reason that a peer names, on the wire and in its journal.

docs/PROTOCOL.md lists them; a test holds its table against this file. Another peer may send a word that is not here:
a reason that was received is plain text, and equal to one of these where it is the same word.
"""

from enum import StrEnum


class Reason(StrEnum):
    # The format
    VERSION = "version"  # the header has another version of the protocol
    UNKNOWN = "unknown"  # no message has that name
    FIELDS = "fields"  # the message has other fields, or one out of its bounds
    GARBAGE = "garbage"  # the bytes are no header, or no record
    OVERSIZE = "oversize"  # a header or a blob is larger than its bound
    UNEXPECTED = "unexpected"  # the message is not the one that was to be expected here

    # The transport
    DEADLINE = "deadline"  # no answer came in time
    UNREACHABLE = "unreachable"  # nobody listens there
    CUT = "cut"  # the stream ended early
    SILENT = "silent"  # a peer has left two questions unanswered

    # Which run, and what of it
    RUN = "run"  # it belongs to another run
    ALGORITHM = "algorithm"  # this run gossips by another algorithm
    FRAGMENT = "fragment"  # this peer has no such fragment
    SPAN = "span"  # this peer does not hold these layers
    OFFSET = "offset"  # the state has no byte at that place

    # A blob
    DIGEST = "digest"  # the bytes are not those that were described
    SHAPE = "shape"  # the sections are not those of this fragment or micro-batch
    CODEC = "codec"  # a section is written with a codec that we do not know
    LEVELS = "levels"  # quantised numbers lie outside their codec's levels
    NAN = "nan"  # a number is not finite
    WEIGHT = "weight"  # pushed mass weighs nothing, or too much
    VOCABULARY = "vocabulary"  # a target is no token

    # Records in the DHT
    IDENTITY = "identity"  # the key is not that peer's
    SIGNATURE = "signature"  # the signature does not fit
    EXPIRED = "expired"  # the record is over, or lasts too long

    # Snapshots and exchanges
    REPLAY = "replay"  # this snapshot, or a later one, was already taken
    STALE = "stale"  # it is older than gossip.max_age_s
    NOTHING_NEWER = "nothing-newer"  # there is nothing that the asker does not have
    ALONE = "alone"  # there was no partner
    CROSSED = "crossed"  # both have asked each other at the same time
    NO_OFFER = "no-offer"  # a commit belongs to no offer
    NO_COMMIT = "no-commit"  # the commit did not come in time
    COMMIT_LOST = "commit-lost"  # nobody knows whether the partner has merged
    MASS_LOST = "mass-lost"  # nobody knows where pushed mass is

    # Not now
    BUSY = "busy"  # this peer has as much to do as it takes
    NOT_READY = "not-ready"  # this peer does not train yet, or is not as far
    LEAVING = "leaving"  # this peer leaves the swarm
    GONE = "gone"  # this peer has nothing to do with that any more, or is not there

    # Micro-batches
    LATE = "late"  # the time for it is over
    MOVED = "moved"  # another peer has asked for the same, or it took another way
    TRIED = "tried"  # it has failed at as many peers as are tried
    FORGOTTEN = "forgotten"  # what its backward pass needs is not here any more
    COUNTED = "counted"  # its gradients count already

    # Synchronous rounds
    ROUND = "round"  # it belongs to another round
    ORIGIN = "origin"  # it is the word of another member
    HOPS = "hops"  # the route does not lead through the model
    NUMBER = "number"  # a micro-batch is named twice
    VERSIONS = "versions"  # there are not as many versions as fragments
    WITHOUT = "without"  # a member does not have it, and will not take it any more
    EXPELLED = "expelled"  # the asker is not a member of that round
    RESTARTED = "restarted"  # the member acted in that round before it came back
    APART = "apart"  # the others train in a greater round
    DIVERGED = "diverged"  # a fragment has another version than the other holders'

    # Changes of spans
    DONORS = "donors"  # nobody gives the state
    MEMORY = "memory"  # the device has no room for it
    DISK = "disk"  # the state could not be written
    NEEDED = "needed"  # too few others hold what would be given up
    PROMISED = "promised"  # another peer relies on it
    MOVING = "moving"  # this peer is giving that fragment up itself
    YIELDED = "yielded"  # another peer gives the same fragment up, and goes first
    REPLANNED = "replanned"  # a better plan wants another span
    LEGS = "legs"  # stage executions under way took too long

    FAILED = "failed"  # every partner failed
