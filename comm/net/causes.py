"""Turn libp2p's errors into AskErrors: libp2p runs in a daemon, which reports the cause of an error only as text."""

import errno
import re
from enum import Enum, auto

from decentral.comm.wire.transport import AskError
from decentral.core.reasons import Reason

# Matches the text before the cause in libp2p's dial errors.
BEFORE_CAUSE = re.compile(r"^(\* \[\S+\] )?dial \S+ \S+: (connect: )?")
OTHER_PEER = re.compile(r"peer id mismatch: expected \S+, but remote key matches (\w+)")  # a peer has another id
ANOTHER = "another peer"  # the cause begins with this if a peer with another id answers at the dialled address
NOT_FOUND = "routing: not found"  # the error of a search for a peer of which nobody knows an address
FAILED_AT = re.compile(r"\* \[(\S+)\] (?!dial backoff)")  # matches an address that libp2p dialled in vain
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # out of file handles, or out of memory


class DialFailure(Enum):
    """Kinds of failed dials, for which a user can do different things."""

    NOBODY_LISTENS = auto()
    ANOTHER_PEER = auto()
    NO_ROUTE = auto()
    SILENCE = auto()
    OTHER = auto()


def failure(error: BaseException) -> AskError:
    """Return the AskError for a network error: RESOURCES if this machine lacks files or memory, else UNREACHABLE."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        remedy = "; raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        return AskError(Reason.RESOURCES, f"{error.strerror}{remedy}")
    return AskError(Reason.UNREACHABLE, last_line(error))


def last_line(error: BaseException) -> str:
    """Return the cause that libp2p names in the last line of an error, or the error's class if it has no text."""
    lines = str(error).strip().splitlines()
    if lines and (other := OTHER_PEER.search(lines[-1])):
        return f"{ANOTHER} ({other[1]}) answers there"[:200]
    return BEFORE_CAUSE.sub("", lines[-1].strip())[:200] if lines else type(error).__name__


def dial_failure(detail: str) -> DialFailure:
    """Return the kind of a failed dial, by the text of `AskError.detail` (see `last_line`)."""
    if "connection refused" in detail:
        return DialFailure.NOBODY_LISTENS
    if detail.startswith(ANOTHER):
        return DialFailure.ANOTHER_PEER
    if "no route" in detail or "unreachable" in detail:
        return DialFailure.NO_ROUTE
    return DialFailure.SILENCE if "timeout" in detail.lower() or "deadline" in detail else DialFailure.OTHER


def found_nowhere(text: str) -> bool:
    """Return whether libp2p's error `text` says that it has searched for a peer, found no address, and dialled none."""
    return text.endswith(NOT_FOUND)


def failed_at(text: str) -> list[str]:
    """Return the addresses, without peer ids, that libp2p has dialled in vain, as its error `text` says: at most 16."""
    return FAILED_AT.findall(text)
