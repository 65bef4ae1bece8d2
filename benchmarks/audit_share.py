"""What audits of routes cost: their part of all computing in honest swarms of spans, in virtual time.

    python -m benchmarks.audit_share [--stages 2,4] [--seconds 3600] [--overlap] [--seeds 0]

Three peers hold each stage's layers, and a micro-batch visits all stages. No numbers are computed (decentral/sim/
surrogate.py); a pass takes the time of its layers. An audit costs the passes of the peers that repeat a micro-batch,
and the passes that take it out of their sums again; with --overlap, the passes of all micro-batches in a dropped sum.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from decentral.comm.pipeline.tags import AuditTag
from decentral.comm.wire.messages import ForwardRequest
from decentral.comm.wire.transport import Ask
from decentral.core import config, jobs
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.events import AuditLine, UncountedLine
from decentral.core.layer_work import forward_share, share
from decentral.core.machine import Log
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.sim import sweep
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

HOLDERS = 3
TENTHS = 10
STEP_S = 0.5


@dataclass(slots=True)
class AuditWork:
    """Counts the passes of all peers, in micro-batches through the whole model, by tenths of the run."""

    seconds: float
    cuts: tuple[Fragment, ...]
    everything: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    audits: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    verdicts: Counter[str] = field(default_factory=Counter)
    _names: set[tuple[str, int]] = field(default_factory=set)  # origin and number of the micro-batches of audits
    _executions: dict[tuple[PeerId, int], tuple[int, int, bool]] = field(default_factory=dict)  # layers; of an audit?

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        """Notices the requests of audits, their verdicts, and the gradients that a dropped sum takes with it."""
        for effect in effects:
            match effect:
                case Ask(tag=AuditTag(), envelope=envelope) if isinstance(request := envelope.message, ForwardRequest):
                    self._names.add((request.origin, request.number))
                case Log(AuditLine(verdict=verdict)):
                    self.verdicts[verdict] += 1
                case Log(UncountedLine(of=of)) if any(one[:2] in self._names for one in of):
                    lost = [one for one in of if one[:2] not in self._names]
                    self.audits[self._tenth(host)] += sum(share(self.cuts, one.first, one.last) for one in lost)

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        """Adds a pass."""
        cuts, routes = self.cuts, host.node.routes
        assert routes is not None
        match job:
            case jobs.Draw() | jobs.Forward():
                first = job.first if isinstance(job, jobs.Forward) else 0
                id = routes.executions[job.local_id].id
                of_audit = isinstance(job, jobs.Forward) and (id.origin, id.number) in self._names
                self._executions[host.peer, job.local_id] = first, job.last, of_audit
                self._add(host, forward_share(cuts, first, job.last), of_audit)
            case jobs.Backward(local_id):
                first, last, of_audit = self._executions[host.peer, local_id]
                self._add(host, share(cuts, first, last) - forward_share(cuts, first, last), of_audit)
            case jobs.Undo():
                first, last, of_audit = self._executions[host.peer, job.local_id]
                self._add(host, share(cuts, first, last), of_audit)

    def _add(self, host: VirtualHost, work: float, of_audit: bool) -> None:
        self.everything[self._tenth(host)] += work
        self.audits[self._tenth(host)] += work * of_audit

    def _tenth(self, host: VirtualHost) -> int:
        return int(TENTHS * host.agenda.now / self.seconds)


def played(stages: int, seed: int, seconds: float, overlap: bool) -> AuditWork:
    """One swarm's life."""
    more = [f"model.depth={2 * stages - 2}", f"routes.overlap={overlap}".lower(), f"seed={seed}"]
    run_config = config.load(None, [*sweep.SETTINGS, *sweep.SPAN_MODEL, *more])
    settings = SwarmSettings.of(run_config, Pace(STEP_S, 0.05, report_s=5.0), (1.0,), 64)
    spans = tuple((2 * stage, 2 * stage + 2) for stage in range(stages)) * HOLDERS
    found = AuditWork(seconds, tuple(settings.fragments))
    settings = replace(settings, memory=(1 << 28,), spans=spans)
    run(Scenario(settings, len(spans), seconds, seed, (), TypicalLink(0.01), audited=False), observer=found)
    return found


def table(stages: int, found: AuditWork) -> Iterator[str]:
    """Lines about one swarm."""
    first, later = 0, range(TENTHS // 2, TENTHS)
    yield (
        f"{stages} stages: {sum(found.everything.values()):.0f} micro-batches, {dict(found.verdicts)}; audits' share "
        f"{sum(found.audits.values()) / sum(found.everything.values()):.3%}, "
        f"first tenth {found.audits[first] / found.everything[first]:.3%}, second half "
        f"{sum(found.audits[at] for at in later) / sum(found.everything[at] for at in later):.3%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="what audits of routes cost")
    parser.add_argument("--stages", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4])
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--overlap", action="store_true", help="stale gradients: an abort drops a whole sum")
    args = parser.parse_args()
    for stages in args.stages:
        for seed in args.seeds:
            print("\n".join(table(stages, played(stages, seed, args.seconds, args.overlap))), flush=True)


if __name__ == "__main__":
    main()
