"""Ping peers for the live page, which cannot rely on DHT records: the record of a dead peer stays for a minute."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping
from decentral.comm.wire.transport import AskError, Transport
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId

ASKED_EVERY_S = 3.0
MOST_PINGED = 32  # at most this many peers are pinged at once; larger swarms take turns
SIGN_S = 2.0
UNANSWERED = 2  # a peer is reported after this many unanswered pings in a row


@dataclass(slots=True)
class SignsOfLife:
    """State of the pings to a swarm: which peers are next, and how many pings in a row each peer has not answered."""

    transport: Transport
    failures: dict[PeerId, int] = field(default_factory=dict)
    _turn: int = 0

    async def missed(self, peers: Collection[PeerId]) -> list[tuple[PeerId, str]]:
        """Ping the next MOST_PINGED of these peers.

        Returns:
            (peer, reason of the failure) for each peer that has now failed to answer UNANSWERED pings in a row.
        """
        self.failures = {peer: count for peer, count in self.failures.items() if peer in peers}
        found = await at_once(self._ask(peer) for peer in self._next(sorted(peers)))
        return [one for one in found if one is not None]

    def _next(self, known: Sequence[PeerId]) -> Sequence[PeerId]:
        """Return the next MOST_PINGED peers after the last call's peers; after the last peer comes the first."""
        turn = self._turn % max(1, len(known))
        self._turn = turn + MOST_PINGED
        return [*known[turn:], *known[:turn]][:MOST_PINGED]

    async def _ask(self, peer: PeerId) -> tuple[PeerId, str] | None:
        """Ping a peer. Return (peer, reason) if it has now failed to answer UNANSWERED pings in a row, else None."""
        try:
            await self.transport.ask(peer, Envelope(Ping(0)), SIGN_S, 0)
        except AskError as error:
            self.failures[peer] = self.failures.get(peer, 0) + 1
            return (peer, error.reason) if self.failures[peer] == UNANSWERED else None
        self.failures.pop(peer, None)
        return None
