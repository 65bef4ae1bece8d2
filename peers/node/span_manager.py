"""Which layers we hold and should hold: of a peer that holds a part of the model, and may move to another one.

Lost layers come first (peers/placement/layer_recovery.py), then what the plan that we adopted wants (peers/planning/swarm_plans.py). Either way it is one
move (peers/placement/span_move.py), and no other begins before that one is done, or its rest is over. The three machines see the same
swarm: whole fragments, by the records of the peers that train. What a move does to the other machines is the node's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.machine import Effect
from decentral.core.units import Seconds
from decentral.peers.joining.join import Donor
from decentral.peers.membership.records import Profile
from decentral.peers.node.own_record import OwnRecord
from decentral.peers.node.peer_selection import NEVER, PeerSelection
from decentral.peers.node.route_planner import RoutePlanner
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.layer_recovery import LayerRecovery, TrainingPeer
from decentral.peers.placement.span_move import MovePhase, SpanMove
from decentral.peers.planning.swarm_plans import SwarmPlans

SPAN_LOOK_S = 2.0  # between two looks at the swarm
WIRE_BYTES = {"bf16": 2.0, "int8": 1.0, "fp32": 4.0}  # a number between two layers


@dataclass(slots=True)
class SpanManager:
    setup: Callable[[], NodeSetup]  # as it is now, with room for moves
    selection: PeerSelection
    routing: RoutePlanner
    advert: OwnRecord
    donor: Donor
    moves: SpanMove = field(init=False)
    cover: LayerRecovery = field(init=False)
    plans: SwarmPlans = field(init=False)
    wake_at: Seconds = 0.0  # of a peer that trains

    def __post_init__(self) -> None:
        setup = self.setup()
        run, own, room = setup.config, setup.own, setup.room
        assert room is not None
        chance = rng.stream(run.seed, "moves", own.peer)
        self.moves = SpanMove(setup.run, own.peer, room, self, chance, run.routes.holders, setup.held)
        self.cover = LayerRecovery(own.peer, room.needs, rng.stream(run.seed, "cover", own.peer))
        self.plans = SwarmPlans(
            setup.run,
            own,
            room.needs,
            WIRE_BYTES[run.routes.wire] * run.model.d_model,
            run.routes.holders,
            run.seed,
            rng.stream(run.seed, "plans", own.peer),
        )

    def look(self, now: Seconds) -> list[Effect]:
        """Whether we should hold other layers: lost ones, if it is our turn, or those of the plan that we adopted."""
        self.wake_at = now + SPAN_LOOK_S
        members, coming = self._members()
        effects = self.plans.look(members, now)
        if self.moves.why == "plan" and self.plans.adopted is not None:
            effects += self.moves.follow(self.plans.wanted(self.moves.held), now)
        if self.moves.state is not MovePhase.SETTLED or now < self.moves.rest_until:
            return effects
        lost = self.cover.look(members, coming, now, self._is_kept)
        if lost is not None:
            return effects + self.moves.begin(lost[0], "lost", now, alone=lost[1])
        goal = self.plans.goal(self.moves.held, now)
        return effects if goal is None else effects + self.moves.begin(goal, "plan", now)

    # What moves ask of the swarm: peers/move.View

    def holders(self, fragment: int) -> list[PeerId]:
        """Who else holds it, and trains."""
        return self.selection.holders(fragment)

    def keepers(self, fragment: int) -> list[PeerId]:
        """Who else keeps the newest state of it that anybody keeps, if that is newer than what we keep."""
        step, peers = self.selection.newest_kept(fragment)
        return peers if step > dict(self.donor.kept).get(fragment, NEVER) else []

    def keeps(self, fragment: int) -> bool:
        """Whether we keep a state of it ourselves."""
        return fragment in dict(self.donor.kept)

    def _is_kept(self, fragment: int) -> bool:
        return self.keeps(fragment) or bool(self.keepers(fragment))

    # The swarm

    def _members(self) -> tuple[dict[PeerId, TrainingPeer], list[range]]:
        """Who trains, ourselves included; the spans of those who are joining.

        Of ourselves, too, what the record says: all have to judge a plan by the same figures, to follow the same one.
        """
        setup, live = self.setup(), self.selection.roster.live
        whole = self.routing.whole_fragments
        spans = {peer: whole(entry.record.first, entry.record.last) for peer, entry in live.items()}
        members = {
            peer: _member(spans[peer], entry.record.profile)
            for peer, entry in live.items()
            if entry.record.phase == "training"
        }
        members[setup.own.peer] = _member(setup.held, self.advert.told or self.advert.profile())
        return members, [span for peer, span in spans.items() if peer not in members]


def _member(held: range, profile: Profile) -> TrainingPeer:
    return TrainingPeer(held, profile.memory_bytes, profile.tokens_per_s, min(profile.down, profile.up))


__all__ = ["SpanManager"]
