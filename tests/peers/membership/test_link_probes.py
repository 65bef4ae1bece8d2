"""Links are probed one at a time, a few at first, and then two of them again and again."""

from dataclasses import replace
from random import Random

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping, Pong, Probe
from decentral.comm.wire.meter import WARM_UP_BYTES, Meter
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.ids import PeerId
from decentral.core.machine import Woke
from decentral.core.reasons import Reason
from decentral.peers.membership.link_probes import (
    DOWN_PROBE_BYTES,
    LEAST_PROBE_BYTES,
    LONG_PROBE_BYTES,
    LONG_PROBE_S,
    PROBE_AGAIN_S,
    PROBE_BYTES,
    PROBE_EVERY_S,
    PROBE_SOON_S,
    PROBE_STEP,
    PROBE_WINDOWS,
    PROBED_PEERS,
    SPREAD,
    Prober,
    ProbeTag,
    UploadTag,
    WarmUpTag,
)

A, B = PeerId("A"), PeerId("B")


def prober() -> Prober:
    return Prober(Meter(), Random(1), 10.0)


def only_ask(effects: list[Ask]) -> Ask:
    (ask,) = effects
    assert isinstance(ask, Ask)
    return ask


def answered(probing: Prober, ask: Ask, seconds: float = 1.0) -> list[Ask]:
    return probing.handle(Answered(ask.tag, ask.to, Envelope(Pong(0)), seconds, 0.1, 10, 10), 11.0, [A])


def test_a_peer_is_asked_for_delay_twice_then_download_then_upload() -> None:
    probing = prober()
    effects, asks = probing.handle(Woke(), 10.0, [A]), []
    while effects:
        asks.append(only_ask(effects))
        effects = answered(probing, asks[-1])
    assert [type(ask.envelope.message) for ask in asks] == [Ping, Ping, Probe, Probe, Probe]
    assert asks[2].envelope.message == Probe(DOWN_PROBE_BYTES)
    assert [len(ask.envelope.blob) for ask in asks[3:]] == [WARM_UP_BYTES, PROBE_BYTES]
    assert [ask.tag.measures_link for ask in asks[3:]] == [False, True]


def test_an_uplink_that_a_long_upload_would_fill_for_many_seconds_gets_a_short_one() -> None:
    """At 75 kB/s 1 MiB took 14 s, in which newcomers waited for the same uplink."""
    probing = prober()
    ask = only_ask(probing.handle(Woke(), 10.0, [A]))
    while not isinstance(ask.tag, WarmUpTag):
        ask = only_ask(answered(probing, ask))
    measured = only_ask(answered(probing, ask, seconds=3.5))
    assert len(measured.envelope.blob) == PROBE_BYTES // PROBE_STEP


def test_what_a_donor_has_sent_us_is_not_measured_again() -> None:
    probing = prober()
    probing.meter.saw(A, 1.0, 0.0, 10, 1 << 20)
    effects, asks = probing.handle(Woke(), 10.0, [A]), []
    while effects:
        asks.append(only_ask(effects))
        effects = answered(probing, asks[-1])
    assert [ask.tag.what for ask in asks if isinstance(ask.tag, ProbeTag)] == ["ping", "ping", "warm up", "up"]


def test_a_peer_that_does_not_answer_is_left_out_and_the_next_one_is_probed() -> None:
    probing = prober()
    first = only_ask(probing.handle(Woke(), 10.0, [A, B]))
    second = only_ask(probing.handle(AskFailed(first.tag, first.to, "deadline", 20.0), 30.0, [A, B]))
    assert {first.to, second.to} == {A, B}
    assert probing.handle(AskFailed(second.tag, second.to, "deadline", 20.0), 50.0, [A, B]) == []


def test_one_link_is_measured_each_time_until_a_few_are_known() -> None:
    """Four peers that come together to homes with 5 Mb/s would otherwise fill their uplinks for ten seconds."""
    probing, everyone, probed = prober(), [PeerId(str(n)) for n in range(50)], []
    for _ in range(PROBED_PEERS + 2):
        effects = probing.handle(Woke(), probing.wake_at or 0.0, everyone)
        probed.append(only_ask(effects).to)
        while effects:
            ask = only_ask(effects)
            assert ask.to == probed[-1]
            if len(ask.envelope.blob) == PROBE_BYTES:
                probing.meter.saw(ask.to, 2.0, 0.1, PROBE_BYTES, 10)
            effects = answered(probing, ask)
    assert len(set(probed[:PROBED_PEERS])) == len(set(probed)) == PROBED_PEERS


