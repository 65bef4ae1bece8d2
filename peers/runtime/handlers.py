"""Which machine handles what: one table, for events, for the tags of answers, for questions, and for keys of the DHT.

A node registers a machine's handlers where it makes the machine, so that a new machine or a new message needs no change
of those that are there. An answer is looked up by its tag, a question by its message, and what was found in the DHT by
its key.
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
    _by_name: dict[type | str, Handler] = field(default_factory=dict)

    def register(self, handler: Handler, *names: type | str) -> None:
        """`handler` takes what is of these classes or of ones that derive from them, and what these keys have."""
        for one in names:
            assert one not in self._by_name, f"{getattr(one, '__name__', one)} has a handler already"
            self._by_name[one] = handler

    def find(self, subject: PeerEvent | Tag | Message | str) -> Handler | None:
        """The handler of a key of the DHT; or of the subject's class, or of the nearest base class that has one."""
        if isinstance(subject, str):
            return self._by_name.get(subject)
        for one in type(subject).__mro__:
            if handler := self._by_name.get(one):
                return handler
        return None

    def handle(self, subject: PeerEvent | Tag | str, event: PeerEvent, now: Seconds) -> Sequence[PeerEffect]:
        """Gives the event to the handler of `subject`. An event that nobody handles has no effects."""
        handler = self.find(subject)
        return handler(event, now) if handler else []
