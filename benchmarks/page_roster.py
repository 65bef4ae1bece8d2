"""The records of a swarm of 1,000, for the parts of benchmarks/page.py that need a roster without the peers."""

from decentral.core.ids import PeerId
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile, Standing

ROSTER = 1000  # peers
RENEWED_S = 20  # as often as a peer renews its record


def roster() -> dict[PeerId, PeerRecord]:
    """All records, as of time 0."""
    return {PeerId(f"Qm{number:044d}"): record(number, 0.0) for number in range(ROSTER)}


def record(number: int, now: float) -> PeerRecord:
    """The record that peer `number` publishes at time `now`."""
    links = tuple((f"{other:08d}", 1_000_000, 30) for other in range(8))
    standing = Standing(2.0, 2.1, (990, 2, 1, 2, 0, 5), (900, 50, 3), 1 << 30, 1 << 30, links)
    profile = Profile("NVIDIA H100", 80 << 30, 1e14, 1e5, 1e7, 1e7, 0.03, "home", "decentral 0.1.0")
    return PeerRecord(
        "run-000000", now, (), profile, 0, 4, number, number, 1 << 30, 0, PeerPhase.TRAINING, 2.0, (), standing
    )
