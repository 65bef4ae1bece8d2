"""Define the table that maps each kind of event to the function of a node that handles it.

A node registers the handlers of a state machine where it makes the state machine, so that a new machine or message
changes no other code. The table finds the handler of an answer by the class of the answer's tag, the handler of a
question by the class of its message, the handler of DHT records by their key, and others by the class of the event.
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
"""All effects that a node returns to its host, and all events that the host delivers to it."""

Handler = Callable[[Any, Seconds], Sequence[PeerEffect]]
"""A function of (event, now) that returns effects. It gets only events of the names under which it is registered."""


@dataclass(slots=True)
class Handlers:
    """The table of one node's handlers, by class or DHT key."""

    _by_name: dict[type | str, Handler] = field(default_factory=dict)

    def register(self, handler: Handler, *names: type | str) -> None:
        """Register a handler for `names`: classes, which include their subclasses, and DHT keys.

        Raises:
            AssertionError: If a class or key has a handler already.
        """
        for one in names:
            assert one not in self._by_name, f"{getattr(one, '__name__', one)} has a handler already"
            self._by_name[one] = handler

    def find(self, subject: PeerEvent | Tag | Message | str) -> Handler | None:
        """Return the handler for a DHT key, or for an object's class or nearest base class; None if there is none."""
        if isinstance(subject, str):
            return self._by_name.get(subject)
        for one in type(subject).__mro__:
            if handler := self._by_name.get(one):
                return handler
        return None

    def handle(self, subject: PeerEvent | Tag | str, event: PeerEvent, now: Seconds) -> Sequence[PeerEffect]:
        """Pass the event to the handler of `subject` (see `find`), and return the effects; [] if it has no handler."""
        handler = self.find(subject)
        return handler(event, now) if handler else []
