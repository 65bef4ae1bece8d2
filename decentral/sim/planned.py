"""Play a throughput plan (`decentral.plan --json`): begin in its layout, and count what the swarm reaches.

`scenario_of` makes the scenario: the planned peers with their planned layers, at the speeds and links of the topology.
`PlayedPlan` watches the run, and `PlayedPlan.result` compares tokens/s, devices and links with the plan.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from decentral.core import foreign_file, strict_json
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.events import AbandonedLine, CountedLine, StepLine, UncountedLine
from decentral.core.layer_work import share
from decentral.core.machine import Log
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.units import Seconds
from decentral.engine.fragment import fragments_of
from decentral.scheduler.throughput import layer_costs
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.topology import Topology
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.run import Scenario
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

MAX_PLAN_BYTES = 64 * 1024 * 1024
WARM_UP = 1 / 3  # tokens are counted after this share of the run, when peers have joined and measured their speeds
SAMPLED_S = 0.37  # the time between two samples of what devices wait for; no period of the swarm is a multiple of it
REPORT_S = 1.0  # peers report their steps this often, so that few tokens lie across the end of the warm-up


class Wait(Enum):
    """What an idle device waits for, if its peer takes part in routes. `decentral simulate --plan` prints the value."""

    NOTHING_HERE = "a micro-batch to arrive"
    STEP = "a step, for which micro-batches must come back or be committed"
    MEMORY = "memory for another micro-batch of its own"
    LIMIT = "its own micro-batches in flight, as many as it may have"  # InFlightLimit limits their number
    LATER_PEERS = "later peers and links"


def wait_of(host: VirtualHost) -> Wait | None:
    """Return what a running peer's device waits for; None if the device works, or its peer takes part in no routes."""
    router, engine = host.node.routes, host.engine
    if engine.doing or engine.began is not None or router is None:
        return None
    if router.table.step_waits:
        return Wait.STEP
    if router.stage.first > 0:
        return Wait.LATER_PEERS if router.executions else Wait.NOTHING_HERE
    if not router.admission.has_memory(0):
        return Wait.MEMORY
    return Wait.LIMIT if len(router.own.under_way) >= router.in_flight.size else Wait.LATER_PEERS


@dataclass(frozen=True, slots=True)
class PlayedResult:
    """What a plan promised, and what the simulated swarm that follows the plan reached after the warm-up."""

    promised: float  # tokens/s that the plan expects
    reached: float  # tokens/s whose gradients were applied; gradients of some layers count by the layers' share
    executions: int  # number of routed stage executions whose gradients were applied
    dropped: int  # number of routed stage executions whose gradients were discarded
    abandoned: int  # number of routed micro-batches that their origin peer gave up
    busy: dict[str, float]  # peer id in the topology -> share of the time in which the peer's device trained
    busiest_link: str  # the link of whose capacity the largest share was used
    busiest_share: float  # bytes over `busiest_link`, as a share of the bytes that the link could have carried
    waits: dict[str, float]  # `Wait.value` -> share of the time in which devices wait for this, mean of all devices


def read(path: Path) -> ThroughputPlan:
    """Return the throughput plan in a JSON file; raise UserError if there is none."""
    try:
        tree = strict_json.loads(foreign_file.read_text(path, MAX_PLAN_BYTES))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"--plan: cannot read {path} ({getattr(error, 'strerror', None) or error})") from None
    if not isinstance(tree, dict) or tree.pop("objective", None) != ThroughputPlan.objective:
        raise UserError(f"--plan: {path} is no plan for throughput; make one by decentral.plan --model ... --json")
    try:
        return TypeAdapter(ThroughputPlan).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"--plan: {path}: {key}: {first['msg'].lower()}") from None


def scenario_of(
    plan: ThroughputPlan, topology: Topology, config: Config, seconds: Seconds, seed: int, noise: float
) -> Scenario:
    """Return the scenario in which the planned peers begin with their planned layers, and keep these.

    A device computes as fast as the plan assumes, and fragments take the shares of a token's time that the plan counts.
    Each peer has the topology's memory, and fragments take the bytes that the plan counts.

    Raises:
        UserError: If the plan is for another topology or model, or cuts the model within a fragment.
    """
    if plan.digest != topology.digest():
        raise UserError("--plan: the plan is for another topology; give the plan's own with --topology, or plan again")
    counts = len(config.model.layer_parameters), sum(config.model.layer_parameters)
    if counts != (plan.planned_for.get("layers"), plan.planned_for.get("parameters")):
        raise UserError("--plan: the plan was made for another model; give CONFIG as in decentral.plan --model CONFIG")
    utilisation = float(plan.planned_for["utilisation"])
    costs = layer_costs.of_model(topology, config, utilisation=utilisation)
    seconds_NL = costs.seconds_NL
    cuts = _timed(fragments_of(config), (seconds_NL[0] / seconds_NL[0].sum()).tolist())
    ends = {cut.first for cut in cuts} | {cuts[-1].last}
    at = next((end for span in plan.spans.values() for end in span if end not in ends), None)
    if at is not None:
        raise UserError(f"--plan: the plan cuts before layer {at}, within a fragment: set gossip.fragment_parameters=1")
    routed = {hop[0] for route in plan.routes if len(route["hops"]) > 1 for hop in route["hops"]}
    sequences = min(count for peer, count in plan.micro_batches.items() if peer in (routed or plan.spans))
    step = {"micro_batch": sequences, "accumulate": plan.accumulate}
    config = config.model_copy(update={"train": config.train.model_copy(update=step)})
    tokens, index = sequences * config.model.context, {peer: number for number, peer in enumerate(topology.ids)}
    placed = [index[peer] for peer in plan.spans]
    settings = SwarmSettings(
        config=config,
        fragments=cuts,
        pace=Pace(1.0, noise, report_s=REPORT_S),
        throttles=tuple(tokens * float(seconds_NL[number].sum()) for number in placed),
        tokens_per_step=tokens,
        memory=tuple(int(topology.memory_bytes[number]) for number in placed),
        spans=tuple((first, last) for first, last in plan.spans.values()),
        saved=True,
        unquantised=True,
        planned_needs=_needs(costs, cuts, sequences),
    )
    return Scenario(settings, len(placed), seconds, seed, topology=topologies.among(topology, placed), audited=False)


