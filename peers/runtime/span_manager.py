"""Which layers a peer holds and should hold, if it holds a part of the model and may move to another one.

Lost layers come first, then those that are left to peers with the whole model (scheduler/placement/recover.py), then
the span that the adopted plan gives this peer (scheduler/placement/plans.py). Any of these is one move
(scheduler/placement/move.py), and no other begins before that one is over and its pause has passed. The three machines
see the same swarm: whole fragments, by the records of the peers that train.

A move is carried out in the node's other machines as well. While it drains, routes take no new executions. Just before
the training thread changes the layers, exchanges and questions about those that are given up end; after it, routes,
exchanges, donor and record go by the new span.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.comm.wire.private_swarm import may_train
from decentral.comm.wire.transport import Asked, Effect, Event
from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.jobs import ChangeSpan, SpanChanged
from decentral.core.machine import Woke
from decentral.core.units import Seconds
from decentral.peers.joining.donor import Donor
from decentral.peers.membership.records import Profile
from decentral.peers.runtime.answers import Answers
from decentral.peers.runtime.fragment_exchanges import FragmentExchanges
from decentral.peers.runtime.own_record import OwnRecord
from decentral.peers.runtime.peer_selection import NEVER, PeerSelection
from decentral.peers.runtime.route_planner import RoutePlanner
from decentral.peers.runtime.setup import PresentSetup
from decentral.scheduler.placement.evaluate import EvaluatePlans, TrainingPeer
from decentral.scheduler.placement.move import Drained, HoldSpan, MoveEffect, MovePhase, SpanMove
from decentral.scheduler.placement.plans import SwarmPlans
from decentral.scheduler.placement.recover import LayerRecovery

SPAN_REVIEW_S = 2.0  # between two reviews of the swarm
WIRE_BYTES = {"auto": 2.0, "bf16": 2.0, "int8": 1.0, "int8-q4": 0.75, "fp32": 4.0}  # of a number between layers


@dataclass(slots=True)
class SpanManager:
    setup: PresentSetup
    selection: PeerSelection
    route_planner: RoutePlanner
    own_record: OwnRecord
    donor: Donor
    gossip: FragmentExchanges
    answers: Answers
    span_move: SpanMove = field(init=False)
    layer_recovery: LayerRecovery = field(init=False)
    swarm_plans: SwarmPlans = field(init=False)
    wake_at: Seconds = 0.0  # when a peer that trains reviews the swarm next

    def __post_init__(self) -> None:
        setup = self.setup.now
        run, own, budget = setup.config, setup.own, setup.memory_budget
        assert budget is not None
        chances = [rng.stream(run.seed, name, own.peer) for name in ("moves", "cover", "plans")]
        replicas, hidden_bytes = run.routes.holders, WIRE_BYTES[run.routes.wire] * run.model.d_model
        self.span_move = SpanMove(setup.run, own.peer, budget, self, chances[0], replicas, setup.held)
        self.layer_recovery = LayerRecovery(own.peer, budget.needs, chances[1])
        self.swarm_plans = SwarmPlans(setup.run, own, budget.needs, hidden_bytes, replicas, run.seed, chances[2], self)

    def review(self, now: Seconds) -> list[Effect | EvaluatePlans]:
        """Begins a move if this peer should hold other layers: lost ones in its turn, or those of the adopted plan."""
        self.wake_at = now + SPAN_REVIEW_S
        move, plans = self.span_move, self.swarm_plans
        members, joining = self._members(now)
        effects: list[Effect | EvaluatePlans] = [*plans.review(members, now)]
        relief = self.layer_recovery.span_to_relieve(members, joining, now, move.replicas)
        if move.why == "plan" and plans.adopted is not None:
            effects += self._carry_out(move.redirect(plans.planned_span(move.held), now), now)
        elif move.why == "relief" and not self.layer_recovery.is_left(move.target):
            effects += self._carry_out(move.redirect(move.held, now), now)  # somebody else was there first
        if move.phase is not MovePhase.IDLE or now < move.rest_until:
            return effects
        lost = self.layer_recovery.span_to_take(members, joining, now, self._is_retained)
        if lost is not None:
            began = move.begin(lost[0], "lost", now, may_initialise=lost[1])
        elif relief is not None:
            began = self._relieve(relief, now)
        else:
            target = plans.due_move(move.held, now)
            began = [] if target is None else move.begin(target, "plan", now)
        return [*effects, *self._carry_out(began, now)]

    def _relieve(self, target: range, now: Seconds) -> list[MoveEffect]:
        self.layer_recovery.relief_tried(now)
        effects = self.span_move.begin(target, "relief", now)
        if self.span_move.phase is not MovePhase.IDLE:
            self.swarm_plans.drop_adopted()  # it was made while somebody else held those layers, and may lead back
        return effects

    # Moves in the other machines

    def moved(self, event: Event | Drained, now: Seconds) -> list[Effect]:
        """Give the move an event, and carry out in the other machines what follows."""
        return self._carry_out(self.span_move.handle(event, now), now)

    def asked(self, event: Asked, now: Seconds) -> list[Effect]:
        """Answer another peer that asks for a replica lease, or gives one back."""
        return self.answers.lease_refusal(event) or self.moved(event, now)

    def changed(self, event: SpanChanged, now: Seconds) -> list[Effect]:
        """The training thread has changed the layers, or could not."""
        self.donor.changed(event)
        return self.moved(event, now)

    def settle(self, now: Seconds) -> list[Effect]:
        """End the stage executions here while the move drains; once none is left, the layers change."""
        routes, effects = self.route_planner.routes, list[Effect]()
        if self.span_move.drains and not routes.draining:
            routes.drain()
            effects += routes.handle(Woke(), now)
        if self.span_move.phase is MovePhase.DRAINING and routes.idle:
            effects += self.moved(Drained(), now)
        return effects

    def _carry_out(self, effects: list[MoveEffect], now: Seconds) -> list[Effect]:
        """Return the move's effects, with what the other machines do about a change of layers in its place."""
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case HoldSpan(held):
                    done += self._hold(held, now)
                case ChangeSpan():
                    done += [*self._give_up(self.span_move.lost), effect]
                case _:
                    done.append(effect)
        return done

    def _give_up(self, lost: Sequence[int]) -> list[Effect]:
        self.donor.hold([cut for cut in self.setup.now.fragments if cut.index not in lost])
        refused = self.answers.refuse_about(lost)
        self.gossip.drop(lost)
        return refused

    def _hold(self, held: range, now: Seconds) -> list[Effect]:
        before, setup = self.setup.now, self.setup.hold(held)
        assert setup.routes is not None
        self.donor.hold(setup.fragments)
        self.route_planner.routes.hold(setup.routes)
        self.gossip.begin(now)
        if list(setup.fragments) != list(before.fragments):
            self.selection.roster.renew_soon(now)
            self.selection.progress.save_soon(now)
        self.route_planner.solve(always=True)
        return self.route_planner.routes.handle(Woke(), now)

    # SpanView: what moves ask about the swarm

    def holders(self, fragment: int) -> Sequence[PeerId]:
        return self.selection.holders(fragment)

    def part_holders(self, fragment: int) -> list[PeerId]:
        live, whole = self.selection.roster.live, len(self.setup.now.cuts)
        records = {peer: live[peer].record for peer in self.holders(fragment) if peer in live}
        spans = {peer: self.route_planner.whole_fragments(one.first, one.last) for peer, one in records.items()}
        return [peer for peer, span in spans.items() if len(span) < whole]

    def retainers(self, fragment: int) -> list[PeerId]:
        step, peers = self.selection.newest_retained(fragment)
        return peers if step > dict(self.donor.retained).get(fragment, NEVER) else []

    def retains(self, fragment: int) -> bool:
        return fragment in dict(self.donor.retained)

    def _is_retained(self, fragment: int) -> bool:
        return self.retains(fragment) or bool(self.retainers(fragment))

    def known_for_s(self, peer: PeerId, now: Seconds) -> Seconds | None:
        entry = self.selection.roster.live.get(peer)
        return None if entry is None else now - entry.since

    def _members(self, now: Seconds) -> tuple[dict[PeerId, TrainingPeer], list[range]]:
        """The peers that train, ourselves included, and the spans of the peers that are joining.

        Our own figures, too, are those of our record: all peers have to judge a plan by the same ones, so that all
        follow the same plan.
        """
        setup, live = self.setup.now, self.selection.roster.live
        fragments = self.route_planner.whole_fragments
        spans = {peer: fragments(entry.record.first, entry.record.last) for peer, entry in live.items()}
        members = {
            peer: _member(spans[peer], entry.record.profile, may_train(setup.private, peer))
            for peer, entry in live.items()
            if entry.record.phase == "training"
        }
        profile = self.own_record.published or self.own_record.profile(now)
        members[setup.own.peer] = _member(setup.held, profile, may_train(setup.private, setup.own.peer))
        return members, [span for peer, span in spans.items() if peer not in members]


def _member(held: range, profile: Profile, originates: bool) -> TrainingPeer:
    return TrainingPeer(held, profile.memory_bytes, profile.tokens_per_s, min(profile.down, profile.up), originates)
