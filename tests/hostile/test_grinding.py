"""A hostile peer grinds key pairs until their nodes are next to a key of the DHT."""

from collections.abc import Callable
from itertools import count

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID

from decentral.comm.net.dht_calls import node_id
from tests.hostile.grinding import SEED_BYTES, GroundName, grind

KEYS = [DHTID.generate(source="a"), DHTID.generate(source="b")]


def counted() -> Callable[[], bytes]:
    numbers = count()
    return lambda: next(numbers).to_bytes(SEED_BYTES, "big")


def test_the_names_of_a_key_are_the_nearest_of_all_that_were_made() -> None:
    made = [GroundName.of(number.to_bytes(SEED_BYTES, "big")) for number in range(60)]
    for key, kept in zip(KEYS, grind(KEYS, 5, 60, counted()), strict=True):
        assert kept == sorted(made, key=lambda name: key.xor_distance(node_id(name.peer)))[:5]


def test_more_tries_bring_names_that_are_nearer() -> None:
    few, many = (grind(KEYS[:1], 1, tries, counted())[0][0] for tries in (1, 60))
    assert KEYS[0].xor_distance(node_id(many.peer)) < KEYS[0].xor_distance(node_id(few.peer))


def test_a_peer_id_is_that_of_libp2ps_examples() -> None:
    # github.com/libp2p/specs, peer-ids/peer-ids.md: an Ed25519 key's id begins with 12D3KooW, since it is the key
    name = GroundName.of(bytes(SEED_BYTES))
    public = Ed25519PrivateKey.from_private_bytes(bytes(SEED_BYTES)).public_key().public_bytes_raw()
    assert name.peer.to_base58().startswith("12D3KooW")
    assert name.peer.to_bytes().endswith(public)
    assert name.key_file().endswith(bytes(SEED_BYTES) + public)
