"""The first inputs of each decoder, as real peers write them; and some that are none of anybody's.

    python -m tests.fuzz.seeds     writes those that are not there yet into tests/fuzz/corpus/

A guided search (make fuzz) begins with them, and adds what reaches code that no other input does.
"""

import base64
import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.numpy import save

from decentral.comm.codecs import blockwise
from decentral.comm.wire import codec, messages
from decentral.comm.wire.blobs import CHUNK_BYTES, LENGTH_BYTES, digest
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.invitations import KEY_BYTES, Permission
from decentral.comm.wire.messages import MembershipProof, Refused
from decentral.core.config import Config
from decentral.engine.tensor_file import SUMS
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.peers.startup.invitation_files import FounderFile, write_holding
from decentral.scheduler.placement import evaluate
from decentral.scheduler.placement.evaluate import SwarmPlan
from decentral.store.manifest import UploadManifest, UploadPart
from tests.comm.wire.test_codec import EXAMPLES
from tests.fuzz import decoders, files, private
from tests.fuzz.decoders import ALGORITHMS, CODECS, DECODERS, FORMAT, KEY, NOW, RUN, STATE
from tests.store.test_manifest import CHECKPOINT

CORPUS = Path(__file__).parent / "corpus"
NOT_ANYTHING = (b"", b"\0", b"\xff" * 40, b"[" * 3000, b"{}", b"[]", b"null", b'"x"', b"\x93" * 40)
"""Also deeper than a parser's stack, which takes no more than it promises."""

RECORD = PeerRecord(
    RUN, NOW, ("/ip4/127.0.0.1/tcp/1",), Profile("cpu", 1 << 30, 1e9, 1e4), 0, 3, 5, 5, 100, kept=((1, 2),)
)
TOPOLOGY = """peers:
  - {id: a, region: x, tflops: 10, memory_gb: 8}
  - {id: b, region: y, tflops: 20, memory_gb: 16}
inside: {delay_ms: 1, bandwidth_gbps: 1}
links:
  - {between: [x, y], delay_ms: 40, bandwidth_gbps: 0.1, loss: 0.01}
"""


def seeds(name: str, folder: Path) -> Iterator[bytes]:
    """What a real peer writes for this decoder. `folder`: for the key of a peer."""
    match name:
        case "header":
            yield from (codec.encode(message, 77) for message in EXAMPLES)
        case "stream":
            for message in (messages.Ping(1), EXAMPLES[8]):
                yield _stream(message, b"ABCDEFGH")
        case "seal" | "dht_record":
            key = Identity.load_or_create(folder / "identity.key")
            sealed = key.seal(KEY, records.pack(RECORD), NOW + 60)
            yield sealed if name == "seal" else bytes([len(key.peer) + 2]) + b"\xd9." + key.peer.encode() + sealed
        case "record":
            yield records.pack(RECORD)
        case "plan":
            yield evaluate.pack(SwarmPlan(RUN, NOW, "faster", (("A", 0, 2), ("B", 1, 3)), (NOW, NOW)))
        case "received_config":
            yield Config().canonical().encode()
        case "own_config":
            yield b"model: {depth: 2, width: 64}\ntrain:\n  learning_rate: 8e-3\n"
            yield b"a: &x [1]\nb: *x\n<<: {c: 1}\n"
        case "yaml_value":
            yield from (b"8e-3", b"[1, 2]", b"2026-01-01", b"0x10", b"!!python/object:os.system {}")
        case "address":
            yield b"/ip4/203.0.113.7/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
        case "libp2p_answer":
            yield from _of_daemons()
        case "http":
            yield from _of_callers()
        case "fault":
            yield b"crash 2 at 20; slow 0 x5 at 10 for 20; cut 0-1 at 5 for 3"
        case _:
            yield from _numbers(name)
            yield from _of_private_swarms(name)
            yield from _files(name, folder)


def _of_daemons() -> Iterator[bytes]:
    """Answers of identify and AutoNAT, each behind the byte that chooses."""
    address = b"\x04\x7f\0\0\x01\x06\x0f\xa1"  # /ip4/127.0.0.1/tcp/4001
    said = b"\x1a\x05/ping\x22\x08" + address + b"\x32\x04p2pd"
    yield bytes([0, len(said)]) + said
    for response in (b"\x08\0\x1a\x08" + address, b"\x08\x64\x12\x06failed", b"\x08\xff\xff\xff\xff\x0f"):
        body = b"\x08\x01\x1a" + bytes([len(response)]) + response
        yield bytes([1, len(body)]) + body


