"""Identities and the records that they sign."""

import stat
from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.wire import identity
from decentral.comm.wire.identity import Identity, open_sealed, peer_of
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId

NOW = 1_700_000_000.0
KEY = "gpt-3fa2c1/peers"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "identity.key"
    Identity.load_or_create(path)
    return path


@pytest.fixture(scope="module")
def ours(file: Path) -> Identity:
    return Identity.load_or_create(file)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load_or_create(tmp_path_factory.mktemp("identity") / "identity.key")


@pytest.fixture(scope="module")
def record(ours: Identity) -> bytes:
    return ours.seal(KEY, b"profile", NOW + 60)


def refusal(peer: PeerId, record: bytes, key: str = KEY, now: float = NOW) -> str:
    with pytest.raises(ProtocolError) as caught:
        open_sealed(key, peer, record, now)
    return caught.value.reason


def test_a_sealed_record_opens_to_its_body_and_expiry(ours: Identity, record: bytes) -> None:
    assert open_sealed(KEY, ours.peer, record, NOW) == (b"profile", NOW + 60)


def test_a_record_that_was_valid_before_is_refused_once_it_has_expired_or_differs(
    ours: Identity, other: Identity, record: bytes
) -> None:
    open_sealed(KEY, ours.peer, record, NOW)  # its signature is remembered
    assert refusal(ours.peer, record, now=NOW + 61) == "expired"
    assert refusal(other.peer, record) == "identity"
    body, expires, public, signature = msgpack.unpackb(record)
    assert refusal(ours.peer, msgpack.packb([body + b"!", expires, public, signature])) == "signature"
    assert refusal(ours.peer, msgpack.packb([body, expires + 1, public, signature])) == "signature"


def test_a_restarted_peer_seals_as_the_same_peer(file: Path, ours: Identity, record: bytes) -> None:
    again = Identity.load_or_create(file)
    assert again.peer == ours.peer
    assert open_sealed(KEY, again.peer, again.seal(KEY, b"x", NOW + 1), NOW) == (b"x", NOW + 1)


def test_the_peer_id_is_the_one_that_libp2p_gives_the_file(file: Path, ours: Identity) -> None:
    assert ours.peer == PeerID.from_identity(file.read_bytes()).to_base58()


