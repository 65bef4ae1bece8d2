"""A peer that goes on from its checkpoint merges nothing that may be in it already."""

import pytest

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.wire import blobs
from decentral.comm.wire.messages import Snapshot
from decentral.core.config import GossipConfig
from decentral.core.fragments import Section
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from tests.comm.gossip.test_windows import Stretched

LAYOUT, BLOB, NOW = (Section("phi", "fp32", 1, 4),), b"1234", 100.0


@pytest.mark.parametrize(("restored_at", "refused"), [(0.0, ""), (94.0, ""), (96.0, Reason.STALE)])
def test_what_was_published_before_a_restart_is_stale(restored_at: float, refused: str) -> None:
    view = Stretched(1, 3.0)
    context = FragmentContext(RunId("run"), PeerId("A"), 0, 0.5, GossipConfig(), view, view, restored_at=restored_at)
    snapshot = Snapshot("run", 0, 95_000, 10, 95.0, LAYOUT, blobs.digest(BLOB))
    assert snapshots.reason_to_refuse(context, snapshot, BLOB, LAYOUT, 0, NOW, len(BLOB)) == refused


def test_what_a_partner_sends_says_nothing_about_how_long_our_windows_are() -> None:
    asked: list[int] = []

    class Recorded(Stretched):
        def period_s(self, fragment: int, size: int) -> float:
            asked.append(size)
            return super().period_s(fragment, size)

    view = Recorded(1, 3.0)
    context = FragmentContext(RunId("run"), PeerId("A"), 0, 0.5, GossipConfig(), view, view)
    snapshot = Snapshot("run", 0, 95_000, 10, 95.0, LAYOUT, blobs.digest(BLOB))
    assert snapshots.reason_to_refuse(context, snapshot, BLOB, LAYOUT, 0, NOW, 77) == ""
    assert asked == [77]
