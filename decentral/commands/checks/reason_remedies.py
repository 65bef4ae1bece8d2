"""Remedies for the reasons of failed exchanges and joins (decentral/core/reasons.py) in a journal."""

from decentral.core.reasons import Reason

UPGRADE_ALL = "let all peers run one version of decentral: python -m pip install --upgrade decentral"
DATA_DAMAGED = "a partner sends damaged data: it runs another version, its memory is faulty, or it is hostile"
TAKES_TIME = "wait a minute; if it lasts, check the load of both machines"

REMEDIES: dict[str, str] = {
    Reason.VERSION: UPGRADE_ALL,
    Reason.UNKNOWN: UPGRADE_ALL,
    Reason.FIELDS: UPGRADE_ALL,
    Reason.GARBAGE: f"{UPGRADE_ALL}; or a program that is not decentral has connected to the port",
    Reason.DEADLINE: "answers come too late: a slow or lossy link, or a loaded machine; see download and upload",
    Reason.UNREACHABLE: "no connection to partners: those behind routers need a forwarded port and --announce",
    Reason.CUT: "connections break: partners die, or a router drops them; check whether the link is stable",
    Reason.RESOURCES: "this machine has no file descriptor or memory left: raise ulimit -n, end other programs",
    Reason.SILENT: "a partner no longer answers: it was suspended, cut off, or killed; restart it",
    Reason.RUN: "a partner is in another run: compare the run's name on both, and the address of --join",
    Reason.ALGORITHM: "a partner runs another gossip.algorithm: let all peers of a run use the same config",
    Reason.FRAGMENT: f"partners have given up those layers; {TAKES_TIME}",
    Reason.SPAN: f"partners have given up those layers; {TAKES_TIME}",
    Reason.STALE: "partners' snapshots are older than two windows: their links or devices are too slow",
    Reason.NOTHING_NEWER: "nothing to do: partners are slower than this peer, and have closed no window since",
    Reason.OPPOSED: "a partner's progress points against this peer's: other data, another version, or a hostile peer",
    Reason.ALONE: "no other peer holds these layers: start more peers, or find out why others do not reach this one",
    Reason.FAILED: "every partner failed: see the other reasons, and the check reachability",
    Reason.BUSY: f"partners take no more requests now; {TAKES_TIME}",
    Reason.NOT_READY: f"partners are still joining; {TAKES_TIME}",
    Reason.STRANGER: "partners have no record of this peer: wait a minute; then see the checks clock and version",
    Reason.EXPIRED: "records or invitations have expired: see the checks clock and invitation",
    Reason.UNINVITED: "the swarm is private: ask its founder for an invitation, and give it with --invite FILE",
    Reason.REVOKED: "the founder has revoked an invitation: ask for a new one",
    Reason.PERMISSION: "an invitation does not allow this: ask the founder for one to train",
    Reason.SIGNATURE: DATA_DAMAGED,
    Reason.IDENTITY: DATA_DAMAGED,
    Reason.DIGEST: DATA_DAMAGED,
    Reason.SHAPE: f"the partner's fragments differ from this peer's: {UPGRADE_ALL}",
    Reason.NAN: "a partner's weights have diverged: lower train.learning_rate in the next run",
    Reason.MAGNITUDE: "a partner's weights have diverged: lower train.learning_rate in the next run",
    Reason.DONORS: "no peer sends its state: all are joining, or cannot be reached; wait a minute",
    Reason.MEMORY: "the device has too little memory: give less --memory, or end other programs",
    Reason.DISK: "the disk is full: make room in the state folder",
}


def remedy_of(reason: str) -> str:
    """Return what a user can do about a reason; for a reason without a remedy, a reference to docs/PROTOCOL.md."""
    return REMEDIES.get(reason, f"see {reason!r} in the table of reasons, docs/PROTOCOL.md")
