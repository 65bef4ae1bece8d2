"""Mass that a push brings is in one place only, though its sender is away, or its receiver starts again or moves."""

from types import SimpleNamespace
from typing import Any

import pytest

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.push import PushExchange
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, Push, Refused, Snapshot
from decentral.comm.wire.transport import Ask, Asked, AskFailed, Effect, Reply
from decentral.core.algorithms import FragmentContext
from decentral.core.config import GossipConfig
from decentral.core.jobs import Absorb, Absorbed
from decentral.core.reasons import Reason
from decentral.peers.node.answers import Answers
from decentral.peers.node.fragment_exchanges import FragmentExchanges
from decentral.peers.node.handlers import Handlers
from tests.comm.gossip.partners import Partners
from tests.comm.gossip.test_empty_reasons import BLOB, LAYOUT, OWN, PARTNER, closed, context, question


def pushed(ask: Ask) -> Push:
    assert isinstance(ask.envelope.message, Push)
    return ask.envelope.message


def test_a_push_that_is_sent_again_keeps_its_time_and_a_partner_that_has_started_again_since_refuses_it() -> None:
    """A peer was frozen for a minute, and its partner had added the push, saved and died (seed 517775 of the sweep)."""
    sender = PushExchange(context(OWN), 10.0)
    first = question(sender, 10.0)
    (again,) = sender.handle(AskFailed(first.tag, PARTNER, Reason.DEADLINE, 5.0), 15.0)
    assert isinstance(again, Ask)
    back = FragmentContext(context(PARTNER).run, PARTNER, 0, 0.0, GossipConfig(), Partners([OWN]), restored_at=12.0)
    assert snapshots.check(back, pushed(again).offered, BLOB, LAYOUT, 0, 15.0, len(BLOB)) == Reason.STALE
    assert snapshots.check(context(PARTNER), pushed(again).offered, BLOB, LAYOUT, 0, 15.0, len(BLOB)) == ""


@pytest.fixture
def receiver() -> PushExchange:
    """A machine that adds the mass of request 7."""
    machine = PushExchange(context(OWN), 10.0)
    question(machine, 10.0)
    offered = snapshots.describe(context(PARTNER), closed(10_000), 10.0)
    assert machine.handle(Asked(7, PARTNER, Envelope(Push(offered), BLOB)), 10.1)
    return machine


def answers_of(machine: PushExchange) -> Answers:
    """Those of a peer with two open requests, the 7th one of which is of the machine."""
    nothing: Any = SimpleNamespace()
    gossip = FragmentExchanges(nothing, nothing, nothing, running={0: machine})
    return Answers(nothing, lambda: True, Handlers(), nothing, nothing, gossip, None, waiting={7: 0, 8: 0, 9: -1})


def said(effects: list[Effect]) -> dict[int, object]:
    return {one.request: one.envelope.message for one in effects if isinstance(one, Reply)}


@pytest.mark.parametrize(("moved", "answer"), [(True, Refused(Reason.FRAGMENT)), (False, Done())])
def test_mass_that_is_being_added_goes_back_once_the_fragment_is_given_up_and_stays_where_it_is_not(
    receiver: PushExchange, moved: bool, answer: object
) -> None:
    """It went back at once, and was in two places until the layers had changed (seed 524223 of the sweep)."""
    answers = answers_of(receiver)
    assert said(answers.refuse_about([0])) == {8: Refused(Reason.FRAGMENT)}
    assert said(answers.given_up(moved)) == {7: answer}
    assert not answers.given_up(moved)


def test_mass_that_is_in_the_last_checkpoint_does_not_go_back(receiver: PushExchange) -> None:
    leaving = Refused(Reason.LEAVING)
    assert said(answers_of(receiver).leave()) == {7: Done(), 8: leaving, 9: leaving}
    receiver.handle(Absorbed(0, False, "not finite"), 10.2)
    assert said(answers_of(receiver).leave()) == {7: leaving, 8: leaving, 9: leaving}


def test_a_push_that_was_refused_is_refused_when_it_comes_again() -> None:
    """Its sender takes the mass back, and a copy on its way came after the first window (seed 551055 of the sweep)."""
    machine = PushExchange(context(OWN), 10.0)
    first, other = (snapshots.describe(context(PARTNER), closed(seq), 10.0) for seq in (10_000, 10_001))

    def hears(request: int, offered: Snapshot) -> list[Effect]:
        return machine.handle(Asked(request, PARTNER, Envelope(Push(offered), BLOB)), 10.0)

    assert said(hears(1, first)) == {1: Refused(Reason.NOT_READY)}
    question(machine, 10.0)
    assert said(hears(2, first)) == {2: Refused(Reason.NOT_READY)}
    (job,) = hears(3, other)
    assert isinstance(job, Absorb)
    assert said(machine.handle(Absorbed(0, False, "not finite"), 10.2)) == {3: Refused("not finite")}
    assert said(hears(4, other)) == {4: Refused("not finite")}
