"""Define all metrics of a running peer in one table, METRICS, with the function that reads each metric from a host.

Names follow Prometheus's conventions: base units, `_total` for counters, `_ratio` for shares. The values of a label are
from a fixed set (kinds of time, outcomes, known reasons) or describe this peer. No id, region or text of another peer
becomes a label value, so the number of time series is bounded. The documentation's page METRICS shows the table, and
deploy/grafana contains a dashboard.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from decentral.core.reasons import known_reason
from decentral.core.time_spent import KINDS
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase
from decentral.peers.runtime.host import Host
from decentral.peers.runtime.traffic import NO_EXCHANGES

BOUNDS = ("link", "cores", "swarm")  # what can force a gossip window to be long: values of the label `bound`

Values = float | None | Mapping[tuple[str, ...], float]
"""For a metric without labels, its number, or None if it is not known; else a number for each tuple of label values."""


@dataclass(frozen=True, slots=True)
class PeerMetric:
    """Definition of one metric: its name and help text in Prometheus, and how to read it from a host."""

    kind: Literal["counter", "gauge"]
    name: str  # without the suffix `_total` that Prometheus adds to counters
    help: str
    read: Callable[[Host, Seconds], Values]
    labels: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """Name of the metric as Prometheus shows it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def values(self, host: Host, now: Seconds) -> Mapping[tuple[str, ...], float]:
        """Return the metric's number for each tuple of label values, on `host` at Unix time `now`.

        A tuple has one value for each of `self.labels`, so a metric without labels has the tuple (). The result is {}
        if the number is not known, such as a loss before the first evaluation.
        """
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
    return {(setup.own.peer, setup.run, profile.name, profile.device, profile.region, profile.software): 1}


def _phase(host: Host, now: Seconds) -> Values:
    return {(phase,): float(phase is host.node.phase) for phase in PeerPhase}


def _time_spent(host: Host, now: Seconds) -> Values:
    return {(kind,): getattr(host.node.progress.spent, kind) for kind in KINDS}


def _time_shares(host: Host, now: Seconds) -> Values:
    spent = host.node.progress.spent
    return {(kind,): share for kind, share in spent.shares().items()} if spent.total else None


def _exchanges(host: Host, now: Seconds) -> Values:
    return dict(NO_EXCHANGES) | dict(host.node.gossip.counts.ended)


def _window(host: Host, now: Seconds) -> Values:
    return host.node.selection.lengths.window_s() * host.node.gossip.windows[0]


def _window_bound(host: Host, now: Seconds) -> Values:
    return {(bound,): float(host.node.gossip.windows[1] == bound) for bound in BOUNDS}


def _peers(host: Host, now: Seconds) -> Values:
    known = [entry.record.phase for entry in host.node.roster.live.values()]
    return {(phase,): known.count(phase) for phase in PeerPhase}


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
    _gauge(
        "peer_info", "1; the labels describe this peer", _about, "peer", "run", "name", "device", "region", "software"
    ),
    _gauge("phase", "1 for the phase that the peer is in", _phase, "phase"),
    _gauge("step", "Optimizer steps since the peer's first start", lambda host, now: host.node.progress.step),
    _gauge("swarm_step", "Step that sets the swarm's learning rate", lambda host, now: host.node.progress.lr_step),
    _counter("tokens", "Tokens trained since joining", lambda host, now: host.node.progress.tokens),
    _counter("micro_batches", "Micro-batches since joining", lambda host, now: host.node.progress.micro_batches),
    _gauge("tokens_per_second", "Training speed of this peer", lambda host, now: host.node.progress.speed(now)),
    _gauge("swarm_tokens_per_second", "Tokens per second of this peer and of all peers that it knows", _swarm_speed),
    _gauge(
        "model_flops_utilisation_ratio",
        "MFU: FLOP/s in training over the device's FLOP/s",
        lambda host, now: host.node.own_record.utilisation(now),
    ),
    _gauge("training_loss", "Running mean of the training loss", lambda host, now: host.node.progress.losses.mean),
    _gauge("held_out_loss", "Loss on held-out text, at the last evaluation", _held_out),
    _gauge("held_out_age_seconds", "Seconds since the last evaluation", _held_out_age),
    _counter("dropped_steps", "Steps skipped because gradients were not finite", _dropped_steps),
    _gauge("steps_without_loss", "Steps since the last finite loss", lambda host, now: host.node.progress.losses.lost),
    _counter("training_thread_seconds", "Time of the training thread, by kind of work", _time_spent, "kind"),
    _gauge("training_thread_ratio", "Shares of the training thread's time, by kind of work", _time_shares, "kind"),
    _counter("worker_seconds", "Processor time of background work", lambda host, now: host.node.progress.spent.beside),
    _counter("exchanges", "Gossip exchanges, by outcome and reason", _exchanges, "outcome", "reason"),
    _gauge("window_seconds", "Length of a gossip window", _window),
    _gauge("window_bound", "1 for the cause that lengthens gossip windows, if any", _window_bound, "bound"),
    _counter("sent_bytes", "Bytes sent to other peers", lambda host, now: host.node.traffic.sent_bytes),
    _counter("received_bytes", "Bytes received from other peers", lambda host, now: host.node.traffic.received_bytes),
    _gauge("peers", "Other peers that this peer knows, by phase", _peers, "phase"),
    _gauge("round_trip_seconds", "Median round trip over the links to other peers", _round_trip),
    _gauge("download_bytes_per_second", "Median rate from a peer", lambda host, now: host.node.meter.typical_down()),
    _gauge("upload_bytes_per_second", "Mean rate to a peer", lambda host, now: host.node.meter.typical_up()),
    _gauge("model_held_ratio", "Share of the model's parameters that this peer holds", _held),
    _gauge("stage_executions", "Stage executions of micro-batches in flight here", _executions),
    _gauge("layers_unheld", "1 while no training peer holds some layer", _unheld),
    _counter(
        "questions_refused",
        "Requests of other peers that this peer refused",
        lambda host, now: _by_reason(host.transport.refused),
        "reason",
    ),
    _counter(
        "records_refused",
        "Records in the DHT that this peer refused as invalid",
        lambda host, now: _by_reason(host.node.roster.refused),
        "reason",
    ),
    _gauge(
        "troubles",
        "Present warnings about this machine, as on the terminal",
        lambda host, now: len(host.troubles()),
    ),
)
