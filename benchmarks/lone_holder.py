"""Kill the only holder of some layers for good, and say how old the state is from which the swarm goes on.

    python -m benchmarks.lone_holder [--seeds 10] [--first 0] [--at 240] [--set KEY=VALUE] [--json FILE]

The swarms are those of benchmarks/tight_swarms.py: six peers with memory for 0.3 to 0.6 of the model. At `--at` virtual
seconds, a peer dies with its disk: of the peers without which the model still fits into memory, the one with the most
layers that nobody else holds. For each seed: `layers`, the fragments
that only it held; `age_s`, the time from the moment at which their recovered states left it (the oldest counts) to its
death, null if any began from initial weights; `held_s`, the time until all layers have a holder again, null if they
have none after `--for` seconds; and of all bytes that the peers had sent before, the `copied` share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.tight_swarms import LINKS, PEERS, play_seeds, seeds_parser, tight_swarm
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.machine import Log
from decentral.core.synthetic import Blob
from decentral.core.units import Seconds
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.evaluate import work_of
from decentral.scheduler.throughput.covering import covering
from decentral.sim.host import VirtualHost
from decentral.sim.run import Scenario, StopRun, run
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.surrogate import SurrogateWorkload
from decentral.sim.swarm import SimulatedSwarm


@dataclass(slots=True)
class Killing:
    """An observer of a swarm's jobs that kills a lone holder, and notes where its layers' next states come from."""

    at: Seconds
    spare: frozenset[int]  # numbers of the peers without which the model fits into the others' memories
    swarm: SimulatedSwarm | None = None
    lost: set[int] = field(default_factory=set)  # fragments that only the killed peer held
    ages: dict[int, Seconds | None] = field(default_factory=dict)  # by lost fragment, once it is held again
    held_s: Seconds | None = None
    copied_bytes: int = 0
    sent_bytes: int = 0
    exported: dict[tuple[int, Blob], Seconds] = field(default_factory=dict)  # (fragment, state) -> when it was encoded
    disks: dict[tuple[PeerId, int], Blob] = field(default_factory=dict)

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Plan the death."""
        self.swarm = swarm
        swarm.agenda.at(self.at, self.kill)

    def kill(self) -> None:
        """Kill the peer with the most layers that nobody else holds, and wipe its disk."""
        assert self.swarm is not None
        held = {one: set(one.host.node.setup.held) for one in self.swarm.living if one.training and one.host}
        alone = {one: mine - set().union(*(held[o] for o in held if o is not one)) for one, mine in held.items()}
        self.sent_bytes = sum(one.host.node.traffic.sent_bytes for one in held if one.host)
        dying: SimulatedPeer = max(alone, key=lambda one: (one.number in self.spare, len(alone[one]), one.peer))
        self.lost = alone[dying]
        self.swarm.crash(dying)
        dying.wipe()

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        """Note when all layers have a holder again."""
        if self.lost and self.held_s is None and self.lost == self.ages.keys():
            self.held_s = host.agenda.now - self.at

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        """Note when states were encoded, where they are stored, and from which of them lost layers go on."""
        now = host.agenda.now
        match job, outcome:
            case _, jobs.StateExported(fragment, _, blob):
                self.exported[fragment, blob] = now
            case jobs.RetainCopy(fragment, _, blob), jobs.RetainedChanged(reason=""):
                self.disks[host.peer, fragment] = blob
                self.copied_bytes += 0 if self.lost else len(blob)
            case jobs.ChangeSpan(blobs=blobs), jobs.SpanChanged(accepted=True, retained=kept):
                assert isinstance(host.training, SurrogateWorkload)
                for index in self.lost - self.ages.keys():
                    if any(one.index == index for one in host.training.fragments):
                        given = {fragment: blob for fragment, _, blob in blobs}
                        state = given.get(index, self.disks.get((host.peer, index), b""))
                        since = self.exported.get((index, state))
                        self.ages[index] = None if since is None else self.at - since
                for index, _ in kept:
                    if (found := host.training.disk.read(index)) is not None and self.disks.get(
                        (host.peer, index)
                    ) != found[2]:
                        self.disks[host.peer, index] = found[2]
                        self.exported.setdefault((index, found[2]), now)

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Ignore the journals."""

    def end(self) -> None:
        """Do nothing at the end of the run."""


def row(seed: int, at: Seconds, lasts: Seconds, overrides: Sequence[str]) -> dict[str, float | int | None]:
    """Return the figures of one seed."""
    swarm = tight_swarm(seed, overrides)
    members = swarm.task.members
    others = {number: members[:number] + members[number + 1 :] for number in range(PEERS)}
    fitting = [
        gone for gone, left in others.items() if covering(work_of(replace(swarm.task, members=left))) is not None
    ]
    killing = Killing(at, frozenset(fitting))

    def end_if_held(now: Seconds) -> None:
        if killing.held_s is not None:
            raise StopRun

    scenario = Scenario(swarm.shape, PEERS, at + lasts, seed, (), LINKS, audited=False)
    run(scenario, end_if_held, observer=killing, watches=[killing])
    known = [age for age in killing.ages.values() if age is not None]
    return {
        "seed": seed,
        "layers": len(killing.lost),
        "age_s": round(max(known), 1) if len(known) == len(killing.lost) and known else None,
        "held_s": None if killing.held_s is None else round(killing.held_s, 1),
        "copied": round(killing.copied_bytes / killing.sent_bytes, 3) if killing.sent_bytes else None,
        "copied_kb_per_s": round(killing.copied_bytes / at / 1e3, 1),
    }


def main() -> None:
    """Play the swarms of some seeds, and print a line for each."""
    parser = seeds_parser(__doc__)
    parser.add_argument("--at", type=float, default=240.0, help="virtual time of the death")
    parser.add_argument("--for", type=float, default=300.0, dest="lasts", help="virtual seconds after it, at most")
    args = parser.parse_args()
    play_seeds(args, lambda seed: row(seed, args.at, args.lasts, args.set))


if __name__ == "__main__":
    main()
