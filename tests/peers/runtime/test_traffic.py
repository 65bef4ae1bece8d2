"""Bytes are counted, and the journal gets the totals now and then."""

from decentral.comm.gossip.exchange import PullTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping, Pong, Pull
from decentral.comm.wire.transport import Answered, Asked
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import TrafficLine
from decentral.core.machine import Log
from decentral.peers.runtime.traffic import QUESTION_BYTES, TRAFFIC_S, TrafficCounter

A = PeerId("A")


def test_blobs_of_questions_and_replies_and_all_bytes_of_answers_count() -> None:
    traffic = TrafficCounter()
    traffic.received(Asked(1, A, Envelope(Ping(0), bytes(5))))
    traffic.received(Answered(PullTag(0, 1), A, Envelope(Pong(0)), 0.1, 0.1, 10, 20))
    traffic.replied(7)
    assert (traffic.sent_bytes, traffic.received_bytes) == (17, 25)


def test_the_totals_are_written_every_few_seconds() -> None:
    traffic = TrafficCounter(sent_bytes=3)
    assert traffic.lines(100.0) == [Log(TrafficLine(sent_bytes=3, received_bytes=0))]
    assert traffic.lines(100.0 + TRAFFIC_S - 1) == []
    assert len(traffic.lines(100.0 + TRAFFIC_S)) == 1


def test_gossip_has_the_part_of_the_traffic_that_its_own_questions_and_as_many_of_partners_explain() -> None:
    traffic = TrafficCounter()
    for _ in range(10):
        traffic.received(Answered(PullTag(0, 1), A, Envelope(Pong(0)), 0.1, 0.1, 0, 1000))
        traffic.received(Asked(1, A, Envelope(Pull(RunId("run"), 0, 1, 5.0, 0.0))))
        traffic.replied(1000)
    taken = traffic.gossip()
    assert taken.part == 1.0
    assert taken.work_bytes == 20 * (QUESTION_BYTES + 1000)
    for _ in range(180):
        traffic.received(Asked(1, A, Envelope(Ping(0))))
    traffic.received(Answered(PullTag(0, 1), A, Envelope(Pong(0)), 0.1, 0.1, 0, 0))
    assert traffic.gossip().part < 0.02
