"""What a real node gives to peers without a record, and how far others can go with its controls."""

from dataclasses import replace

import pytest

from decentral.comm.wire import messages
from decentral.comm.wire.messages import ExecutionId, ForwardRequest, Message, Question, Refused, RunQuestion
from decentral.comm.wire.transport import AskFailed
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.time_spent import TimeSpent
from decentral.peers.membership.link_probes import ProbeTag
from tests.comm.wire.test_codec import EXAMPLES
from tests.peers.runtime.test_node import BLOB, LAYOUT, RUN, STRANGER, Played

FOR_MEMBERS = [
    replace(one, run=RUN) if isinstance(one, RunQuestion) else one
    for one in EXAMPLES
    if isinstance(one, Question) and not one.for_strangers and not isinstance(one, messages.MembershipProof)
]


@pytest.mark.parametrize("message", FOR_MEMBERS, ids=lambda message: type(message).__name__)
def test_a_stranger_gets_nothing_that_only_members_need(message: Message) -> None:
    played = Played("synchronous" if isinstance(message, messages.CollectRequest) else "pull", "training")
    played.ask(1, STRANGER, message, BLOB)
    assert played.answers[1].message == Refused("stranger")
    played.ask(2, played.known.peer, message, BLOB)
    answer = played.answers.get(2)
    assert answer is None or answer.message != Refused("stranger")


@pytest.mark.parametrize("message", [messages.Hello(), messages.Ping(1), messages.StateRequest(RUN, 0, 0, 5)])
def test_a_stranger_gets_what_a_newcomer_needs(message: Message) -> None:
    played = Played("pull", "training")
    played.ask(1, STRANGER, message)
    assert not isinstance(played.answers[1].message, Refused)


def test_a_peer_that_left_our_questions_unanswered_is_no_stranger_until_its_record_expires() -> None:
    played = Played("pull", "training")
    roster = played.node.roster
    for _ in range(2):
        roster.handle(AskFailed(ProbeTag("ping"), played.known.peer, "unreachable", 1.0), played.now)
    assert played.known.peer not in roster.live
    assert played.node.answers.knows(played.known.peer)
    played.pass_time(601.0)
    assert not played.node.answers.knows(played.known.peer)


def test_strangers_leave_most_places_of_a_donor_to_newcomers_with_a_record() -> None:
    played = Played("pull", "training")
    for number in range(100):
        played.ask(number, PeerId(f"name{number}"), messages.StateRequest(RUN, 0, 0, 5))
    served = [number for number in range(100) if not isinstance(played.answers[number].message, Refused)]
    assert len(served) == 4
    played.ask(100, played.known.peer, messages.StateRequest(RUN, 0, 0, 5))
    assert isinstance(played.answers[100].message, messages.StateChunk)


def test_nothing_waits_for_a_round_where_there_are_none() -> None:
    """Each of these kept its blob for ever, whoever sent it."""
    played = Played("pull", "training")
    for number in range(50):
        request = ForwardRequest(RUN, "S", number, 1, 1, 5.0, 5.0, LAYOUT, round=1)
        played.ask(number, played.known.peer, request, BLOB)
    routes = played.node.routes
    assert routes is not None
    assert {answer.message.reason for answer in played.answers.values() if isinstance(answer.message, Refused)} == {
        "not-ready"
    }
    assert len(played.answers) == 50
    assert routes.executions == {}


def test_a_forward_pass_that_waits_for_its_round_goes_with_its_execution() -> None:
    played = Played("synchronous", "training")
    routes = played.node.routes
    assert routes is not None
    for number in range(20):
        request = ForwardRequest(RUN, "S", number, 1, 1, 5.0, 5.0, LAYOUT, round=routes.admission.round + 1)
        played.ask(100 + number, played.known.peer, request, BLOB)
        decision = messages.CommitDecision(RUN, (), (ExecutionId("S", number, 1),))
        played.ask(200 + number, played.known.peer, decision)
    assert routes.executions == {}
    assert not routes.table.jobs.early


def test_a_donor_hold_is_bounded_for_each_newcomer_and_for_all_names_together() -> None:
    """With a new question each second, whoever asked held the round for ever."""
    for names in (1, 50):
        played = Played("synchronous", "training")
        rounds, held_s = played.node.rounds, 0
        assert rounds is not None
        for second in range(1200):
            sender = PeerId(f"name{second % names}")
            rounds.donor_holds.hold_for(sender, played.now)
            played.now += 1.0
            rounds.donor_holds.expire(played.now)
            held_s += bool(rounds.donor_holds.holds)
        assert 0 < held_s <= 0.55 * 1200


def test_a_liar_moves_the_clock_of_a_swarm_of_two_no_faster_than_a_multiple_of_our_own_steps() -> None:
    played = Played("pull", "training")
    progress = played.node.progress
    for number in range(1, 201):
        for clock in played.node.clock.follow([1 << 60]):
            progress.lr_step = clock.step  # type: ignore[union-attr]
        played.deliver(jobs.Stepped(number, progress.lr_step + 1, 64, 2.0, TimeSpent(training=0.1), 1))
    assert 200 < progress.lr_step <= 200 * 18
