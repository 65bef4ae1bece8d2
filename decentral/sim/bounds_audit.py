"""The rules of limits, checked now and then for every living peer.

bounded      requests open at a peer, its own requests, its jobs and held answers have limits, and all end in time
never waits  a peer that trains is never longer without a step than its device needs, but for others' work
"""

from dataclasses import dataclass, field

from decentral.comm.gossip.pull import PullExchange
from decentral.comm.gossip.snapshots import MAX_WAITING_PULLS
from decentral.comm.net.streams import MAX_STREAMS, READ_S, WRITE_S
from decentral.comm.net.virtual_network import Port
from decentral.core.algorithms import algorithm
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.evidence import Evidence
from decentral.sim.swarm import SimulatedPeer
from decentral.sim.virtual_host import VirtualHost

MOST_OWN_REQUESTS = 64  # of a peer, under way
MOST_OPEN = 2 * MAX_STREAMS  # those that are being refused as busy are open for a moment too
MOST_JOBS = 256
LONGEST_REQUEST_S = 75.0 + 60.0  # patience, and the longest deadline
LONGEST_ANSWER_S = READ_S + 90.0 + WRITE_S + 1.0  # routes here are shorter than the protocol's longest
STEP_STALLED_S = 5.0  # beyond a step, its jobs and the reporting interval
SLACK_S = 1.0


@dataclass(slots=True)
class BoundsAudit:
    """Looks at each peer's open requests, its job queue, and when it last computed."""

    evidence: Evidence
    stepped_at: dict[PeerId, Seconds] = field(default_factory=dict)

    def joined(self, host: VirtualHost) -> None:
        self.stepped_at[host.peer] = host.agenda.now

    def check(self, member: SimulatedPeer, now: Seconds) -> None:
        host, port = member.host, member.port
        assert host is not None
        assert port is not None
        if port.frozen:
            self.stepped_at[member.peer] = now
            return
        self._check_requests(host, port, now)
        for exchange in host.node.gossip.running.values():
            held = len(exchange.published.waiting) if isinstance(exchange, PullExchange) else 0
            if held > MAX_WAITING_PULLS:
                self.evidence.violated("bounded", f"{held} answers are held at {host.peer}", host)
        self._check_steps(member, host, now)

    def _check_requests(self, host: VirtualHost, port: Port, now: Seconds) -> None:
        def violated(detail: str) -> None:
            self.evidence.violated("bounded", detail, host)

        peer, queued = host.peer, len(host.engine.inbox)
        if len(port.open) > MOST_OPEN or len(port.asked) > MOST_OWN_REQUESTS or queued > MOST_JOBS:
            violated(f"{peer}: {len(port.open)} open, {len(port.asked)} asked, {queued} jobs")
        oldest = min(port.open.values(), default=now)
        if now - oldest > LONGEST_ANSWER_S:
            violated(f"a question has been open at {peer} for {now - oldest:.0f} s")
        writing = [now - request.writing for request in port.open if request.writing is not None]
        if writing and max(writing) > WRITE_S + SLACK_S:
            violated(f"{peer} has been writing an answer for {max(writing):.0f} s")
        asked = min((request.began for request in port.asked), default=now)
        if now - asked > LONGEST_REQUEST_S:
            violated(f"{peer} has waited {now - asked:.0f} s for an answer")

    def _check_steps(self, member: SimulatedPeer, host: VirtualHost, now: Seconds) -> None:
        """A peer waits for others by design in all-reduce, and where it needs them for a micro-batch."""
        computed = host.engine.last_computed
        waits = algorithm(self.evidence.swarm.settings.config.gossip.algorithm).blocking or not host.node.setup.whole
        longest = slowest_step_s(host) + host.engine.pace.report_s + STEP_STALLED_S
        if member.training and not waits:
            last = self.stepped_at.get(member.peer, 0.0)
            last = self.stepped_at[member.peer] = last if computed is None else max(last, computed)
            if now - last > longest:
                self.evidence.violated("never waits", f"{member.peer} has made no step for {longest:.0f} s", host)


def slowest_step_s(host: VirtualHost) -> Seconds:
    """Twice the mean step at the slowest speed that the device has had: noise included."""
    engine = host.engine
    return 2 * engine.pace.step_s * max(engine.stretched, engine.slowest)
