"""An uplink is measured nearly as it is while it carries other messages, and is soon known to be slower."""

from collections.abc import Callable
from random import Random

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, ForwardRequest, Message, Ping, Pong, Probe, Probed
from decentral.comm.wire.meter import Meter
from decentral.comm.wire.transport import Ask, AskError, AskFailed, Tag
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Woke
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import Seconds
from decentral.peers.membership.link_probes import Prober
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.shared_links import SiteLink
from decentral.sim.network.virtual_network import Network, Outcome, Port, Respond
from decentral.sim.network.virtual_uplink import VirtualUplink
from tests.sim.network.test_virtual_network import Bad

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
UP = 2.5e6  # bytes/s: 20 Mb/s
SENT_BYTES = 1_000_000
AT_ONCE = 3  # the load comes in bursts of so many messages
FORWARD = ForwardRequest(RunId("gpt-3fa2c1"), "A", 0, 1, 1, 60.0, 60.0, ())


class Home:
    """A's uplink has 20 Mb/s, or `slower` times that; all downlinks have five times as much; 30 ms one way."""

    slower = 1.0

    def up(self, peer: PeerId) -> float:
        return UP * (self.slower if peer == A else 1.0)

    def down(self, peer: PeerId) -> float:
        return 5 * UP

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        return 0.03

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        return 0.06

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        return float("inf")

    def site_links(self, source: PeerId, target: PeerId) -> list[SiteLink]:
        return []


class Sender:
    """A sends bursts of activations to B and C, which take `load` of its uplink, and probes its links as nodes do."""

    def __init__(self, load: float) -> None:
        self.agenda, self.home, self.load = Agenda(), Home(), load
        self.network = Network(self.agenda, self.home, Bad())
        self.meter = Meter()
        self.prober = Prober(self.meter, Random(1))
        self.port = Port(A, VirtualUplink(self.agenda, self.meter.pace))
        self.network.plug(self.port)
        for peer in (B, C):
            self.network.plug(Port(peer, VirtualUplink(self.agenda), answer, lambda _: 1 << 30))
        self.prober.begin(0.0)
        self._wake()
        self._send(0)

    def _send(self, count: int) -> None:
        for one in range(AT_ONCE):
            activations = Envelope(FORWARD, SyntheticBlob([(SENT_BYTES, b"")]))
            ask = Ask(Tag(), (B, C)[(count + one) % 2], activations, 60.0)
            self.network.ask(self.port, ask, lambda _: None)
        self.agenda.after(AT_ONCE * SENT_BYTES / (self.load * UP), lambda: self._send(count + AT_ONCE))

    def _wake(self) -> None:
        self._ask(self.prober.handle(Woke(), self.agenda.now, [B, C]))
        assert self.prober.wake_at is not None
        self.agenda.at(self.prober.wake_at, self._wake)

    def _ask(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.network.ask(self.port, ask, self._hearing(ask, self.agenda.now))

    def _hearing(self, ask: Ask, began: Seconds) -> Callable[[Outcome], None]:
        def heard(outcome: Outcome) -> None:
            self.port.uplink.catch_up()
            if isinstance(outcome, AskError):
                failed = AskFailed(ask.tag, ask.to, outcome.reason, self.agenda.now - began)
                self._ask(self.prober.handle(failed, self.agenda.now, [B, C]))
            else:
                event = outcome.to(ask)
                if event.tag.measures_link:
                    self.meter.saw(
                        event.peer, event.seconds, event.first_byte_s, event.sent_bytes, event.received_bytes
                    )
                self._ask(self.prober.handle(event, self.agenda.now, [B, C]))
            self.port.uplink.follow_rate()

        return heard

    def measured(self, times: range) -> list[float]:
        """The uplink's rate as it is believed to be at these times, as a share of 20 Mb/s."""
        found = []
        for at in times:
            self.agenda.run(float(at))
            found.append((self.meter.typical_up() or 0.0) / UP)
        return found


def answer(sender: PeerId, envelope: Envelope, respond: Respond) -> None:
    said: Message = Done()
    if isinstance(envelope.message, Ping):
        said = Pong(envelope.message.nonce)
    if isinstance(envelope.message, Probe):
        said = Probed(len(envelope.blob))
    respond(Envelope(said))


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_an_uplink_that_carries_other_messages_is_measured_within_a_fifth(load: float) -> None:
    assert Sender(load).measured(range(120, 600, 20)) == pytest.approx([1.0] * 24, rel=0.2)


@pytest.mark.parametrize("load", [0.1, 0.36])
def test_an_uplink_that_becomes_slower_is_known_to_be_so_within_six_minutes(load: float) -> None:
    """The higher load takes nine tenths of what is left of it."""
    sender = Sender(load)
    sender.agenda.run(400.0)
    sender.home.slower = 0.4
    assert sender.measured(range(780, 900, 20)) == pytest.approx([0.4] * 6, rel=0.2)
