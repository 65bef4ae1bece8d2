"""A partner whose window the merge refused is not asked for a while, where others can be asked instead."""

from collections.abc import Sequence
from itertools import count

from decentral.comm.gossip.exchange import DOUBTED_WINDOWS, PullExchange
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.wire.transport import Ask, AskFailed
from decentral.core.config import GossipConfig
from decentral.core.fragments import Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Merged, WindowClosed
from decentral.core.machine import Woke
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from tests.comm.gossip.partners import Partners

LAYOUT = (Section("x", "fp32", 1, 4),)
LIAR, HONEST = PeerId("L"), PeerId("H")


class Turns(Partners):
    """Draws two peers at a time of those that it has, in turn."""

    def __init__(self, peers: Sequence[PeerId]) -> None:
        super().__init__(peers)
        self.draws = count()

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        turn = next(self.draws)
        return [self.peers[(turn + place) % len(self.peers)] for place in range(min(2, len(self.peers)))]


def windows(peers: Sequence[PeerId], number: int) -> list[list[PeerId]]:
    """The partners that are asked in each window; the first window's merge refuses the liar."""
    view = Turns(peers)
    exchange = PullExchange(FragmentContext(RunId("run"), PeerId("A"), 0, 0.0, GossipConfig(), view, view), 10.0)
    asked = []
    for window in range(1, number + 1):
        now = 10.0 * window
        exchange.handle(Woke(), now)
        effects = exchange.handle(WindowClosed(0, exchange.seq, 5, LAYOUT, b"abcd"), now)
        asks = [effect for effect in effects if isinstance(effect, Ask)]
        asked.append([ask.to for ask in asks])
        for ask in asks:
            exchange.handle(AskFailed(ask.tag, ask.to, "cut", 0.1), now)
        rejected = ((LIAR, str(Reason.OPPOSED)),) if window == 1 else ()
        exchange.handle(Merged(0, exchange.seq, (), rejected), now)
    return asked


def test_a_doubted_partner_is_asked_again_after_a_while_only() -> None:
    asked = windows([LIAR, HONEST, PeerId("I"), PeerId("J")], 2 * DOUBTED_WINDOWS)
    assert LIAR in asked[0]
    assert all(LIAR not in partners for partners in asked[1:DOUBTED_WINDOWS])
    assert any(LIAR in partners for partners in asked[DOUBTED_WINDOWS:])


def test_others_are_asked_in_its_place() -> None:
    assert all(len(partners) == 2 for partners in windows([LIAR, HONEST, PeerId("I"), PeerId("J")], DOUBTED_WINDOWS))


def test_who_knows_nobody_else_asks_it_all_the_same() -> None:
    assert windows([LIAR], 3) == [[LIAR]] * 3
