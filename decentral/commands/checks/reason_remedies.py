"""What the reasons of decentral/core/reasons.py mean for a user who finds them in a journal, and what to do."""

from decentral.core.reasons import Reason

UPGRADE_ALL = "let all peers run one version of decentral: python -m pip install --upgrade decentral"
DATA_DAMAGED = "a partner sends what nobody can use: it runs another version, its memory is bad, or it is hostile"
TAKES_TIME = "it passes by itself; if it lasts, look at the load of both machines"

REMEDIES: dict[Reason, str] = {
    Reason.VERSION: UPGRADE_ALL,
    Reason.UNKNOWN: UPGRADE_ALL,
    Reason.FIELDS: UPGRADE_ALL,
    Reason.GARBAGE: f"{UPGRADE_ALL}; what is no decentral peer may have found the port",
    Reason.DEADLINE: "answers come too late: a slow or lossy link, or a loaded machine; see download and upload",
    Reason.UNREACHABLE: "no connection to partners: those behind routers need a forwarded port and --announce",
    Reason.CUT: "connections break: partners die, or a router drops them; see whether the link is stable",
    Reason.RESOURCES: "this machine has no open file or memory left: raise ulimit -n, end other programs",
    Reason.SILENT: "a partner answers no more: it was suspended, cut off, or killed",
    Reason.RUN: "a partner is in another run: compare the run's name on both, and the address of --join",
    Reason.ALGORITHM: "a partner runs another gossip.algorithm: peers of one run have one config",
    Reason.FRAGMENT: f"partners have given those layers up meanwhile; {TAKES_TIME}",
    Reason.SPAN: f"partners have given those layers up meanwhile; {TAKES_TIME}",
    Reason.STALE: "partners' snapshots are older than two windows: their links or devices are too slow",
    Reason.NOTHING_NEWER: "partners have closed no window since: they are slower than this peer, which is well",
    Reason.OPPOSED: "a partner's progress points against this peer's: other data, another version, or a hostile peer",
    Reason.ALONE: "no other peer holds these layers: start more peers, or see why others do not reach this one",
    Reason.FAILED: "every partner failed: see the reasons of single ones, and reachability",
    Reason.BUSY: f"partners take no more questions now; {TAKES_TIME}",
    Reason.NOT_READY: f"partners are still joining; {TAKES_TIME}",
    Reason.STRANGER: "partners have no record of this peer: wait a minute; then see clock, and version",
    Reason.EXPIRED: "records or invitations have expired: see clock, and invitation",
    Reason.UNINVITED: "the swarm is private: ask its founder for an invitation, and give it with --invite FILE",
    Reason.REVOKED: "the founder has revoked an invitation: ask for a new one",
    Reason.PERMISSION: "an invitation does not allow this: ask the founder for one to train",
    Reason.SIGNATURE: DATA_DAMAGED,
    Reason.IDENTITY: DATA_DAMAGED,
    Reason.DIGEST: DATA_DAMAGED,
    Reason.SHAPE: f"the partner's model is cut otherwise: {UPGRADE_ALL}",
    Reason.NAN: "a partner's weights have diverged: lower train.learning_rate in the next run",
    Reason.MAGNITUDE: "a partner's weights have diverged: lower train.learning_rate in the next run",
    Reason.DONORS: "no peer gives its state: all are joining, or cannot be reached",
    Reason.MEMORY: "the device has no memory for it: give less --memory, or end other programs",
    Reason.DISK: "the disk takes no more: make room in the state folder",
}


def remedy_of(reason: str) -> str:
    """What to do where this is the commonest reason; the table of docs/PROTOCOL.md has what the others mean."""
    return REMEDIES.get(reason, f"see {reason!r} in the table of reasons, docs/PROTOCOL.md")  # type: ignore[call-overload,no-any-return]
