"""What fuzzing has found, each as the shortest story that shows it."""

import dataclasses
from typing import Any

import pytest

from decentral.comm.rounds.collection import CollectTag
from decentral.comm.rounds.members import is_valid
from decentral.comm.wire import codec, messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import RoundMember
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Found, Reply
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.membership.roster import MOST_DROPPED
from tests.peers.runtime.test_node import LAYOUT, PROFILE, RUN, Played, identity

LARGEST = (1 << 62) - 1  # that a message can carry


def says_what_others_take(played: Played) -> bool:
    """Whether all that the node has said so far keeps the bounds of messages."""
    said = [effect.envelope.message for effect in played.effects if isinstance(effect, Ask | Reply)]
    assert said
    return all(codec.decode(codec.encode(message))[0] == message for message in said)


def publish(played: Played, **fields: Any) -> None:
    """A liar's record, which is signed as it should be."""
    liar = identity("liar")
    record = PeerRecord(RUN, played.now, (), PROFILE, 0, 3, 5, 5, 100, phase=PeerPhase.TRAINING)
    body = records.pack(dataclasses.replace(record, **fields))
    played.deliver(Found(f"{RUN}/peers", {liar.peer: liar.seal(f"{RUN}/peers", body, played.now + 600)}))


def test_a_round_in_a_record_that_nobody_reaches_does_not_end_our_own_exchanges() -> None:
    """One record made the number of our windows larger than a message can carry: nobody took them any more."""
    played = Played("allreduce", "joining")
    publish(played, round=LARGEST)
    played.deliver(jobs.Started(0))
    played.pass_time(3.0)
    played.ask(1, identity("liar").peer, messages.Pull(RUN, 0, 0, 0.0, 0.0))
    assert isinstance(played.answers[1].message, messages.Snapshot)
    assert says_what_others_take(played)


def test_a_round_that_nobody_reaches_is_no_round() -> None:
    stage = Played("synchronous", "joining").node.setup.routes
    assert stage is not None
    alone = (RoundMember("liar", 0, 3),)
    assert is_valid(messages.RoundStatus(RUN, 7, alone), stage)
    assert not is_valid(messages.RoundStatus(RUN, LARGEST, alone), stage)


@pytest.mark.parametrize("algorithm", ["pull", "synchronous"])
def test_a_step_in_a_state_that_nobody_reaches_is_refused(algorithm: Any) -> None:
    played = Played(algorithm, "joining")
    played.node.join.contacts = (played.known.peer,)
    played.node.join.begin(played.now)
    for _ in range(20):
        played.pass_time(1.0)
        for ask in [played.asks.pop() for _ in range(len(played.asks))]:
            if isinstance(request := ask.envelope.message, messages.StateRequest):
                chunk = messages.StateChunk(RUN, request.fragment, 0, 8, LARGEST, LAYOUT)
                played.deliver(Answered(ask.tag, ask.to, Envelope(chunk, bytes(8)), 0.1, 0.1, 10, 20))
    assert played.node.join.fetch.step < LARGEST


def test_a_clock_that_nobody_reaches_is_not_followed() -> None:
    played = Played("pull", "training")
    assert played.node.clock.follow([LARGEST] * 5) == []


def test_peers_that_never_answer_are_not_remembered_without_end() -> None:
    """Each name whose record we had read, and who left two questions unanswered, was known until its record ended."""
    played = Played("pull", "training")
    roster = played.node.roster
    entry = roster.live[played.known.peer]
    for number in range(MOST_DROPPED + 100):
        roster.live[PeerId(f"silent{number}")] = dataclasses.replace(entry, failures=1)
        roster._unanswered(PeerId(f"silent{number}"), Reason.DEADLINE, played.now, played.now)
    assert len(roster._valid) <= MOST_DROPPED


@pytest.mark.parametrize("failed", [True, False])
def test_an_answer_about_an_earlier_stay_in_a_round_tells_nothing_of_this_one(failed: bool) -> None:
    """A peer that fell behind and followed the same round again stopped at the answer to a question from before."""
    played = Played("synchronous", "training")
    rounds, gone = played.node.rounds, PeerId("gone")
    assert rounds is not None
    tag = CollectTag(rounds.number, gone, 0)
    answer = Envelope(messages.Refused("busy"))
    late = AskFailed(tag, gone, "cut", 1.0) if failed else Answered(tag, gone, answer, 0.1, 0.1, 10, 20)
    assert rounds.now_in is not None
    before = set(rounds.now_in.collection._under_way)
    played.deliver(late)
    assert rounds.now_in.collection._under_way >= before
