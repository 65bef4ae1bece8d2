"""Which layers we hold and should hold: of a peer that holds a part of the model, and may move to another one.

Lost layers come first (peers/cover.py), then what the plan that we adopted wants (peers/plans.py). Either way it is one
move (peers/move.py), and no other begins before that one is done, or its rest is over. The three machines see the same
swarm: whole fragments, by the records of the peers that train. What a move does to the other machines is the node's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.machine import Effect
from decentral.core.units import Seconds
from decentral.peers.advert import Advert
from decentral.peers.cover import Cover, Member
from decentral.peers.join import Donor
from decentral.peers.move import Moves, State
from decentral.peers.plans import Plans
from decentral.peers.records import Profile
from decentral.peers.routing import Routing
from decentral.peers.selection import NEVER, Selection
from decentral.peers.setup import Setup

LOOK_S = 2.0  # between two looks at the swarm
WIRE_BYTES = {"bf16": 2.0, "int8": 1.0, "fp32": 4.0}  # a number between two layers


@dataclass(slots=True)
class Spans:
    setup: Callable[[], Setup]  # as it is now, with room for moves
    selection: Selection
    routing: Routing
    advert: Advert
    donor: Donor
    moves: Moves = field(init=False)
    cover: Cover = field(init=False)
    plans: Plans = field(init=False)
    wake_at: Seconds = 0.0  # of a peer that trains

    def __post_init__(self) -> None:
        setup = self.setup()
        run, own, room = setup.config, setup.own, setup.room
        assert room is not None
        chance = rng.stream(run.seed, "moves", own.peer)
        self.moves = Moves(setup.run, own.peer, room, self, chance, run.routes.holders, setup.held)
        self.cover = Cover(own.peer, room.needs, rng.stream(run.seed, "cover", own.peer))
        self.plans = Plans(
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
        self.wake_at = now + LOOK_S
        members, coming = self._members()
        effects = self.plans.look(members, now)
        if self.moves.why == "plan" and self.plans.adopted is not None:
            effects += self.moves.follow(self.plans.wanted(self.moves.held), now)
        if self.moves.state is not State.SETTLED or now < self.moves.rest_until:
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

    def _members(self) -> tuple[dict[PeerId, Member], list[range]]:
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


def _member(held: range, profile: Profile) -> Member:
    return Member(held, profile.memory_bytes, profile.tokens_per_s, min(profile.down, profile.up))


__all__ = ["Spans"]
