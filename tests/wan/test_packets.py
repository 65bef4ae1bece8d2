"""The heap of packets that are under way, and their slots."""

from random import Random

from benchmarks.wan.packets import NOTHING_DUE, give_slot, next_due, packets, pop, push, take_slot


def test_packets_come_out_by_time_and_equal_times_in_the_order_of_sending() -> None:
    heap, chance = packets(64, 512), Random(3)
    sent = [(chance.randrange(50), take_slot(heap)) for _ in range(512)]
    for due, slot in sent:
        push(heap, due, slot)
    came = []
    while (due := next_due(heap)) != NOTHING_DUE:
        came.append((due, pop(heap)))
    assert came == sorted(sent, key=lambda one: one[0])


def test_a_packet_that_is_sent_later_may_be_due_before() -> None:
    heap = packets(64, 4)
    for due in (30, 10, 20):
        push(heap, due, take_slot(heap))
    assert [(next_due(heap), pop(heap)) for _ in range(3)] == [(10, 1), (20, 2), (30, 0)]


def test_slots_are_limited_and_come_back() -> None:
    heap = packets(64, 2)
    assert [take_slot(heap) for _ in range(3)] == [0, 1, -1]
    give_slot(heap, 1)
    assert take_slot(heap) == 1
