"""A Transport on the virtual network, so that the suite of all transports holds it to the same behaviour."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Answer, Ask, AskError, BlobBound, Handler, Knows, Tag, knows_all
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.virtual_network import Network, Outcome, Port, Respond
from decentral.sim.network.virtual_uplink import VirtualUplink


def plugged(network: Network, peer: PeerId) -> Port:
    """Return a new port of this peer on the network."""
    port = Port(peer, VirtualUplink(network.agenda))
    network.plug(port)
    return port


class VirtualTransport:
    """A Transport whose deadlines are in virtual time: whoever awaits it must let the agenda run."""

    def __init__(self, network: Network, peer: PeerId) -> None:
        self.peer = peer
        self._network = network
        self._port = plugged(network, peer)

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        ask = Ask(Tag(), to, envelope, deadline_s, max_blob_bytes)
        self._network.ask(self._port, ask, _unless_over(future))
        outcome = await future
        if isinstance(outcome, AskError):
            raise outcome
        return outcome

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        def serve(sender: PeerId, envelope: Envelope, respond: Respond) -> None:
            answering = asyncio.ensure_future(self.answer(handler(sender, envelope)))
            answering.add_done_callback(lambda done: respond(done.result()))

        self._port.serve, self._port.bound, self._port.shares.knows = serve, bound, knows

    async def answer(self, work: Awaitable[Envelope]) -> Envelope | None:
        try:
            return await work
        except ProtocolError as error:
            self._port.refused[error.reason] += 1
            return Envelope(Refused(error.reason, str(error)[:200]))
        except (EOFError, ConnectionError, OSError):
            return None

    def pace(self, rate: Callable[[], float | None]) -> None:
        self._port.uplink.queue.rate = rate

    def take_sent(self) -> Mapping[PeerId, int]:
        return self._network.links.take_sent(self.peer)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Everybody can find everybody."""

    async def enclose(self, private: PrivateSwarm | None) -> None:
        self._port.private = private
        self._port.shares.enclose(private)

    async def drop(self, peer: PeerId) -> None:
        self._network.drop(self._port, peer)

    @property
    def refused(self) -> Mapping[str, int]:
        return self._port.refused

    def processor_s(self) -> Seconds:
        return 0.0

    async def close(self) -> None:
        self._network.unplug(self.peer)


def _unless_over(future: "asyncio.Future[Outcome]") -> Callable[[Outcome], None]:
    def done(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    return done
