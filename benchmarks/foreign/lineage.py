"""Which trained tokens are in the weights of the peers that live at the end of a simulated run.

Start at `Lineage`, a `Watch` of `decentral.sim.run`. For each fragment, a peer's weights hold a number of tokens of
each peer that ever trained: of itself all that its journal says it trained, of others what came with merged snapshots
and with the state that it joined with. A snapshot holds what its maker's weights held when its window closed, by the
maker's last `step` or `applied` line before. What a peer trained after its last snapshot that somebody merged dies with
it; so does what only peers that died had merged. A merge counts as taking over all that the snapshot's maker held,
though a snapshot without slow weights brings one window only: what nobody merged of earlier ones counts as saved.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.events import AppliedLine, ExchangeLine, JoinedLine, MoveLine, StepLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.sim.swarm import SimulatedSwarm

KEPT_S = 600.0  # states of the past for which a merge or a join may ask

Tokens = dict[PeerId, int]
"""By the peer that trained them."""


@dataclass(slots=True)
class Held:
    """The tokens in one peer's weights of one fragment, now and at earlier times."""

    now: Tokens = field(default_factory=dict)
    past: deque[tuple[Seconds, Tokens]] = field(default_factory=deque)

    def at(self, time: Seconds) -> Tokens:
        """Return the tokens that the weights held at `time`, by the last line before."""
        found: Tokens = {}
        for since, tokens in self.past:
            if since > time:
                break
            found = tokens
        return found

    def keep(self, time: Seconds) -> None:
        """Remember the weights of now."""
        self.past.append((time, dict(self.now)))
        while self.past[0][0] < time - KEPT_S and len(self.past) > 1:
            self.past.popleft()


@dataclass(slots=True)
class Lineage:
    """A watch of a run that follows tokens from weights to weights. `routed`: peers hold parts of the model."""

    fragments: tuple[Fragment, ...]
    routed: bool
    held: dict[tuple[PeerId, int], Held] = field(default_factory=dict)
    trained: int = 0  # tokens, whether they survive or not, of all fragments together
    _swarm: SimulatedSwarm | None = None

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Remember the swarm, whose living peers count at the end."""
        self._swarm = swarm

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Follow the tokens of one journal line."""
        match log.event:
            case StepLine() as step if not self.routed:
                for fragment in self.fragments:
                    self._train(peer, fragment.index, step.tokens, t)
            case AppliedLine() as applied if self.routed:
                for first, _, tokens in applied.of:
                    self._train(peer, self._fragment(first), tokens, t)
            case ExchangeLine(outcome="done", partner=str() as partner) as exchange:
                self._merge(peer, PeerId(partner), [exchange.fragment], t - (exchange.age_s or 0.0), t)
            case JoinedLine() as joined:
                every = [fragment.index for fragment in self.fragments]
                for donor in joined.donors:
                    self._merge(peer, PeerId(donor), every, t - joined.seconds, t)
            case MoveLine(outcome="done") as moved:
                span = [one.index for one in self.fragments if moved.first <= one.first and one.last <= moved.last]
                for donor in moved.donors:
                    self._merge(peer, PeerId(donor), span, t - moved.seconds, t)

    def end(self) -> None:
        """Do nothing; `useful` is asked after the run."""

    def useful(self) -> float:
        """Return the tokens in the weights of peers that live, the mean over the fragments."""
        assert self._swarm is not None
        living = [member.peer for member in self._swarm.living]
        return sum(
            sum(union(self._held(peer, fragment.index).now for peer in living).values()) for fragment in self.fragments
        ) / len(self.fragments)

    def _held(self, peer: PeerId, fragment: int) -> Held:
        return self.held.setdefault((peer, fragment), Held())

    def _train(self, peer: PeerId, fragment: int, tokens: int, time: Seconds) -> None:
        held = self._held(peer, fragment)
        held.now[peer] = held.now.get(peer, 0) + tokens
        held.keep(time)
        self.trained += tokens

    def _merge(self, peer: PeerId, giver: PeerId, fragments: list[int], then: Seconds, now: Seconds) -> None:
        for fragment in fragments:
            mine = self._held(peer, fragment)
            mine.now = union([mine.now, self._held(giver, fragment).at(then)])
            mine.keep(now)

    def _fragment(self, layer: int) -> int:
        return next(one.index for one in self.fragments if one.first <= layer < one.last)


def union(held: Iterable[Tokens]) -> Tokens:
    """Return the tokens that at least one of several weights hold: of each peer the most."""
    found: Tokens = {}
    for tokens in held:
        for peer, count in tokens.items():
            found[peer] = max(found.get(peer, 0), count)
    return found
