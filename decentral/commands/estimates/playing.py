"""Simulate a swarm for a few seconds, to find out how many bytes its links really carry. Start at `play`.

The peers run the real protocol in virtual time: they measure their links while gossip uses them, lengthen windows, and
carry micro-batches along routes. All peers have the model from the start, but must still measure their links.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from decentral.commands.estimates.peer_devices import PeerDevice, step_tokens
from decentral.core.config import Config
from decentral.core.ids import PeerId
from decentral.core.journal.events import StatusLine, StepLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.scheduler.topology.arrays import Floats
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology
from decentral.sim import planned
from decentral.sim.host import Pace
from decentral.sim.run import Scenario, StopRun, run
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

# Tokens and bytes count only after this much virtual time; if less than twice as much is simulated, only in its second
# half.
WARM_UP_S = 600.0
STEP_NOISE_SHARE = 0.05  # relative standard deviation of the duration of a step
PLAYED_S = 2400.0  # at most this many virtual seconds are simulated; windows change once in 5 to 20 minutes
# Windows, or routes, of a simulation that ends before this may be far from those that last. In ten swarms bytes settled
# within five minutes, in four swarms tokens/s of routes within two.
GOSSIP_SETTLED_S, ROUTES_SETTLED_S = 400.0, 240.0
ROUTES_PLAYED_S = 600.0  # at most this many virtual seconds are simulated of routes without gossip
LEAST_SAMPLES = 4  # a simulation that is cut short has at least this many samples, so that some follow the warm-up
# Processor time of the simulator on a quiet core: of an event, and of computing a transfer's rate.
EVENT_S, RATE_S = 6e-5, 8e-6
MOST_PLAYED = 64  # a swarm with more peers takes too long to simulate


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """What a played swarm of N peers did, per second of virtual time after the warm-up."""

    tokens: float  # tokens/s
    sent_NN: Floats  # bytes/s from the row's peer to the column's peer
    windows: tuple[tuple[Seconds, str], ...]  # each peer's last windows of gossip: their length, and what bounds it
    counted: float = 0.0  # tokens since the warm-up
    until_s: Seconds = 0.0  # virtual time at the end

    def among(self, names: Sequence[str], played: Sequence[str]) -> Self:
        """Return the rates of a larger swarm in which only the peers `played` do anything.

        Args:
            names: All peers of the larger swarm.
            played: Those of them that were simulated, in the order of this object's arrays.
        """
        places = [names.index(name) for name in played]
        sent_NN, windows = np.zeros((len(names), len(names))), [(0.0, "")] * len(names)
        sent_NN[np.ix_(places, places)] = self.sent_NN
        for place, window in zip(places, self.windows, strict=True):
            windows[place] = window
        return replace(self, sent_NN=sent_NN, windows=tuple(windows))


@dataclass(slots=True)
class PlayedSwarm:
    """An observer of a simulated run (a `Watch`) that counts training tokens and sent bytes over virtual time.

    A routed micro-batch counts when its gradient is back at its origin peer. The steps that apply it come in larger and
    rarer portions, from which a short run would not tell the rate.
    """

    tokens: float = 0.0  # of steps of peers with the whole model
    number: dict[PeerId, int] = field(default_factory=dict)  # of each peer, in the topology's order
    windows: dict[PeerId, tuple[Seconds, str]] = field(default_factory=dict)
    at: list[tuple[Seconds, float, Counter[tuple[PeerId, PeerId]]]] = field(default_factory=list)
    _swarm: SimulatedSwarm | None = None

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Prepare to count in this swarm."""
        self._swarm = swarm

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Count the tokens of a step of a peer with the whole model, and note the length of windows."""
        assert self._swarm is not None
        cuts = self._swarm.settings.fragments
        match log.event:
            case StepLine() as step if self._swarm.by_peer[peer].span == (0, cuts[-1].last):
                self.tokens += step.tokens
            case StatusLine(window_s=window_s, bound=bound):
                self.windows[peer] = window_s, bound

    @property
    def work_s(self) -> Seconds:
        """Return how many seconds of processor time the simulation has taken so far, as estimated for a quiet core."""
        assert self._swarm is not None
        return EVENT_S * self._swarm.agenda.events + RATE_S * self._swarm.network.links.rates_set

    def end(self) -> None:
        """Do nothing: `rates` counts between samples."""

    def sample(self) -> None:
        """Record the virtual time with the numbers of tokens and bytes that were counted until now."""
        assert self._swarm is not None
        self.number = {member.peer: place for place, member in enumerate(self._swarm.members)}
        routers = [member.life.node.routes for member in self._swarm.members if member.life]
        completed = sum(router.completed for router in routers if router)
        tokens = self.tokens + completed * self._swarm.settings.tokens_per_step
        self.at.append((self._swarm.agenda.now, tokens, Counter(self._swarm.network.links.sent)))

    def rates(self) -> Rates:
        """Return the rates since the warm-up.

        A rate is the slope of a line through the samples (least squares), since most bytes come at once after a window.
        Until twice the time of the first tokens, pipelines fill.
        """
        begin = min(WARM_UP_S, self.at[-1][0] / 2)
        filled = 2 * next((t for t, tokens, _ in self.at if tokens > 0), 0.0)
        if filled < self.at[-2][0]:
            begin = max(begin, filled)
        counted = [one for one in self.at if one[0] >= begin]
        sent_TNN = np.zeros((len(counted), len(self.number), len(self.number)))
        for place, (_, _, sent) in enumerate(counted):
            for (source, target), size in sent.items():
                sent_TNN[place, self.number[source], self.number[target]] = size
        away_T = np.array([t for t, _, _ in counted])
        away_T -= away_T.mean()
        weights_T = away_T / max(1e-9, float(away_T @ away_T))
        tokens = float(weights_T @ np.array([tokens for _, tokens, _ in counted]))
        windows = tuple(self.windows.get(peer, (0.0, "")) for peer in self.number)
        sent_NN = np.tensordot(weights_T, sent_TNN, axes=1)
        return Rates(tokens, sent_NN, windows, counted[-1][1] - counted[0][1], self.at[-1][0])


def play(
    run_config: Config,
    topology: Topology,
    devices: Sequence[PeerDevice],
    plan: ThroughputPlan | None,
    window_s: Seconds,
    budget: SearchBudget,
    least_samples: int = LEAST_SAMPLES,
) -> Rates:
    """Simulate the swarm for up to PLAYED_S of virtual time, and return its rates after the warm-up.

    Args:
        run_config: The run's config.
        topology: The peers and their links.
        devices: Each peer's device.
        plan: The peers' layers and routes; None: each peer holds the whole model.
        window_s: Length of the shortest gossip window, which replaces that of the config; it is longer if the peers'
            processors need longer windows.
        budget: Limit of playing. The simulator's events count, so that equal swarms have equal rates.
        least_samples: Samples that the play has at least, beyond the budget if need be; 2 or more.

    Raises:
        UserError: If the plan cuts the model within a fragment.
    """
    scenario = scenario_of(run_config, topology, devices, plan, window_s, PLAYED_S, 0)
    rates = simulate_within(scenario, budget, least_samples, least_samples)
    assert rates is not None
    return rates if plan is None else rates.among(topology.ids, list(plan.spans))


def play_routes(
    run_config: Config,
    topology: Topology,
    devices: Sequence[PeerDevice],
    plan: ThroughputPlan,
    budget: SearchBudget,
) -> Rates:
    """Simulate a plan's routes without gossip, and return their rates once pipelines are full.

    The arguments are those of `play`. Routes settle within a minute or two of virtual time, which is much less than
    ROUTES_SETTLED_S. Without gossip, virtual time also takes less work.
    """
    never_s = 2 * ROUTES_PLAYED_S  # no window ends
    scenario = scenario_of(run_config, topology, devices, plan, never_s, ROUTES_PLAYED_S, 0)
    rates = simulate_within(scenario, budget, LEAST_SAMPLES)
    assert rates is not None
    return rates.among(topology.ids, list(plan.spans))


def simulate_within(
    scenario: Scenario, budget: SearchBudget, least_samples: int = 1, enough: int = LEAST_SAMPLES
) -> Rates | None:
    """Play a scenario until its end or that of the budget, and return its rates after the warm-up.

    The play goes on beyond the budget until it has `least_samples` samples. None if it has fewer than `enough`.
    """
    watch, progress = PlayedSwarm(), SearchProgress(budget, 0.0)
    counted_s = 0.0

    def sampled(_: Seconds) -> None:
        nonlocal counted_s
        watch.sample()
        progress.count(watch.work_s - counted_s)
        counted_s = watch.work_s
        if progress.late() and len(watch.at) >= least_samples:
            raise StopRun

    run(scenario, sampled, watches=[watch])
    return watch.rates() if len(watch.at) >= enough else None


def scenario_of(
    run_config: Config,
    topology: Topology,
    devices: Sequence[PeerDevice],
    plan: ThroughputPlan | None,
    window_s: Seconds,
    seconds: Seconds,
    seed: int,
) -> Scenario:
    """Return the simulated run in which these devices train, as `play` describes, for so many virtual seconds."""
    gossip = run_config.gossip.model_copy(update={"start_steps": 0, "window_s": window_s})
    settled = run_config.model_copy(update={"gossip": gossip})
    if plan is not None:
        return planned.scenario_of(plan, topology, settled, seconds, seed, STEP_NOISE_SHARE)
    tokens = step_tokens(run_config)
    steps_s = [tokens / one.tokens_per_s for one in devices]
    settings = SwarmSettings.of(settled, Pace(1.0, STEP_NOISE_SHARE, report_s=1.0), steps_s, tokens)
    settings = replace(settings, saved=True, unquantised=True)
    return Scenario(settings, len(topology), seconds, seed, topology=topology, audited=False)