def _needs(costs: LayerCosts, cuts: tuple[Fragment, ...], sequences: int) -> MemoryNeeds:
    """Return the bytes that fragments take as the plan counts them, with micro-batches of `sequences` sequences."""
    return MemoryNeeds(
        fragments=cuts,
        state=tuple(int(costs.state_L[cut.first : cut.last].sum()) for cut in cuts),
        scratch=(0,) * len(cuts),
        activations=tuple(int(sequences * costs.activation_L[cut.first : cut.last].sum()) for cut in cuts),
    )


def _timed(cuts: list[Fragment], share_L: list[float]) -> tuple[Fragment, ...]:
    """Return the fragments with work in proportion to their share of the time, and all with the mean size.

    The surrogates' snapshots have the size of the mean fragment, and a peer computes from a snapshot's size and its
    fragment's parameters how many bytes all fragments have.
    """
    total = sum(cut.parameters for cut in cuts)
    works = [(0.0, total * sum(share_L[cut.first : cut.last]), 0.0) for cut in cuts]
    return tuple(replace(cut, parameters=total // len(cuts), work=work) for cut, work in zip(cuts, works, strict=True))


@dataclass(slots=True)
class PlayedPlan:
    """A `Watch` (run.py) that counts, after the warm-up, what a simulated swarm that follows a plan reaches."""

    plan: ThroughputPlan
    scenario: Scenario
    tokens: float = 0.0
    executions: Counter[type] = field(default_factory=Counter)
    spent_s: defaultdict[PeerId, float] = field(default_factory=lambda: defaultdict(float))
    waits: Counter[Wait] = field(default_factory=Counter)
    _looks: int = 0
    _swarm: SimulatedSwarm | None = None
    _sent_before: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Prepare to read lines of this swarm."""
        self._swarm = swarm
        swarm.agenda.at(self._since, lambda: self._sent_before.update(swarm.network.links.sent))
        swarm.agenda.at(self._since, lambda: self._look(swarm))

    def _look(self, swarm: SimulatedSwarm) -> None:
        """Count what each device waits for now, and look again after SAMPLED_S."""
        swarm.agenda.after(SAMPLED_S, lambda: self._look(swarm))
        self._looks += 1
        self.waits.update(wait for member in swarm.members if member.life and (wait := wait_of(member.life)))

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Count a line of a peer's journal: a step of a peer with the whole model, or executions of routes."""
        assert self._swarm is not None
        if self._swarm.agenda.now <= self._since:
            return
        cuts = self.scenario.settings.fragments
        match log.event:
            case StepLine() as step:
                self.spent_s[peer] += step.seconds
                if self._swarm.by_peer[peer].span == (0, cuts[-1].last):
                    self.tokens += step.tokens
            case CountedLine(of=executions) | UncountedLine(of=executions) as event:
                self.executions[type(event)] += len(executions)
                if isinstance(event, CountedLine):
                    self.tokens += sum(one.tokens * share(cuts, one.first, one.last) for one in executions)
            case AbandonedLine() as event:
                self.executions[type(event)] += 1

    def end(self) -> None:
        """Do nothing: the run's end is the end of the count."""

    @property
    def _since(self) -> Seconds:
        return WARM_UP * self.scenario.seconds

    def result(self) -> PlayedResult:
        """Return what the plan promised and reached; call it after the run."""
        assert self._swarm is not None
        lasted_s = self._swarm.agenda.now - self._since
        name = {member.peer: peer for member, peer in zip(self._swarm.members, self.plan.spans, strict=True)}
        link, used = self._busiest(lasted_s, name)
        return PlayedResult(
            promised=self.plan.throughput["tokens_per_s"],
            reached=self.tokens / lasted_s,
            executions=self.executions[CountedLine],
            dropped=self.executions[UncountedLine],
            abandoned=self.executions[AbandonedLine],
            busy={name[peer]: min(1.0, self.spent_s[peer] / lasted_s) for peer in name},
            busiest_link=link,
            busiest_share=used,
            waits={wait.value: self.waits[wait] / self._looks / len(name) for wait in Wait if self.waits[wait]},
        )

    def _busiest(self, lasted_s: Seconds, name: dict[PeerId, str]) -> tuple[str, float]:
        """Return the link that was used most, and the share of its capacity that was used."""
        assert self._swarm is not None
        geography, rates, sent = self._swarm.geography, dict[str, float](), Counter[str]()
        for (source, target), size in (self._swarm.network.links.sent - self._sent_before).items():
            links = {
                f"{name[source]} up": geography.up(source),
                f"{name[target]} down": geography.down(target),
                f"{name[source]} to {name[target]}": geography.bandwidth(source, target),
            }
            for shared in geography.site_links(source, target):
                links[f"site {shared.site} {'up' if shared.leaves else 'down'}"] = shared.rate
            rates |= links
            sent.update(dict.fromkeys(links, size))
        shares = {link: sent[link] / (rate * lasted_s) for link, rate in rates.items()}
        return max(shares.items(), key=lambda one: one[1], default=("none", 0.0))
