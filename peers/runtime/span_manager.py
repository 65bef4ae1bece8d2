"""Decide which layers a peer with a part of the model should hold, and apply a change to all parts of the node.

A move is a change of this peer's span, the range of layers that it holds (scheduler/placement/move.py). There are three
reasons for a move, the most urgent first: no peer holds some layers any more; only peers with the whole model hold some
layers (both scheduler/placement/recover.py); the adopted plan gives this peer another span
(scheduler/placement/plans.py). A move begins when the last move is over and the pause after it has passed.

A move first waits until this peer has no stage execution in progress; meanwhile, routes accept no new stage executions.
Just before the training thread changes the layers, this peer ends its gossip of the fragments that it gives up, and
refuses open questions about these fragments. Afterwards routes, gossip, donor and record use the new span.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decentral.comm.wire.private_swarm import may_train
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Effect, Event
from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.jobs import ChangeSpan, RetainedChanged, RetainedStates, SpanChanged
from decentral.core.machine import Woke
from decentral.core.units import Seconds
from decentral.peers.joining.donor import Donor
from decentral.peers.membership.records import PeerPhase, Profile
from decentral.peers.runtime.answers import Answers
from decentral.peers.runtime.fragment_exchanges import FragmentExchanges
from decentral.peers.runtime.own_record import OwnRecord
from decentral.peers.runtime.peer_selection import NEVER, PeerSelection
from decentral.peers.runtime.route_planner import RoutePlanner
from decentral.peers.runtime.setup import PresentSetup
from decentral.scheduler.placement.cold_copies import ColdCopies
from decentral.scheduler.placement.evaluate import EvaluatePlans, TrainingPeer
from decentral.scheduler.placement.move import Drained, MoveCause, MoveEffect, MovePhase, SpanMove, UseSpan
from decentral.scheduler.placement.plans import SwarmPlans
from decentral.scheduler.placement.recover import LayerRecovery
from decentral.scheduler.throughput.link_limits import TokenLinks

SPAN_REVIEW_S = 2.0
REPLICAS = 2  # other holders of each layer that a move for relief gives up, and holders of each layer in a plan


@dataclass(slots=True)
class SpanManager:
    """The owner of the state machines for moves, layer recovery, plans and copies, and their view of the swarm."""

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
    cold_copies: ColdCopies = field(init=False)
    wake_at: Seconds = 0.0

    def __post_init__(self) -> None:
        """Make the state machines for moves, layer recovery, plans and copies."""
        setup = self.setup.now
        run, own, budget = setup.config, setup.own, setup.memory_budget
        assert budget is not None
        chances = [rng.stream(run.seed, name, own.peer) for name in ("moves", "cover", "plans", "copies")]
        replicas, links = REPLICAS, TokenLinks.of(run)
        self.span_move = SpanMove(setup.run, own.peer, budget, self, chances[0], replicas, setup.held)
        self.layer_recovery = LayerRecovery(own.peer, budget.needs, chances[1])
        self.swarm_plans = SwarmPlans(setup.run, own, budget.needs, links, replicas, run.seed, chances[2], self)
        self.cold_copies = ColdCopies(setup.run, own.peer, budget, run.swarm.checkpoint_every_s, chances[3])

    def review(self, now: Seconds) -> list[Effect | EvaluatePlans]:
        """Begin a move if this peer should hold other layers; cancel a move that is no longer needed.

        The node calls it every SPAN_REVIEW_S while this peer trains.
        """
        self.wake_at = now + SPAN_REVIEW_S
        move, plans = self.span_move, self.swarm_plans
        members, joining = self._members(now)
        serving = {peer: one for peer, one in members.items() if not self._is_alone(peer)}
        planned = plans.planned_spans(serving)
        lost = self.layer_recovery.span_to_take(serving, joining, now, self._is_retained, planned)
        effects: list[Effect | EvaluatePlans] = [*plans.review(serving, now, self.layer_recovery.stuck)]
        effects += self.cold_copies.review(members, self._stored(members), now)
        relief = self.layer_recovery.span_to_relieve(serving, joining, now, move.replicas)
        if move.cause is MoveCause.PLAN and (plans.adopted is not None or move.phase is MovePhase.LEASING):
            effects += self._carry_out(move.abandon_unless_to(plans.planned_span(move.held), now), now)
        elif move.cause is MoveCause.RELIEF and not self.layer_recovery.is_left(move.target):
            # Another peer has taken the layers.
            effects += self._carry_out(move.abandon_unless_to(move.held, now), now)
        brought = [index for index in move.target if index not in move.held and not self.servers(index)]
        if lost is not None and move.cause is MoveCause.PLAN and move.phase is MovePhase.LEASING and not brought:
            effects += self._carry_out(move.abandon_unless_to(move.held, now), now)  # lost layers are more urgent
        if move.phase is not MovePhase.IDLE or now < move.rest_until:
            return effects
        if lost is not None:
            began = move.begin(lost[0], MoveCause.RECOVERY, now, may_initialise=lost[1])
        elif relief is not None:
            began = self._relieve(relief, now)
        else:
            began = self._follow_plan(now)
        return [*effects, *self._carry_out(began, now)]

    def _follow_plan(self, now: Seconds) -> list[MoveEffect]:
        held, plans = self.span_move.held, self.swarm_plans
        if (target := plans.due_move(held, now)) is None:
            return []
        unheld = [index for index in target if index not in held and not self.holders(index)]
        initial = all(index in self.layer_recovery.initial or self._is_retained(index) for index in unheld)
        return self.span_move.begin(target, MoveCause.PLAN, now, initial)

    def _relieve(self, target: range, now: Seconds) -> list[MoveEffect]:
        self.layer_recovery.relief_tried(now)
        effects = self.span_move.begin(target, MoveCause.RELIEF, now)
        if self.span_move.phase is not MovePhase.IDLE:
            self.swarm_plans.drop_adopted()  # the plan is older than the move, and might move us back
        return effects

    def moved(self, event: Event | Drained, now: Seconds) -> list[Effect]:
        """Pass an event to the state machine for moves, and apply its effects to the other parts of the node."""
        return self._carry_out(self.span_move.handle(event, now), now)

    def asked(self, event: Asked, now: Seconds) -> list[Effect]:
        """Answer another peer's LeaseRequest, which asks us to keep a fragment (a lease) or ends the lease."""
        return self.answers.lease_refusal(event) or self.moved(event, now)

    def changed(self, event: SpanChanged, now: Seconds) -> list[Effect]:
        """Continue a move after the training thread has changed the layers, or has failed to change them."""
        if event.accepted:
            self.donor.retain(event.retained)
        return self.moved(event, now)

    def copied(self, event: Answered | AskFailed | RetainedChanged, now: Seconds) -> list[Effect]:
        """Continue a cold copy (a fragment's state on our disk) after a holder's answer, or when the disk has it."""
        if isinstance(event, RetainedChanged):
            if dict(event.retained).keys() != dict(self.donor.retained).keys():
                self.selection.roster.renew_soon(now)
            self.donor.retain(event.retained)
        return self.cold_copies.handle(event, now)

    def settle(self, now: Seconds) -> list[Effect]:
        """Refuse new stage executions if a move requires it, and continue the move when none is in progress.

        The node calls it after each event.
        """
        routes, effects = self.route_planner.routes, list[Effect]()
        if self.span_move.drains and not routes.draining:
            routes.drain()
            effects += routes.handle(Woke(), now)
        if self.span_move.gives_up(now) or (self.span_move.drains and not self.swarm_plans.all_held):
            effects += routes.give_up_all()
        if self.span_move.phase is MovePhase.DRAINING and routes.idle:
            effects += self.moved(Drained(), now)
        return effects

    def _carry_out(self, effects: list[MoveEffect], now: Seconds) -> list[Effect]:
        """Apply the effects of a move that concern other parts of the node, and return the effects for the host."""
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case UseSpan(held):
                    done += self._use_span(held, now)
                case ChangeSpan():
                    done += [*self._give_up(self.span_move.given_up), effect]
                case _:
                    done.append(effect)
        return done

    def _give_up(self, given_up: Sequence[int]) -> list[Effect]:
        self.donor.serve_only([cut for cut in self.setup.now.fragments if cut.index not in given_up])
        refused = self.answers.refuse_about(given_up)
        self.gossip.drop(given_up)
        return refused

    def _use_span(self, held: range, now: Seconds) -> list[Effect]:
        before, setup = self.setup.now, self.setup.set_span(held)
        assert setup.routes is not None
        self.donor.serve_only(setup.fragments)
        self.route_planner.routes.set_stage(setup.routes)
        self.gossip.begin(now)
        if list(setup.fragments) != list(before.fragments):
            self.selection.roster.renew_soon(now)
            self.selection.progress.save_soon(now)
        self.route_planner.solve(always=True)
        return self.route_planner.routes.handle(Woke(), now)

    # The next methods implement SpanView, the interface through which moves and plans see the swarm.

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """Return the other peers that train and hold the whole fragment."""
        return self.selection.holders(fragment)

    def takers(self, fragment: int) -> list[PeerId]:
        """Return the other peers that train and should hold the fragment by the adopted plan."""
        return self.swarm_plans.takers(fragment, self.selection.trainers())

    def servers(self, fragment: int, parts_only: bool = False) -> list[PeerId]:
        """Return the `holders` that compute for others; with `parts_only`, those without the whole model."""
        serving = [peer for peer in self.holders(fragment) if not self._is_alone(peer)]
        return [peer for peer in serving if not parts_only or not self._holds_all(peer)]

    def _holds_all(self, peer: PeerId) -> bool:
        record = self.selection.roster.live[peer].record
        return len(self.route_planner.whole_fragments(record.first, record.last)) == len(self.setup.now.cuts)

    def retainers(self, fragment: int) -> list[PeerId]:
        """Return the peers whose disks have a fragment's newest state; [] if the state on our own disk is as new."""
        step, peers = self.selection.newest_retained(fragment)
        return peers if step > dict(self.donor.retained).get(fragment, NEVER) else []

    def retains(self, fragment: int) -> bool:
        """Return whether our disk has a stored state of this fragment."""
        return fragment in dict(self.donor.retained)

    def _is_retained(self, fragment: int) -> bool:
        return self.retains(fragment) or bool(self.retainers(fragment))

    def known_for_s(self, peer: PeerId, now: Seconds) -> Seconds | None:
        """Return for how many seconds a peer has been in the roster; None if it is not in the roster."""
        entry = self.selection.roster.live.get(peer)
        return None if entry is None else now - entry.since

    def _stored(self, members: Mapping[PeerId, TrainingPeer]) -> dict[PeerId, RetainedStates]:
        """Return the states on the disks of these peers, ourselves included."""
        live = self.selection.roster.live
        stored = {peer: live[peer].record.kept for peer in members if peer in live}
        return stored | {self.setup.now.own.peer: self.donor.retained}

    def _members(self, now: Seconds) -> tuple[dict[PeerId, TrainingPeer], list[range]]:
        """Return the training peers, ourselves included, and the spans of peers that start now and will serve routes.

        Our own speed and memory come from our published record, so that all peers evaluate a plan by the same values.
        """
        setup, live = self.setup.now, self.selection.roster.live
        fragments = self.route_planner.whole_fragments
        spans = {peer: fragments(entry.record.first, entry.record.last) for peer, entry in live.items()}
        members = {
            peer: _member(spans[peer], entry.record.profile, may_train(setup.private, peer), entry.record.lr_step)
            for peer, entry in live.items()
            if entry.record.phase == PeerPhase.TRAINING
        }
        profile = self.own_record.published or self.own_record.profile(now)
        originates, lr_step = may_train(setup.private, setup.own.peer), self.selection.progress.lr_step
        members[setup.own.peer] = _member(setup.held, profile, originates, lr_step)
        starting = [span for peer, span in spans.items() if peer not in members and not self._is_alone(peer)]
        return members, starting

    def _is_alone(self, peer: PeerId) -> bool:
        """Return whether another peer computes for no other peer, so that for routes nobody holds its layers."""
        live = self.selection.roster.live
        return peer in live and live[peer].record.profile.alone


def _member(held: range, profile: Profile, originates: bool, lr_step: int) -> TrainingPeer:
    return TrainingPeer(
        held,
        profile.memory_bytes,
        profile.tokens_per_s,
        rate=profile.up,
        originates=originates,
        lr_step=lr_step,
        costs=profile.costs,
        changed=profile.changed,
    )