def test_only_its_owner_may_read_the_key(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_lies_where_a_key_is_written_first_does_not_let_others_read_it(tmp_path: Path) -> None:
    path, left, elsewhere = (tmp_path / name for name in ("identity.key", "identity.key.new", "elsewhere"))
    for lay in (lambda: left.write_bytes(b""), lambda: left.symlink_to(elsewhere)):
        elsewhere.write_bytes(b"")
        lay()
        for open_to_all in (left, elsewhere):
            open_to_all.chmod(0o666)
        Identity.load_or_create(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert elsewhere.read_bytes() == b""
        path.unlink()


def test_no_half_written_key_is_left_behind(file: Path) -> None:
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_two_peers_have_two_ids(ours: Identity, other: Identity) -> None:
    assert ours.peer != other.peer


@pytest.mark.parametrize("part", range(4), ids=["body", "expires", "public key", "signature"])
def test_a_record_with_another_part_is_refused(ours: Identity, other: Identity, part: int, record: bytes) -> None:
    parts = msgpack.unpackb(record)
    parts[part] = msgpack.unpackb(other.seal(KEY, b"another", NOW + 61))[part]
    assert refusal(ours.peer, msgpack.packb(parts)) in ("signature", "identity")


def test_a_record_of_another_peer_is_refused(other: Identity, record: bytes) -> None:
    assert refusal(other.peer, record) == "identity"


def test_another_peers_signature_under_our_name_is_refused(ours: Identity, other: Identity) -> None:
    assert refusal(ours.peer, other.seal(KEY, b"profile", NOW + 60)) == "identity"


def test_a_record_for_another_key_is_refused(ours: Identity, record: bytes) -> None:
    assert refusal(ours.peer, record, key="gpt-3fa2c1/plan") == "signature"


@pytest.mark.parametrize("now", [NOW + 60, NOW + 61, NOW - 8 * 86400], ids=["at its end", "after it", "years ahead"])
def test_a_record_that_is_not_valid_now_is_refused(ours: Identity, record: bytes, now: float) -> None:
    assert refusal(ours.peer, record, now=now) == "expired"


@pytest.mark.parametrize("expires", [float("nan"), float("inf"), -1.0])
def test_an_expiry_that_is_no_time_is_refused(ours: Identity, expires: float) -> None:
    assert refusal(ours.peer, ours.seal(KEY, b"profile", expires)) == "expired"


def test_a_record_over_its_bound_is_refused(ours: Identity) -> None:
    assert refusal(ours.peer, ours.seal(KEY, bytes(identity.MAX_RECORD_BYTES), NOW + 60)) == "oversize"


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    refusal(PeerId("QmNobody"), data)


@given(st.tuples(st.binary(max_size=99), st.floats(), st.binary(max_size=99), st.binary(max_size=99)))
def test_garbage_in_the_shape_of_a_record_is_refused(parts: tuple[bytes, float, bytes, bytes]) -> None:
    refusal(peer_of(parts[2]), msgpack.packb(parts), now=parts[1] - 1)


@given(at=st.integers(0, 10**4), change=st.integers(1, 255))
def test_a_record_with_one_byte_changed_is_refused(ours: Identity, record: bytes, at: int, change: int) -> None:
    damaged = bytearray(record)
    damaged[at % len(record)] ^= change
    refusal(ours.peer, bytes(damaged))


@given(public=st.binary(max_size=400))
def test_a_key_that_is_none_is_refused(ours: Identity, public: bytes) -> None:
    record = msgpack.packb([b"profile", NOW + 60, public, b"signature"])
    assert refusal(peer_of(public), record) in ("identity", "signature")


def test_a_key_of_another_kind_is_refused() -> None:
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert refusal(peer_of(der), msgpack.packb([b"profile", NOW + 60, der, b"signature"])) == "identity"


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "longer", "garbage inside"])
def test_a_damaged_key_file_is_a_user_error(file: Path, tmp_path: Path, damage: str) -> None:
    whole = file.read_bytes()
    path = tmp_path / "identity.key"
    path.write_bytes(
        {
            "empty": b"",
            "text": b"not a key\n",
            "cut": whole[: len(whole) // 2],
            "longer": whole + b"\x00",
            "garbage inside": whole[:40] + bytes(400) + whole[440:],
        }[damage]
    )
    with pytest.raises(UserError, match=r"identity\.key"):
        Identity.load_or_create(path)


@given(cut=st.integers(0, 10**4), tail=st.binary(max_size=8))
def test_any_damage_to_a_key_file_is_a_user_error(
    file: Path, tmp_path_factory: pytest.TempPathFactory, cut: int, tail: bytes
) -> None:
    whole = file.read_bytes()
    path = tmp_path_factory.getbasetemp() / "damaged.key"
    path.write_bytes(whole[: cut % len(whole)] + tail)
    with pytest.raises(UserError) as caught:
        Identity.load_or_create(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_key_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError):
        Identity.load_or_create(path)
    assert path.read_bytes() == b"damaged"


def test_a_folder_where_the_key_should_be_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        Identity.load_or_create(tmp_path)


def test_a_state_folder_that_is_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(UserError, match="state"):
        Identity.load_or_create(tmp_path / "state" / "identity.key")


def test_a_record_lasts_two_hours_at_most(ours: Identity) -> None:
    longest = ours.seal(KEY, b"profile", NOW + identity.MAX_LIFETIME_S - 1)
    assert open_sealed(KEY, ours.peer, longest, NOW)[0] == b"profile"
    assert refusal(ours.peer, longest, now=NOW - 2) == "expired"


def test_a_record_of_a_peer_is_smaller_than_a_plan(ours: Identity) -> None:
    body, plans = bytes(identity.MAX_PEER_RECORD_BYTES), "gpt-3fa2c1/plan"
    for key in (KEY, f"{KEY}/3"):
        assert refusal(ours.peer, ours.seal(key, body, NOW + 60), key) == "oversize"
    assert open_sealed(plans, ours.peer, ours.seal(plans, body, NOW + 60), NOW)[0] == body
    larger = bytes(identity.MAX_RECORD_BYTES)
    assert refusal(ours.peer, ours.seal(plans, larger, NOW + 60), plans) == "oversize"
