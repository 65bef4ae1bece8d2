"""Which peers answer: asked by whoever has a page to show, as records stay for a minute after their peers have died."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping
from decentral.comm.wire.transport import AskError, Transport
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId

ASKED_EVERY_S = 3.0
MOST_PINGED = 32  # at one time; of a larger swarm some, in turn
SIGN_S = 2.0
UNANSWERED = 2  # in a row: the peer is missed


@dataclass(slots=True)
class SignsOfLife:
    """Asks peers for a sign of life, MOST_PINGED of them each time."""

    transport: Transport
    failures: dict[PeerId, int] = field(default_factory=dict)  # unanswered questions in a row, by peer
    _turn: int = 0

    async def missed(self, peers: Collection[PeerId]) -> list[tuple[PeerId, str]]:
        """Those of the peers that have left UNANSWERED questions unanswered just now, and why."""
        self.failures = {peer: count for peer, count in self.failures.items() if peer in peers}
        found = await at_once(self._ask(peer) for peer in self._next(sorted(peers)))
        return [one for one in found if one is not None]

    def _next(self, known: Sequence[PeerId]) -> Sequence[PeerId]:
        turn = self._turn % max(1, len(known))
        self._turn = turn + MOST_PINGED
        return [*known[turn:], *known[:turn]][:MOST_PINGED]

    async def _ask(self, peer: PeerId) -> tuple[PeerId, str] | None:
        try:
            await self.transport.ask(peer, Envelope(Ping(0)), SIGN_S, 0)
        except AskError as error:
            self.failures[peer] = self.failures.get(peer, 0) + 1
            return (peer, error.reason) if self.failures[peer] == UNANSWERED else None
        self.failures.pop(peer, None)
        return None
