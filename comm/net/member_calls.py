"""Remote calls of the DHT's nodes in a private swarm: to members and from members only.

hivemind's DHT calls others by unary calls of its P2P object. It gets one that looks the same: what strangers call
raises before the DHT sees it, so they learn no peers, read no records, even encrypted ones, and store none; and before
we call a peer, both have proved to be members.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message
from hivemind.p2p import P2P, P2PContext, PeerID

from decentral.comm.wire.private_swarm import NOT_COUNTED, PrivateSwarm
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason

Call = Callable[[Message, P2PContext], Awaitable[Message]]
Prove = Callable[[PeerId], Awaitable[None]]


class MemberCalls:
    """A P2P of hivemind whose calls are for members."""

    def __init__(self, p2p: P2P, private: PrivateSwarm, prove: Prove) -> None:
        """`prove` shows our proof to a peer, and takes its own. It raises AskError if one of the two is no member."""
        self._p2p, self._private, self._prove = p2p, private, prove

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def add_protobuf_handler(self, name: str, handler: Call, kind: type[Message], **options: bool) -> None:
        """Registers a handler that members may call."""

        async def for_members(request: Message, context: P2PContext) -> Message:
            refusal = self._private.refusal(PeerId(context.remote_id.to_base58()))
            if refusal is not None:
                raise PermissionError(_marked(refusal))
            return await handler(request, context)

        await self._p2p.add_protobuf_handler(name, for_members, kind, **options)

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Message, answer: type[Message]) -> Message:
        """Calls a member. One that does not know us any more, or by an older invitation, is shown our proof, and called
        again."""
        to = PeerId(peer.to_base58())
        if self._private.admits(to):
            try:
                return await self._p2p.call_protobuf_handler(peer, name, request, answer)
            except Exception as error:  # hivemind's error of a handler that has raised, with its text
                if not any(_marked(reason) in str(error) for reason in NOT_COUNTED):
                    raise
        await self._prove(to)
        return await self._p2p.call_protobuf_handler(peer, name, request, answer)


def _marked(reason: Reason) -> str:
    return f"members only: {reason}"
