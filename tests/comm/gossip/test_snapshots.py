"""What others pull from a peer: alike answers share their bytes, and no questions can make it hold many."""

from itertools import combinations
from weakref import ref

from decentral.comm.gossip.snapshots import ASKED_LATE_WINDOWS, MOST_PARTS, ROUNDS_KEPT, SnapshotStore
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Pull, Snapshot
from decentral.comm.wire.transport import Effect, Reply
from decentral.core.fragments import Section, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import EncodeSections, SectionsEncoded, WindowClosed

LIGHT = (Section("pseudo_gradient", "q4", 1, 8000),)
MORE = tuple(Section(f"phi.{place}", "int8", 1, 4000) for place in range(4))
ALL = ("phi.0", "phi.1", "phi.2", "phi.3")


def slices(*names: str) -> bytes:
    return b"".join(name[-1:].encode() * 4000 for name in names)


def published() -> SnapshotStore:
    """A store with a snapshot to which somebody has had slow weights added."""
    store = SnapshotStore()
    header = Snapshot("run", 0, 5, 1, 100.0, LIGHT, blobs.digest(bytes(8000)))
    store.put(header, WindowClosed(0, 5, 1, LIGHT, bytes(8000), MORE), 100.0)
    assert ask(store, ALL, 100.0) == [EncodeSections(0, 5, ALL)]
    store.encoded(SectionsEncoded(0, 5, MORE, slices(*ALL)))
    return store


def ask(store: SnapshotStore, names: tuple[str, ...], now: float, peer: str = "A") -> list[Effect]:
    return store.answer(1, PeerId(peer), Pull("run", 0, 0, 0.0, 0.0, False, names), now)


def answered(store: SnapshotStore, *names: str, peer: str) -> Reply:
    (reply,) = ask(store, names, 100.0, peer)
    assert isinstance(reply, Reply)
    return reply


def test_questions_for_the_same_slices_share_one_answer() -> None:
    """64 questions of 100 bytes held 1.5 GB, and each cost the event loop a digest of all of it."""
    store = published()
    for names in ((), ALL, ALL[1:3]):
        first, *others = [answered(store, *names, peer=f"{names} {number}").envelope for number in range(64)]
        assert all(one.blob is first.blob for one in others)


def test_an_answer_with_slices_is_freed_once_it_is_sent_and_made_again_for_the_next_who_asks() -> None:
    """Answers took as many bytes as the windows themselves until the next window closed."""
    store = published()
    sent = answered(store, *ALL, peer="B").envelope
    header, freed = sent.message, ref(sent)
    del sent
    assert freed() is None
    again = answered(store, *ALL, peer="C").envelope
    assert again == Envelope(header, bytes(8000) + slices(*ALL))


def test_an_answer_has_the_slices_and_the_digest_of_what_was_asked_for() -> None:
    store = published()
    for names in ((), ALL, ALL[2:], ("phi.2", "none", "phi.1"), ("pseudo_gradient",)):
        envelope = answered(store, *names, peer=str(names)).envelope
        assert isinstance(envelope.message, Snapshot)
        assert envelope.blob == bytes(8000) + slices(*sorted(set(names) & set(ALL)))
        assert envelope.message.digest == blobs.digest(envelope.blob)
        assert layout_bytes(envelope.message.layout) == len(envelope.blob)


def test_whatever_is_asked_for_the_answers_take_the_memory_of_a_few() -> None:
    """Each choice of slices is an answer of its own, and there are as many choices as anybody likes."""
    store = published()
    choices = [names for count in range(1, 5) for names in combinations(ALL, count)]
    once = [answered(store, *names, peer="L").envelope.blob for names in choices]
    assert [len(blob) > 8000 for blob in once] == [True] + [False] * (len(choices) - 1)
    several = {
        id(blob): len(blob) for blob in [answered(store, *names, peer=str(names)).envelope.blob for names in choices]
    }
    assert 2 * 24_000 < sum(several.values()) <= MOST_PARTS * 24_000 + 8000


def closed(store: SnapshotStore, seq: int) -> bool:
    """A window ends every ten seconds, and is merged at once. Returns whether slow weights are made unasked."""
    header = Snapshot("run", 0, seq, 1, 10.0 * seq, LIGHT, bytes(16), lasted_s=10.0 if seq > 1 else 0.0)
    effects = store.put(header, WindowClosed(0, seq, 1, LIGHT, bytes(8000), MORE), 10.0 * seq)
    store.settle()
    if made := EncodeSections(0, seq, ALL) in effects:
        store.encoded(SectionsEncoded(0, seq, MORE, slices(*ALL)))
    return made


def test_slow_weights_are_made_unasked_while_somebody_asks_late_and_not_for_long_after() -> None:
    store = SnapshotStore()
    assert not any(closed(store, seq) for seq in (1, 2, 3))
    ask(store, ALL, 34.0)  # within half a window
    assert not closed(store, 4)
    ask(store, (), 49.0)
    assert not closed(store, 5)
    ask(store, ALL[:1], 59.0)
    assert [closed(store, seq) for seq in range(6, 8 + ASKED_LATE_WINDOWS)] == [True] * ASKED_LATE_WINDOWS + [False] * 2


def test_a_late_question_is_answered_with_the_slow_weights_that_were_made_unasked() -> None:
    store = SnapshotStore()
    closed(store, 1)
    closed(store, 2)
    ask(store, ALL, 29.0)
    closed(store, 3)
    (reply,) = ask(store, ("phi.3",), 39.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.blob == bytes(8000) + slices("phi.3")


def test_the_newest_snapshot_alone_is_kept_and_the_one_before_it_where_rounds_are_numbered() -> None:
    store = SnapshotStore()
    for seq in (1, 2, 3):
        closed(store, seq)
    assert [one.snapshot.seq for one in store.latest] == [3]
    header = Snapshot("run", 0, 4, 1, 40.0, LIGHT, bytes(16))
    store.put(header, WindowClosed(0, 4, 1, LIGHT, bytes(8000), MORE), 40.0, keep=ROUNDS_KEPT)
    assert [one.snapshot.seq for one in store.latest] == [3, 4]