def test_our_uplink_is_measured_again_over_the_two_fastest_links_in_turn() -> None:
    """It may have become slower, or carry others' traffic, and nothing else tells us. What the upload says depends on
    the latency, of which pulls say less than a ping: they wait for their peer's window."""
    probing, everyone = prober(), [A, B, PeerId("C")]
    for peer, seconds in zip(everyone, (2.0, 4.0, 1.0), strict=True):
        probing.meter.saw(peer, seconds, 0.0, 1 << 20, 10)
    again = []
    for _ in range(3):
        ping = only_ask(probing.handle(Woke(), probing.wake_at or 0.0, everyone))
        assert ping.tag == ProbeTag("ping")
        assert only_ask(answered(probing, ping)).tag == WarmUpTag("warm up")
        up = only_ask(answered(probing, ping))
        assert (up.to, up.tag) == (ping.to, UploadTag("up again"))
        probing.meter.saw(up.to, 1.5, 0.0, 1 << 20, 10)
        assert answered(probing, up) == []
        again.append(up.to)
    assert again == ["A", "C", "A"]


def test_a_megabyte_that_is_up_again_as_fast_as_slow_start_allows_is_followed_by_more() -> None:
    probing = prober()
    probing.meter.saw(A, 0.1, 0.1, 10, 10)
    probing.meter.saw(A, 1.1, 0.1, 1 << 20, 10)
    assert upload_of(probing, probing.handle(Woke(), 10.0, [A])).tag == UploadTag("up again")
    soon = Answered(UploadTag("up again"), A, Envelope(Pong(0)), 0.3, 0.3, PROBE_BYTES, 10)
    longer = only_ask(probing.handle(soon, 11.0, [A]))
    assert (longer.to, len(longer.envelope.blob)) == (A, LONG_PROBE_BYTES)
    for other in (replace(soon, seconds=1.1), replace(soon, tag=UploadTag("up"))):
        assert not any(ask.tag == UploadTag("long up") for ask in asked_after(probing, other))


def test_an_upload_over_a_fast_link_is_repeated_with_more_bytes() -> None:
    probing = prober()
    probing.meter.saw(A, LONG_PROBE_S, 0.0, LONG_PROBE_BYTES, 10)
    assert upload_of(probing, probing.handle(Woke(), 10.0, [A])).tag == UploadTag("long up")


def upload_of(probing: Prober, effects: list[Ask]) -> Ask:
    """The next upload that is measured; the questions before it are answered."""
    ask = only_ask(effects)
    while not (isinstance(ask.tag, UploadTag) and ask.tag.measures_link):
        ask = only_ask(answered(probing, ask))
    return ask


