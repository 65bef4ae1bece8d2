"""A partner that refuses without a word is refused service like any other: nothing is merged, and the exchange ends.

The codec refuses an empty reason, so this holds the machine to it that gets its messages without the codec.
"""

from decentral.comm.gossip.exchange import PullExchange
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused
from decentral.comm.wire.transport import Answered, Ask
from decentral.core.config import GossipConfig
from decentral.core.fragments import Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Merge, WindowClosed
from decentral.core.machine import Woke
from tests.comm.gossip.partners import Partners

PARTNER = PeerId("B")
LAYOUT = (Section("x", "fp32", 1, 4),)


def test_a_pull_refused_without_a_word_merges_nothing() -> None:
    view = Partners([PARTNER])
    context = FragmentContext(RunId("run"), PeerId("A"), 0, 0.0, GossipConfig(), view, view)
    pull = PullExchange(context, 10.0)
    pull.handle(Woke(), 10.0)
    (ask,) = pull.handle(WindowClosed(0, pull.seq, 5, LAYOUT, b"abcd"), 10.0)
    assert isinstance(ask, Ask)
    effects = pull.handle(Answered(ask.tag, PARTNER, Envelope(Refused("")), 0.1, 0.1, 1, 1), 10.1)
    assert Merge(0, pull.seq, ()) in effects
