"""What can be measured of a running peer: the table of all metrics, and where each is read.

Names follow Prometheus's conventions: base units, `_total` for what only grows while the process lives, `_ratio` for
shares. The values of a label are a closed set (kinds of time, outcomes, our own reasons), or tell of this peer alone:
no id, region or text of another peer is a label. docs/OBSERVING.md shows the table, deploy/grafana a dashboard of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from decentral.core.reasons import known_reason
from decentral.core.time_spent import KINDS
from decentral.core.units import Seconds
from decentral.peers.runtime.host import Host
from decentral.peers.runtime.node import NodePhase
from decentral.peers.runtime.traffic import NO_EXCHANGES

PEER_PHASES = {NodePhase.JOINING: "joining", NodePhase.TRAINING: "training", NodePhase.LEFT: "leaving"}
BOUNDS = ("link", "cores", "swarm")  # what may stretch the windows

Values = float | None | Mapping[tuple[str, ...], float]
"""One number, none if it is not known yet, or numbers by the values of the labels."""


@dataclass(frozen=True, slots=True)
class PeerMetric:
    """One metric: what it is called without `_total`, what it means, and how it is read of a host at a time."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    read: Callable[[Host, Seconds], Values]
    labels: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """The name under which Prometheus keeps it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def values(self, host: Host, now: Seconds) -> Mapping[tuple[str, ...], float]:
        """The numbers that are known, by the values of the labels."""
        found = self.read(host, now)
        if found is None:
            return {}
        return found if isinstance(found, Mapping) else {(): found}


def _counter(name: str, help: str, read: Callable[[Host, Seconds], Values], *labels: str) -> PeerMetric:
    return PeerMetric("counter", f"decentral_{name}", help, read, labels)


def _gauge(name: str, help: str, read: Callable[[Host, Seconds], Values], *labels: str) -> PeerMetric:
    return PeerMetric("gauge", f"decentral_{name}", help, read, labels)


def _about(host: Host, now: Seconds) -> Values:
    setup = host.node.setup
    profile = setup.profile
    return {(setup.own.peer, setup.run, profile.device, profile.region, profile.software): 1}


def _phase(host: Host, now: Seconds) -> Values:
    return {(name,): float(phase is host.node.phase) for phase, name in PEER_PHASES.items()}


def _time_spent(host: Host, now: Seconds) -> Values:
    return {(kind,): getattr(host.node.progress.spent, kind) for kind in KINDS}


def _time_shares(host: Host, now: Seconds) -> Values:
    spent = host.node.progress.spent
    return {(kind,): share for kind, share in spent.shares().items()} if spent.total else None


def _exchanges(host: Host, now: Seconds) -> Values:
    return dict(NO_EXCHANGES) | dict(host.node.gossip.counts.ended)


def _window(host: Host, now: Seconds) -> Values:
    return host.node.selection.window_s() * host.node.gossip.windows[0]


def _window_bound(host: Host, now: Seconds) -> Values:
    return {(bound,): float(host.node.gossip.windows[1] == bound) for bound in BOUNDS}


def _peers(host: Host, now: Seconds) -> Values:
    known: list[str] = [entry.record.phase for entry in host.node.roster.live.values()]
    return {(phase,): known.count(phase) for phase in PEER_PHASES.values()}


def _swarm_speed(host: Host, now: Seconds) -> Values:
    others = (entry.record.profile.tokens_per_s for entry in host.node.roster.live.values())
    return host.node.progress.speed(now) + sum(others)


def _held_out(host: Host, now: Seconds) -> Values:
    return host.node.progress.evaluations.held_out


def _held_out_age(host: Host, now: Seconds) -> Values:
    known = host.node.progress.evaluations
    return None if known.held_out is None else now - known.measured_at


def _dropped_steps(host: Host, now: Seconds) -> Values:
    return host.node.progress.divergence.dropped


def _held(host: Host, now: Seconds) -> Values:
    held, whole = (sum(one.parameters for one in of) for of in (host.node.setup.fragments, host.node.setup.cuts))
    return held / whole


def _round_trip(host: Host, now: Seconds) -> Values:
    known = sorted(link.latency_s for link in host.node.meter.links.values() if link.latency_s is not None)
    return known[len(known) // 2] if known else None


def _executions(host: Host, now: Seconds) -> Values:
    return len(host.node.routes.executions) if host.node.routes else None


def _unheld(host: Host, now: Seconds) -> Values:
    return float(bool(host.node.route_planner.unheld)) if host.node.route_planner else None


def _by_reason(counts: Mapping[str, int]) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for reason, count in counts.items():
        found[known_reason(reason),] = found.get((known_reason(reason),), 0) + count
    return found


METRICS = (
    _gauge("peer_info", "Which peer this is", _about, "peer", "run", "device", "region", "software"),
    _gauge("phase", "1 for what the peer does at present", _phase, "phase"),
    _gauge("step", "Optimizer steps since the peer's first start", lambda host, now: host.node.progress.step),
    _gauge("swarm_step", "Step of the swarm's learning rate", lambda host, now: host.node.progress.lr_step),
    _counter("tokens", "Tokens trained since joining", lambda host, now: host.node.progress.tokens),
    _counter("micro_batches", "Micro-batches since joining", lambda host, now: host.node.progress.micro_batches),
    _gauge("tokens_per_second", "Speed of training", lambda host, now: host.node.progress.speed(now)),
    _gauge("swarm_tokens_per_second", "Speed of this peer and of all known ones, as they publish it", _swarm_speed),
    _gauge("training_loss", "Running mean of the steps' losses", lambda host, now: host.node.progress.losses.mean),
    _gauge("held_out_loss", "Loss on held-out text, at the last evaluation", _held_out),
    _gauge("held_out_age_seconds", "Seconds since the last evaluation", _held_out_age),
    _counter("dropped_steps", "Steps that trained nothing, as their gradients were not finite", _dropped_steps),
    _gauge("steps_without_loss", "Last steps with no finite loss", lambda host, now: host.node.progress.losses.lost),
    _counter("training_thread_seconds", "Time of the training thread, by what it did", _time_spent, "kind"),
    _gauge("training_thread_ratio", "Shares of that time; `training` is how busy the peer is", _time_shares, "kind"),
    _counter("worker_seconds", "Processor time beside training", lambda host, now: host.node.progress.spent.beside),
    _counter("exchanges", "Gossip exchanges, by how they ended and why", _exchanges, "outcome", "reason"),
    _gauge("window_seconds", "Time between two ends of a fragment's windows", _window),
    _gauge("window_bound", "1 for what stretches the windows, if anything does", _window_bound, "bound"),
    _counter("sent_bytes", "Bytes sent to other peers", lambda host, now: host.node.traffic.sent_bytes),
    _counter("received_bytes", "Bytes received from other peers", lambda host, now: host.node.traffic.received_bytes),
    _gauge("peers", "Other peers that this one knows, by phase", _peers, "phase"),
    _gauge("round_trip_seconds", "Median over the links to other peers", _round_trip),
    _gauge("download_bytes_per_second", "Median over those links", lambda host, now: host.node.meter.typical_down()),
    _gauge("upload_bytes_per_second", "Best of the last uploads", lambda host, now: host.node.meter.best_up()),
    _gauge("model_held_ratio", "Share of the model's parameters that this peer holds", _held),
    _gauge("stage_executions", "Micro-batches of routes that are here at present", _executions),
    _gauge("layers_unheld", "1 while no peer that trains holds some layer", _unheld),
    _counter(
        "questions_refused",
        "Questions of other peers that broke the protocol",
        lambda host, now: _by_reason(host.transport.refused),
        "reason",
    ),
    _counter(
        "records_refused",
        "Records in the DHT that were not valid",
        lambda host, now: _by_reason(host.node.roster.refused),
        "reason",
    ),
    _gauge(
        "troubles",
        "What is wrong with this machine at present, as the live view says",
        lambda host, now: len(host.troubles()),
    ),
)
