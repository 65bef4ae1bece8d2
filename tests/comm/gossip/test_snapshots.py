"""What others pull from a peer: alike answers share their bytes, however many are under way."""

from decentral.comm.gossip.snapshots import ASKED_LATE_WINDOWS, MOST_PARTS, ROUNDS_KEPT, SnapshotStore
from decentral.comm.wire import blobs
from decentral.comm.wire.messages import Pull, Snapshot
from decentral.comm.wire.transport import Reply
from decentral.core.fragments import Section
from decentral.core.jobs import EncodeSections, SectionsEncoded, WindowClosed

LIGHT = (Section("pseudo_gradient", "q4", 1, 8000),)
MORE = (Section("phi", "int8", 1, 16_000),)


def published() -> SnapshotStore:
    """A store with a snapshot to which somebody has had slow weights added."""
    store = SnapshotStore()
    header = Snapshot("run", 0, 5, 1, 0.1, 100.0, LIGHT, blobs.digest(bytes(8000)))
    store.put(header, WindowClosed(0, 5, 1, 0.1, LIGHT, bytes(8000), MORE), 100.0)
    assert len(store.answer(1, pull("phi"), 100.0)) == 1
    store.encoded(SectionsEncoded(0, 5, MORE, b"p" * 16_000))
    return store


def pull(*sections: str) -> Pull:
    return Pull("run", 0, 0, 0.0, 0.0, False, sections)


def answered(store: SnapshotStore, *sections: str) -> Reply:
    (reply,) = store.answer(2, pull(*sections), 100.0)
    assert isinstance(reply, Reply)
    return reply


def test_questions_for_all_sections_share_one_answer() -> None:
    """64 questions of 100 bytes held 1.5 GB, and each cost the event loop a digest of all of it."""
    store = published()
    for sections in ((), ("phi",), ("pseudo_gradient",)):
        first, *others = [answered(store, *sections).envelope.blob for _ in range(64)]
        assert all(one is first for one in others)


def test_an_answer_has_the_sections_and_the_digest_of_what_was_asked_for() -> None:
    store = published()
    expected = {(): bytes(8000) + b"p" * 16_000, ("phi",): b"p" * 16_000, ("none",): b""}
    for sections, blob in expected.items():
        envelope = answered(store, *sections).envelope
        assert isinstance(envelope.message, Snapshot)
        assert envelope.blob == blob
        assert envelope.message.digest == blobs.digest(blob)
        assert sum(section.size for section in envelope.message.layout) == len(blob)
    assert len(store.latest[-1].parts) <= MOST_PARTS


def test_an_answer_from_before_the_slow_weights_were_added_is_not_kept() -> None:
    store = SnapshotStore()
    store.put(
        Snapshot("run", 0, 5, 1, 0.1, 100.0, LIGHT, bytes(16)), WindowClosed(0, 5, 1, 0.1, LIGHT, bytes(8000)), 1.0
    )
    assert answered(store, "phi").envelope.blob == b""
    store.latest[-1].add(MORE, b"p" * 16_000)
    assert answered(store, "phi").envelope.blob == b"p" * 16_000


def closed(store: SnapshotStore, seq: int) -> bool:
    """A window ends every ten seconds, and is merged at once. Returns whether slow weights are made unasked."""
    header = Snapshot("run", 0, seq, 1, 0.1, 10.0 * seq, LIGHT, bytes(16), lasted_s=10.0 if seq > 1 else 0.0)
    effects = store.put(header, WindowClosed(0, seq, 1, 0.1, LIGHT, bytes(8000), MORE), 10.0 * seq)
    store.settle()
    if made := EncodeSections(0, seq) in effects:
        store.encoded(SectionsEncoded(0, seq, MORE, b"p" * 16_000))
    return made


def test_slow_weights_are_made_unasked_while_somebody_asks_late_and_not_for_long_after() -> None:
    store = SnapshotStore()
    assert not any(closed(store, seq) for seq in (1, 2, 3))
    store.answer(1, pull("phi"), 34.0)  # within half a window
    assert not closed(store, 4)
    store.answer(1, pull("pseudo_gradient"), 49.0)
    assert not closed(store, 5)
    store.answer(1, pull("phi"), 59.0)
    assert [closed(store, seq) for seq in range(6, 8 + ASKED_LATE_WINDOWS)] == [True] * ASKED_LATE_WINDOWS + [False] * 2


def test_a_late_question_is_answered_with_the_slow_weights_that_were_made_unasked() -> None:
    store = SnapshotStore()
    closed(store, 1)
    closed(store, 2)
    store.answer(1, pull(), 29.0)
    closed(store, 3)
    (reply,) = store.answer(2, pull("phi"), 39.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.blob == b"p" * 16_000


def test_the_newest_snapshot_alone_is_kept_and_the_one_before_it_where_rounds_are_numbered() -> None:
    store = SnapshotStore()
    for seq in (1, 2, 3):
        closed(store, seq)
    assert [one.snapshot.seq for one in store.latest] == [3]
    header = Snapshot("run", 0, 4, 1, 0.1, 40.0, LIGHT, bytes(16))
    store.put(header, WindowClosed(0, 4, 1, 0.1, LIGHT, bytes(8000)), 40.0, keep=ROUNDS_KEPT)
    assert [one.snapshot.seq for one in store.latest] == [3, 4]
