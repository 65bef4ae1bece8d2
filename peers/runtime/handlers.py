"""Which machine handles what: one table by class, for events, for the tags of answers, and for questions.

A node registers a machine's handlers where it makes the machine, so that a new machine or a new message needs no change
of those that are there. An answer is looked up by its tag, and a question by its message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decentral.comm.gossip.gossip_cost import CoresUsed
from decentral.comm.wire.messages import Message
from decentral.comm.wire.transport import Effect, Event, Tag
from decentral.core.units import Seconds
from decentral.peers.membership.revocation_watch import Exclude, MembershipOver
from decentral.peers.membership.roster import Learn
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.evaluate import EvaluatePlans, PlansEvaluated

HostEffect = Learn | Exclude | EvaluatePlans | Stop | MembershipOver
PeerEffect = Effect | HostEffect
PeerEvent = Event | CoresUsed | PlansEvaluated
"""What a node asks of its host, and what it hears from it: both hosts carry out, or bring, all of these."""

Handler = Callable[[Any, Seconds], Sequence[PeerEffect]]
"""It takes the events of the classes that it is registered for, and no others."""


@dataclass(slots=True)
class Handlers:
    _by_class: dict[type, Handler] = field(default_factory=dict)

    def register(self, handler: Handler, *classes: type) -> None:
        """`handler` takes what belongs to these classes, or to classes that derive from them."""
        for one in classes:
            assert one not in self._by_class, f"{one.__name__} has a handler already"
            self._by_class[one] = handler

    def find(self, subject: PeerEvent | Tag | Message) -> Handler | None:
        """The handler of the subject's class, or of the nearest base class that has one."""
        return next((self._by_class[one] for one in type(subject).__mro__ if one in self._by_class), None)

    def handle(self, subject: PeerEvent | Tag, event: PeerEvent, now: Seconds) -> Sequence[PeerEffect]:
        """Gives the event to the handler of `subject`. An event that nobody handles has no effects."""
        handler = self.find(subject)
        return handler(event, now) if handler else []
