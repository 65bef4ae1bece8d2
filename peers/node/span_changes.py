"""Carries a span move out in the other machines of a node (the move itself: peers/placement/span_move.py).

While a move drains, routes take no new executions. Just before the compute thread changes the layers, exchanges and
questions about the layers that are given up end; after it, routes, exchanges, donor and record go by the new span.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decentral.core.jobs import ChangeSpan, SpanChanged
from decentral.core.machine import Effect, Woke
from decentral.core.units import Seconds
from decentral.peers.joining.donor import Donor
from decentral.peers.node.answers import Answers
from decentral.peers.node.fragment_exchanges import FragmentExchanges
from decentral.peers.node.peer_selection import PeerSelection
from decentral.peers.node.route_planner import RoutePlanner
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.span_move import Drained, HoldSpan, MovePhase, SpanMove


@dataclass(slots=True)
class SpanChanges:
    span_move: SpanMove
    selection: PeerSelection
    route_planner: RoutePlanner
    donor: Donor
    gossip: FragmentExchanges
    answers: Answers
    replace_setup: Callable[[range], NodeSetup]  # makes these fragments the node's span

    def changed(self, event: SpanChanged, now: Seconds) -> list[Effect]:
        """The compute thread has changed the layers, or could not."""
        if event.accepted:
            self.donor.retained = event.kept
        return self.span_move.handle(event, now)

    def carry_out(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """The same effects, with what the move's own effects lead to in their place."""
        routes, move = self.route_planner.routes, self.span_move
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case HoldSpan(fragments):
                    done += self._hold(fragments, now)
                case ChangeSpan():
                    done += [*self._give_up(move.lost), effect]
                case _:
                    done.append(effect)
        if move.drains and not routes.draining:
            routes.drain()
            done += routes.handle(Woke(), now)
        if move.phase is MovePhase.DRAINING and routes.idle:
            done += self.carry_out(move.handle(Drained(), now), now)
        return done

    def _give_up(self, lost: Sequence[int]) -> list[Effect]:
        self.donor.fragments = [cut for cut in self.selection.setup().fragments if cut.index not in lost]
        self.gossip.drop(lost)
        return self.answers.refuse_about(lost)

    def _hold(self, held: range, now: Seconds) -> list[Effect]:
        """These fragments are the span of this peer from now on."""
        before, setup = self.selection.setup(), self.replace_setup(held)
        assert setup.routes is not None
        self.donor.fragments = setup.fragments
        self.route_planner.routes.hold(setup.routes)
        self.gossip.add(setup.fragments, now)
        if list(setup.fragments) != list(before.fragments):
            self.selection.roster.renew_soon(now)
            self.selection.progress.save_soon(now)
        self.route_planner.solve(always=True)
        return self.route_planner.routes.handle(Woke(), now)