def test_an_upload_that_does_not_pass_in_time_is_tried_with_ever_less() -> None:
    probing, sizes = prober(), []
    for _ in range(4):
        up = upload_of(probing, probing.handle(Woke(), probing.wake_at or 0.0, [A]))
        sizes.append(len(up.envelope.blob))
        assert probing.handle(AskFailed(up.tag, A, "deadline", 20.0), 30.0, [A]) == []
    assert sizes == [PROBE_BYTES, PROBE_BYTES // PROBE_STEP, LEAST_PROBE_BYTES, LEAST_PROBE_BYTES]


def test_a_smaller_upload_that_says_only_slow_start_is_followed_by_a_larger_one() -> None:
    probing = prober()
    probing.meter.saw(A, 0.1, 0.1, 10, 10)
    up = upload_of(probing, probing.handle(Woke(), 10.0, [A]))
    probing.handle(AskFailed(up.tag, A, "deadline", 20.0), 30.0, [A])
    small = upload_of(probing, probing.handle(Woke(), probing.wake_at or 0.0, [A]))
    soon = Answered(small.tag, A, Envelope(Pong(0)), 0.3, 0.3, len(small.envelope.blob), 10)
    (larger,) = asked_after(probing, soon)
    assert len(larger.envelope.blob) == PROBE_BYTES
    assert asked_after(probing, replace(soon, tag=larger.tag, sent_bytes=PROBE_BYTES, seconds=9.0)) == []


def test_who_cannot_be_reached_does_not_make_uploads_smaller() -> None:
    probing = prober()
    up = upload_of(probing, probing.handle(Woke(), 10.0, [A]))
    probing.handle(AskFailed(up.tag, A, "unreachable", 0.1), 30.0, [A])
    assert len(upload_of(probing, probing.handle(Woke(), probing.wake_at or 0.0, [B])).envelope.blob) == PROBE_BYTES


def asked_after(probing: Prober, event: Answered) -> list[Ask]:
    return [ask for ask in probing.handle(event, 12.0, [A]) if isinstance(ask, Ask)]


def test_a_peer_that_was_alone_probes_soon_after_another_has_come() -> None:
    probing = prober()
    assert probing.handle(Woke(), 10.0, []) == []
    assert probing.wake_at == 10.0 + PROBE_SOON_S
    assert only_ask(probing.handle(Woke(), 10.0 + PROBE_SOON_S, [A])).to == A


def test_it_waits_until_it_is_time_and_then_longer_and_longer() -> None:
    probing, waits_s = prober(), []
    assert probing.handle(Woke(), 9.9, [A]) == []
    for _ in range(5):
        now = probing.wake_at or 0.0
        probing.handle(Woke(), now, [A])
        waits_s.append((probing.wake_at or 0.0) - now)
    means_s = [PROBE_AGAIN_S, 2 * PROBE_AGAIN_S, 4 * PROBE_AGAIN_S, PROBE_EVERY_S, PROBE_EVERY_S]
    assert all(is_pause(wait_s, mean_s) for wait_s, mean_s in zip(waits_s, means_s, strict=True))


def is_pause(pause_s: float, mean_s: float) -> bool:
    return (1 - SPREAD) * mean_s <= pause_s <= (1 + SPREAD) * mean_s


def test_peers_that_started_together_do_not_probe_together() -> None:
    of_peers = []
    for seed in range(2):
        probing, at_s = Prober(Meter(), Random(seed)), []
        probing.begin(0.0)
        for _ in range(8):
            at_s.append(probing.wake_at or 0.0)
            probing.handle(Woke(), at_s[-1], [A])
        of_peers.append(at_s)
    apart_s = [abs(one_s - other_s) for one_s, other_s in zip(*of_peers, strict=True)]
    assert apart_s[0] > 0.0
    assert min(apart_s[-4:]) > 1.0


def test_a_peer_with_long_windows_probes_once_in_a_few_windows_at_last() -> None:
    probing, window_s = prober(), 100.0
    for _ in range(8):
        now = probing.wake_at or 0.0
        probing.handle(Woke(), now, [A], window_s)
    assert is_pause((probing.wake_at or 0.0) - now, PROBE_WINDOWS * window_s)
    assert PROBE_WINDOWS * window_s > PROBE_EVERY_S


def test_the_link_to_a_much_nearer_peer_is_measured_whenever_it_is_found() -> None:
    """A peer in a laboratory would otherwise take a slow link to another one for its uplink, and pace what it sends."""
    probing, far = prober(), [PeerId(f"far{n}") for n in range(PROBED_PEERS)]
    for peer in far:
        probing.meter.saw(peer, 0.05, 0.05, 10, 10)
        probing.meter.saw(peer, 1.0, 0.05, PROBE_BYTES, 10)
    for peer, latency_s in ((PeerId("also far"), 0.04), (A, 0.001), (B, 0.002)):
        probing.meter.saw(peer, latency_s, latency_s, 10, 10)
    everyone = [*far, PeerId("also far"), A, B, PeerId("unknown")]
    assert only_ask(probing.handle(Woke(), 10.0, everyone)).to == A
    probing.meter.saw(A, 0.01, 0.001, PROBE_BYTES, 10)
    assert only_ask(probing.handle(Woke(), 30.0, everyone)).to in {A, *far}


def test_a_near_peer_whose_probe_fails_is_not_preferred_again() -> None:
    """It would otherwise take the place of all other probes for as long as it answers pings only."""
    probing = prober()
    for peer in (far := [PeerId(f"far{n}") for n in range(PROBED_PEERS)]):
        probing.meter.saw(peer, 0.05, 0.05, 10, 10)
        probing.meter.saw(peer, 1.0, 0.05, PROBE_BYTES, 10)
    probing.meter.saw(A, 0.001, 0.001, 10, 10)
    ask = only_ask(probing.handle(Woke(), 10.0, [*far, A]))
    assert ask.to == A
    probing.handle(AskFailed(ask.tag, A, Reason.DEADLINE, 20.0), 30.0, [*far, A])
    assert only_ask(probing.handle(Woke(), 1000.0, [*far, A])).to in far


def test_links_into_the_local_network_and_out_of_it_are_measured_in_turn() -> None:
    """A home whose four peers came first knew the rate between them, and never that of its uplink."""
    latencies_s = dict.fromkeys(map(PeerId, "ABC"), 0.001) | dict.fromkeys(map(PeerId, "XYZ"), 0.05)
    probing, now, probed = prober(), 10.0, []
    for peer, latency_s in latencies_s.items():
        probing.meter.saw(peer, latency_s, latency_s, 10, 10)
    for number in range(12):
        peers = list(latencies_s)[: 3 if number < 3 else 6]
        effects = probing.handle(Woke(), now, peers)
        while effects:
            ask, size = effects[0], len(effects[0].envelope.blob)
            seconds = latencies_s[ask.to] + size / (100e6 if ask.to in "ABC" else 5e6)
            if size and ask.tag.measures_link:
                probing.meter.saw(ask.to, seconds, latencies_s[ask.to], size, 10)
                probed.append(ask.to)
            event = Answered(ask.tag, ask.to, Envelope(Pong(0)), seconds, latencies_s[ask.to], size, 10)
            effects = probing.handle(event, now, peers)
        now = probing.wake_at or 0.0
    assert "".join("near " if peer in "ABC" else "far " for peer in probed[-6:]).count("near far") == 3, probed
