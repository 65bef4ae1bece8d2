"""A partner whose swaps are refused, or committed at the last moment, does not block a peer for the others."""

from dataclasses import dataclass, field

from decentral.comm.gossip.snapshots import ExchangePhase
from decentral.comm.gossip.swap import SwapExchange
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused, Snapshot, Swap, SwapCommit
from decentral.comm.wire.transport import Asked, Effect, Event, Reply
from decentral.core.algorithms import FragmentContext
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import CloseWindow, Merge, Merged, Section, WindowClosed
from decentral.core.machine import Woke
from tests.comm.gossip.partners import Partners

LAYOUT = (Section("theta", "int8", 256, 258),)
BLOB = bytes(258)
LIAR, HONEST = PeerId("liar"), PeerId("honest")
EDGE_S = 0.05  # until the training thread is at a step edge


@dataclass
class Responder:
    """A peer whose own windows never end, in virtual time of a hundredth of a second."""

    now: float = 100.0
    busy_s: float = 0.0
    merged: int = 0
    jobs: list[tuple[float, Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        gossip = GossipConfig(algorithm="symmetric")
        context = FragmentContext(RunId("run"), PeerId("me"), 0, 0.5, gossip, Partners([HONEST], 1e9))
        self.exchange = SwapExchange(context, 1e9)
        self.requests = 0

    def handle(self, event: Event) -> list[Effect]:
        effects = self.exchange.handle(event, self.now)
        for effect in effects:
            match effect:
                case CloseWindow(seq=seq):
                    self.jobs.append((self.now + EDGE_S, WindowClosed(0, seq, 10, 0.1, LAYOUT, BLOB)))
                case Merge(seq=seq, contributions=given):
                    self.merged += bool(given)
                    self.jobs.append((self.now + EDGE_S, Merged(0, seq, tuple(one.peer for one in given), ())))
        return effects

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(100 * seconds)):
            self.now = round(self.now + 0.01, 2)
            due, self.jobs = (
                [one for one in self.jobs if one[0] <= self.now],
                [one for one in self.jobs if one[0] > self.now],
            )
            for _, outcome in due:
                self.handle(outcome)
            wake_at = self.exchange.wake_at
            if wake_at is not None and self.now >= wake_at:
                self.handle(Woke())
            self.busy_s += 0.01 * (self.exchange.state is not ExchangePhase.OPEN)

    def swap(self, peer: PeerId, digest: bytes = blobs.digest(BLOB)) -> str:
        """What a swap is refused with at once; "" if it is not."""
        self.requests += 1
        offered = Snapshot(RunId("run"), 0, int(self.now * 1000), 1, 0.1, self.now, LAYOUT, digest)
        for effect in self.handle(Asked(self.requests, peer, Envelope(Swap(offered), BLOB))):
            if isinstance(effect, Reply) and isinstance(effect.envelope.message, Refused):
                return effect.envelope.message.reason
        return ""

    def commit(self, peer: PeerId) -> None:
        self.requests += 1
        commit = SwapCommit(RunId("run"), 0, self.exchange._offered_seq)
        self.handle(Asked(self.requests, peer, Envelope(commit)))


def test_a_swap_that_is_refused_closes_no_window() -> None:
    peer = Responder()
    for _ in range(600):
        peer.swap(LIAR, bytes(16))
        peer.pass_time(0.1)
    assert peer.busy_s < 1.0
    assert peer.swap(HONEST) == ""


def test_a_partner_that_commits_at_the_last_moment_blocks_no_more_than_one_that_never_does() -> None:
    peer = Responder()
    peer.swap(LIAR)
    peer.pass_time(0.1)
    peer.commit(LIAR)
    peer.pass_time(0.1)
    peer.busy_s = 0.0
    while peer.now < 900.0:
        peer.swap(LIAR)
        peer.pass_time(1.0)
        if peer.exchange.state is ExchangePhase.OFFERED and peer.exchange._partner == LIAR:
            peer.pass_time(max(0.0, peer.exchange._commit_by - peer.now - 0.1))
            peer.commit(LIAR)
    whole_s = peer.now - 100.0
    assert peer.busy_s < 0.25 * whole_s


def test_a_partner_that_commits_soon_is_taken_again_and_again() -> None:
    peer = Responder()
    for _ in range(50):
        assert peer.swap(HONEST) == ""
        peer.pass_time(0.2)
        peer.commit(HONEST)
        peer.pass_time(0.1)
    assert peer.merged == 50