def _of_callers() -> Iterator[bytes]:
    """Requests of browsers and programs, also several in one, half a request, and what no browser sends."""
    host = b"HTTP/1.1\r\nhost: 127.0.0.1:8420\r\n"
    paths = (b"/", b"/stream", b"/api/swarm", b"/api/peers/0", b"/static/main.js", b"/static/%00", b"/static/%2e%2e/a")
    yield from (b"GET " + path + b" " + host + b"\r\n" for path in (*paths, b"/v1/models", b"/" + b"x" * 300))
    yield (b"GET / " + host + b"\r\n") * 3 + b"GET /stream " + host
    yield b"HEAD /stream " + host + b"connection: close\r\n\r\n"
    yield b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n"
    yield b"GET / " + host + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    yield b"GET / " + host + b"a:\r\n" * 200
    chunked = host + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    yield b"POST /v1/completions " + chunked + b"1\r\n{\r\n" + b"1\r\n}\r\n" + b"0\r\n\r\n"
    yield b"POST /stream " + chunked + b"nonsense"
    for path, body in (
        (b"completions", b'{"model": "m", "prompt": [1, 2], "stream": true}'),
        (b"completions", b'{"model": "m", "prompt": ["a"], "stop": ["b"], "seed": 5}'),
        (b"chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}]}]}'),
    ):
        head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        yield b"POST /v1/" + path + b" " + host + head + body
        yield b"POST /v1/" + path + b" " + host + b"expect: 100-continue\r\n" + head + body[:9]


def _stream(message: messages.Message, blob: bytes) -> bytes:
    head = codec.encode(message, len(blob))
    return len(head).to_bytes(LENGTH_BYTES, "big") + head + digest(blob[:CHUNK_BYTES]) + blob


def _of_private_swarms(name: str) -> Iterator[bytes]:
    """What members and their founder write, and what those write whose invitation counts no longer."""
    until, other = private.NOW + 3600, private.OTHER_FOUNDER
    held = [private.holding(may, until, may) for may in Permission]
    late, foreign = private.holding("late", private.NOW - 1), private.holding("B", until, Permission.TRAIN, other)
    proofs = [one.proof(private.B) for one in (*held, private.REVOKED, late, foreign)]
    newer = private.FOUNDER.revoke(4, frozenset({held[0].invitation.id, private.holding("A").invitation.id}))
    match name:
        case "proof":
            yield from (*proofs, held[0].proof(private.A))
        case "membership":
            said: list[tuple[messages.Message, bytes]] = [(MembershipProof(one), b"") for one in proofs]
            said += [(Refused(why, "why"), newer.packed) for why in ("revoked", "expired", "uninvited", "busy")]
            for message, blob in (*said, (messages.Ping(1), b"")):
                head = codec.encode(message, len(blob))
                yield len(head).to_bytes(2, "big") + head + blob
        case "revocations":
            lists = (private.LIST, newer, private.FOUNDER.revoke(9, frozenset()), other.revoke(9, frozenset()))
            yield from (one.packed for one in lists)
        case "private_record":
            whole = private.signer(private.B).seal(private.RECORDS, records.pack(RECORD), NOW + 60)
            yield from (b"\0" + whole, b"\0" + private.revoked_record(newer.packed))
            for proof in proofs:
                yield bytes([private.SEALED]) + msgpack.packb([proof, b"record"])
            contents: tuple[Any, ...] = ([proofs[0], 1], [b"", b""], 7, {})
            yield from (bytes([private.SEALED]) + msgpack.packb(content) for content in contents)


def _numbers(name: str) -> Iterator[bytes]:
    values = torch.linspace(-1, 1, 300)
    match name:
        case "section":
            for place, codec_name in enumerate(CODECS):
                for count in (0, 1, 129):
                    yield bytes([place]) + count.to_bytes(2, "big") + blockwise.encode(codec_name, values[:count])
        case "contribution":
            for place, algorithm in enumerate(ALGORITHMS):
                _, layout = decoders._rule(algorithm)
                parts = [blockwise.encode(one.codec, values[: one.elements].abs() + 0.1) for one in layout]
                yield bytes([place]) + b"".join(parts)
        case "donated_state":
            yield blockwise.encode("int8", values)
        case "activation" | "gradient":
            forms = FORMAT.forms(1, 1)
            for section, *_ in forms.gradients if name == "gradient" else forms.entering:
                hidden = blockwise.encode(section.codec, torch.linspace(-1, 1, section.elements))
                yield hidden if name == "gradient" else hidden + bytes(32)
        case "pieces":
            blob = blockwise.encode("int8", values)
            head = codec.encode(messages.StateChunk(RUN, 0, 0, len(blob), 9, STATE), len(blob))
            yield len(head).to_bytes(2, "big") + head + blob
        case "token_claim":
            yield struct.pack(">QddQdd", 1000, 100.0, NOW, 1 << 40, 100.0, NOW + 1)


def _files(name: str, folder: Path) -> Iterator[bytes]:
    arrays = {"theta": np.arange(6, dtype=np.float32)}
    match name:
        case "journal_file":
            yield b'{"t":1.0,"event":"started"}\n{"t":2.0,"event":"step","loss":NaN}\n{"t":3.0,"ev'
            yield b'{"t":1.0,"event":"started","peer":"A"}\n{"t":2.0,"event":"step","tokens":1e99,"loss":1.5}\n'
            yield b'{"t":1.0,"event":"status","last":9,"links":[["A",1,1]]}\n{"t":9,"event":"exchange","partner":"A"}\n'
            yield b'{"t":%s,"event":"traffic","sent_bytes":%s}\n{"t":-1,"event":"plan"}\n' % (b"9" * 400, b"9" * 400)
        case "checkpoint_file":
            good = {"run": "x", "fragments": [{"first": 0, "last": 1}]}
            yield save(arrays, {"facts": json.dumps(good)})
            for facts in ("[" * 3000, "[1]", '{"sums": 1}'.replace("sums", SUMS), '{"fragments": 1}'):
                yield save(arrays, {"facts": facts})
            yield save(arrays)
        case "retained_file":
            layout = [{"name": "theta", "codec": "int8", "elements": 6, "size": 8}]
            yield save(
                {"state": np.zeros(8, np.uint8)}, {"facts": json.dumps({"run": RUN, "step": 3, "layout": layout})}
            )
        case "position_file":
            yield b"1024"
        case "run_file":
            yield json.dumps({"run": RUN, "config": Config().canonical(), "own": {"data": None}}).encode()
        case "listen_file":
            yield b'{"/ip4/0.0.0.0/tcp/0": "/ip4/0.0.0.0/tcp/4001"}'
        case "profile_file":
            yield b'{"key": "key", "measured": {"tokens_per_s": 1e4}}'
        case "peers_file":
            yield b'{"QmA": ["/ip4/127.0.0.1/tcp/1"]}'
        case "identity_file":
            Identity.load_or_create(folder / "identity.key")
            key = (folder / "identity.key").read_bytes()
            yield from (key[:300], key[:600] + bytes(len(key) - 600))  # no key that anybody could use
        case "invitation_file" | "founder_file":
            yield from _membership_files(name, folder)
        case "upload_manifest":
            yield CHECKPOINT.packed()
            yield UploadManifest("model", (UploadPart("config.json", "config.json", 2, "0" * 32),)).packed()
        case "topology_file":
            yield TOPOLOGY.encode()
            yield b"peers: [{id: a, region: x}]\ndelay_ms: [[0]]\nbandwidth_gbps: [[1]]\n"
        case "trace_file":
            yield b"time,peer,up/down\n1,0,down\n5,0,up\n"


def _membership_files(name: str, folder: Path) -> Iterator[bytes]:
    """The files themselves, and each with one part that a disk, or an editor, has spoilt."""
    if name == "invitation_file":
        path = folder / "seed.invite"
        write_holding(path, private.holding("B"))
        spoilt: tuple[tuple[str, Any], ...] = (
            ("until", 10**400),
            ("until", None),
            ("secret", "00" * KEY_BYTES),
            ("swarm_key", "00"),
            ("run", "\ud800"),
            ("id", 7),
        )
    else:
        path, one = folder / "founder.json", private.holding("B").invitation
        row = {"id": one.text(), "for": one.holder, "until": one.until, "may": one.may.value}
        FounderFile(path, private.FOUNDER, [row], 3, private.LIST.ids).save()
        notes: tuple[Any, ...] = (
            [7],
            7,
            [{}],
            [{**row, "until": 10**400}],
            [{**row, "id": "x"}],
            [{**row, "may": "all"}],
        )
        numbers = ("3", 1 << 70, -1, True)
        spoilt = (
            *(("invited", rows) for rows in notes),
            *(("number", number) for number in numbers),
            ("secret", "00"),
            ("secret", "00" * KEY_BYTES),
            ("swarm_key", ""),
            ("run", 7),
            ("revoked", ["00"]),
            ("revoked", 7),
        )
    content = json.loads(path.read_bytes())
    yield path.read_bytes()
    yield from (json.dumps({**content, key: value}).encode() for key, value in spoilt)


def corpus(name: str) -> Sequence[bytes]:
    """All inputs of this decoder that are in the repository: a line of base64 each."""
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(name: str, inputs: Sequence[bytes]) -> int:
    """Adds inputs that are not in the corpus yet; gives how many it has."""
    known = {hashlib.sha256(data).digest(): data for data in [*corpus(name), *inputs]}
    lines = [base64.b64encode(data).decode() for data in sorted(known.values(), key=lambda data: (len(data), data))]
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    for name in DECODERS:
        count = add(name, [*seeds(name, files.folder()), *NOT_ANYTHING])
        print(f"{name}: {count} inputs")


if __name__ == "__main__":
    main()
