"""A partner that refuses without a word is refused service like any other: nothing old is merged, nothing is lost.

The codec refuses an empty reason, so these hold the machines to it that get their messages without the codec.
"""

from collections.abc import Sequence

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.push import PushExchange
from decentral.comm.gossip.swap import SwapExchange
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message, Refused
from decentral.comm.wire.transport import Answered, Ask, Effect
from decentral.core.algorithms import FragmentContext
from decentral.core.config import GossipConfig
from decentral.core.fragments import Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Absorb, Merge, Merged, WindowClosed
from decentral.core.machine import Woke
from decentral.core.units import Seconds
from tests.comm.gossip.partners import Partners

OWN, PARTNER, BLOB = PeerId("A"), PeerId("B"), b"abcd"
LAYOUT = (Section("x", "fp32", 1, 4),)


def context(peer: PeerId) -> FragmentContext:
    return FragmentContext(RunId("run"), peer, 0, 0.0, GossipConfig(), Partners([PARTNER]))


def closed(seq: int) -> WindowClosed:
    return WindowClosed(0, seq, 5, 0.1, LAYOUT, BLOB)


def question(machine: SwapExchange | PushExchange, now: Seconds) -> Ask:
    """Ends the window; the question that follows."""
    machine.handle(Woke(), now)
    (ask,) = machine.handle(closed(machine.seq), now)
    assert isinstance(ask, Ask)
    return ask


def answered(ask: Ask, message: Message, blob: bytes = b"") -> Answered:
    return Answered(ask.tag, PARTNER, Envelope(message, blob), 0.1, 0.1, 1, 1)


def merges(effects: Sequence[Effect]) -> list[int]:
    return [len(effect.contributions) for effect in effects if isinstance(effect, Merge)]


def test_a_swap_refused_without_a_word_merges_nothing_of_an_earlier_one() -> None:
    swap = SwapExchange(context(OWN), 10.0)
    theirs = snapshots.describe(context(PARTNER), closed(10_000), 10.0)
    assert merges(swap.handle(answered(question(swap, 10.0), theirs, BLOB), 10.1)) == [1]
    swap.handle(Merged(0, swap.seq, (PARTNER,), ()), 10.2)
    assert merges(swap.handle(answered(question(swap, 20.0), Refused("")), 20.1)) == [0]


def test_mass_that_is_refused_without_a_word_is_taken_back() -> None:
    push = PushExchange(context(OWN), 10.0)
    effects = push.handle(answered(question(push, 10.0), Refused("")), 10.1)
    assert isinstance(effects[0], Absorb)
