"""Addresses are hints, kept in a file that may be anything."""

from pathlib import Path

import pytest

from decentral.core.ids import PeerId
from decentral.peers.membership.address_book import ADDRESSES_KEPT, AddressBook

A, B = PeerId("A"), PeerId("B")


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    AddressBook.load(tmp_path / "peers.json").learn(A, ("/ip4/127.0.0.1/tcp/1",))
    assert AddressBook.load(tmp_path / "peers.json").known == {A: ("/ip4/127.0.0.1/tcp/1",)}


def test_a_new_address_replaces_the_old_one_and_comes_last(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json")
    for peer, address in ((A, "1"), (B, "2"), (A, "3")):
        book.learn(peer, (address,))
    assert list(AddressBook.load(book.path).known.items()) == [(B, ("2",)), (A, ("3",))]


def test_addresses_of_other_peers_are_none_of_its(tmp_path: Path) -> None:
    """One record named sixteen daemons, each of which had a voice in a restarted peer's clock."""
    book, own = AddressBook(tmp_path / "peers.json"), "/ip4/1.2.3.4/tcp/1/p2p/relay/p2p-circuit/p2p/A"
    book.learn(A, ("/ip4/1.2.3.4/tcp/1/p2p/B", own, "/ip4/1.2.3.4/tcp/2/p2p/AB"))
    assert book.known == {A: (own,)}
    book.path.write_text('{"A": ["/ip4/1.2.3.4/tcp/1/p2p/B"]}')
    assert AddressBook.load(book.path).known == {A: ()}


def test_it_keeps_the_latest(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json")
    for number in range(ADDRESSES_KEPT + 5):
        book.learn(PeerId(str(number)), ("address",))
    assert list(book.known) == [str(number) for number in range(5, ADDRESSES_KEPT + 5)]


def test_a_book_that_the_disk_refuses_leaves_no_temporary_file_and_is_written_with_the_next_address(
    tmp_path: Path,
) -> None:
    book = AddressBook(tmp_path / "peers.json")
    book.path.mkdir()
    book.learn(A, ("1",))
    assert list(tmp_path.iterdir()) == [book.path]
    book.path.rmdir()
    book.learn(A, ("1",))
    assert AddressBook.load(book.path).known == {A: ("1",)}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b'{"A": 1}', b"\xff\xfe", b"null"])
def test_a_damaged_book_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "peers.json").write_bytes(content)
    assert AddressBook.load(tmp_path / "peers.json").known == {}


def test_no_book_is_an_empty_one(tmp_path: Path) -> None:
    assert AddressBook.load(tmp_path / "none.json").known == {}
