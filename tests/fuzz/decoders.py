"""Every function that reads bytes which others wrote, or which a disk may have spoilt: one table, DECODERS.

Whatever the bytes are, a decoder returns, or says what is wrong by the errors that it promises: ProtocolError for bytes
of others, UserError for the user's own files. Anything else is a crash. tests/fuzz/test_corpus.py gives each a corpus,
and finds decoders that are missing here; tests/fuzz/guided.py looks for new bytes by coverage (make fuzz).
"""

import asyncio
import dataclasses
import logging
import struct
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from decentral.comm.codecs import blockwise
from decentral.comm.gossip import update_rules
from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.comm.gossip.snapshots import TokenClaims
from decentral.comm.net import libp2p, libp2p_directory, libp2p_services
from decentral.comm.pipeline import activations
from decentral.comm.rounds import contributions
from decentral.comm.wire import blobs, codec, identity, messages
from decentral.comm.wire.messages import RoundMember
from decentral.commands.checks import running_peer
from decentral.core import choices, config, jobs, own_yaml, received, strict_json
from decentral.core.errors import ProtocolError, UserError
from decentral.core.fragments import Fragment, Layout, Section, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from decentral.core.journal import file as journal
from decentral.core.plain_text import plain_text
from decentral.engine import checkpoint, gossip_jobs, micro_batch_numbers
from decentral.engine.step import Device
from decentral.peers.joining.fetch import Incoming
from decentral.peers.membership import records
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.startup.state import StateFolder
from decentral.scheduler.placement import evaluate, plans
from decentral.scheduler.topology import topology
from decentral.serving import endpoint
from decentral.serving.served_model import ServedModel
from decentral.sim import faults
from decentral.store import manifest
from decentral.view.page.follow import SwarmTime
from decentral.view.page.source_lines import PAGE_LINES
from decentral.view.page.sources import JournalFolder
from decentral.view.page.swarm_view import SwarmView
from tests.fuzz import private
from tests.fuzz.files import folder, written
from tests.view.page.played_page import Page

RUN = "fuzzed-000000"
NOW = 1.7e9
KEY = f"{RUN}/peers"
CUTS = (Fragment(0, 0, 1, 300), Fragment(1, 1, 3, 300))
MEMBERS = (RoundMember("A", 0, 3), RoundMember("B", 0, 3))
ALGORITHMS = tuple(choices.ALGORITHMS)
TOOLS = update_rules.RuleTools(blockwise, TorchKernels(blockwise))
CODECS = tuple(blockwise.CODECS)
STATE = (Section("theta", "int8", 300, blockwise.size("int8", 300)),)
SMALL = config.Config(model=config.ModelConfig(depth=1, width=32, context=16), routes=config.RoutesConfig(wire="auto"))
FORMAT = activations.ActivationFormat(SMALL, blockwise, (32, 32, 32, 32))


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """`run` reads any bytes. `covers`: the product's functions that it reaches, as module.function."""

    run: Callable[[bytes], object]
    covers: tuple[str, ...]
    most_bytes: int = 4096  # of the inputs that a guided search tries


def refused(run: Callable[[bytes], object], data: bytes) -> bool:
    """Whether the decoder refuses the bytes. Raises what is a crash."""
    try:
        run(data)
    except (ProtocolError, UserError):
        return True
    return False


# Messages, on the wire


def header(data: bytes) -> None:
    """A message that is accepted can be sent on, and a report or a sum is judged."""
    message, size = codec.decode(data)
    assert codec.decode(codec.encode(message, size)) == (message, size)
    match message:
        case messages.RoundReport():
            contributions.check_report(message, MEMBERS, PeerId("A"), CUTS)
            contributions.count_contributions(MEMBERS, {PeerId("A"): message}, PeerId("B"), CUTS)
        case messages.Snapshot():
            layout = (Section("gradient", "fp32", 300, 1200),)
            contributions.check_sum(message, 1200, 64, messages.Snapshot(RUN, 0, 7, 0, 0.0, layout, b""))
        case messages.Welcome():
            received.received(message.config)


class Bytes:
    """A stream that ends."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def readexactly(self, n: int) -> bytes:
        if n > len(self.data):
            raise EOFError
        part, self.data = self.data[:n], self.data[n:]
        return part


def stream(data: bytes) -> None:
    """A whole question, with its chunks."""
    reading: Coroutine[Any, Any, Any] = blobs.read(Bytes(data), lambda message: 1 << 20)
    try:
        reading.send(None)
    except (StopIteration, EOFError):
        return
    raise AssertionError("the stream waits for nothing")


# Records


def seal(data: bytes) -> None:
    """As whoever's record it claims to be."""
    _, _, public, _ = identity._parts(data, identity.MAX_PEER_RECORD_BYTES)
    identity.open_sealed(KEY, identity.peer_of(public), data, NOW)


def dht_record(data: bytes) -> None:
    """What our node of the DHT is asked to store: a byte for the length of the subkey, the subkey, the value."""
    size = data[0] if data else 0
    record = DHTRecord(DHT_KEY, data[1 : 1 + size], data[1 + size :], NOW + 60)
    assert libp2p_directory.SignedRecords([KEY], lambda: NOW).validate(record) in (True, False)


DHT_KEY: bytes = DHTID.generate(source=KEY).to_bytes()


def record(data: bytes) -> None:
    """A record that is accepted can be told again, and shown."""
    found = records.unpack(data)
    records.require_valid(found)
    assert plain_text(found.profile.device) == found.profile.device


def plan(data: bytes) -> None:
    found = evaluate.unpack(data)
    plans.is_sound(found.spans, 4)
    assert evaluate.unpack(evaluate.pack(found)).digest() == found.digest()


# Configs and addresses


def received_config(data: bytes) -> None:
    """A config that is accepted is one when it is told on."""
    settings = received.received(data.decode(errors="surrogateescape")).built_in()
    received.received(settings.canonical())


def own_config(data: bytes) -> None:
    config.validated(own_yaml.mapping(data.decode(errors="replace"), "FILE"))


def yaml_value(data: bytes) -> None:
    try:
        own_yaml.value(data.decode(errors="replace"))
    except ValueError as error:
        raise UserError(str(error)) from None


def address(data: bytes) -> None:
    libp2p.Libp2p.parse_address(data.decode(errors="surrogateescape"))


def libp2p_answer(data: bytes) -> None:
    """An answer of another peer's daemon, to one of two questions."""
    read = libp2p_services.dialled if _choice(data, 2) else libp2p_services.identified
    read(data[1:])


def fault(data: bytes) -> None:
    faults.parse(data.decode(errors="replace"))


# Numbers: the first bytes say which codec and how many


def section(data: bytes) -> None:
    """Machine code and formula agree on what they take and on what it says, also if it becomes q4 first."""
    choice, elements = _choice(data, len(CODECS)), int.from_bytes(data[1:3], "big")
    name, blob = CODECS[choice], data[3:]
    by_formula = refused(lambda data: blockwise.decode_by_formula(name, data, elements), blob)
    assert refused(lambda data: blockwise.decode(name, data, elements), blob) == by_formula
    if name in blockwise.SHORTER_CODECS:
        assert refused(lambda data: _decode_through_q4(name, data, elements), blob) == by_formula
    values = blockwise.decode(name, memoryview(bytearray(blob)), elements)
    assert torch.isfinite(values).all()
    assert torch.equal(values, blockwise.decode_by_formula(name, blob, elements))
    if name in blockwise.SHORTER_CODECS:
        assert torch.equal(values, _decode_through_q4(name, blob, elements))


def _decode_through_q4(name: str, blob: bytes, elements: int) -> torch.Tensor:
    return blockwise.decode("q4", blockwise.widened(name, blob, elements), elements)


def contribution(data: bytes) -> None:
    """A partner's window, whole: its sections are those of the fragment, whatever its bytes are."""
    rule, layout = _rule(ALGORITHMS[_choice(data, len(ALGORITHMS))])
    one = Contribution(PeerId("B"), 64, layout, data[1:])
    gossip_jobs.require_layout(one, rule.sections, layout)
    for vector in rule.partner_window(one).vectors.values():
        assert torch.isfinite(vector).all()


def donated_state(data: bytes) -> None:
    found = gossip_jobs.unpacked(blockwise, [(0, STATE, data)], {0: STATE})
    assert found[0]["theta"].numel() == 300


def pieces(data: bytes) -> None:
    """Pieces of a state, each a message and as many bytes as it says, until it is complete or refused."""
    incoming = Incoming(Fragment(0, 0, 1, 300), STATE)
    while data:
        size, data = int.from_bytes(data[:2], "big"), data[2:]
        head, data = data[:size], data[size:]
        message, blob_bytes = codec.decode(head)
        if isinstance(message, messages.StateChunk):
            incoming.take(PeerId("donor"), message, data[:blob_bytes])
            assert incoming.here <= sum(one.size for one in STATE)
        data = data[blob_bytes:]
    if incoming.complete():
        assert len(incoming.hand_over()) == incoming.total


def activation(data: bytes) -> None:
    layout = _fitting(FORMAT.forms(1, 1).entering, data)
    FORMAT.unpack(jobs.Forward(1, 1, 2, 1, layout, data))


def gradient(data: bytes) -> None:
    layout = _fitting(FORMAT.forms(1, 1).gradients, data)
    FORMAT.decode_gradient(layout, data, torch.Size((1, 16, 32)))


def _fitting(forms: Sequence[Layout], data: bytes) -> Layout:
    """The form that has as many bytes; the first one for a size that none has."""
    return next((one for one in forms if layout_bytes(one) == len(data)), forms[0])


def token_claim(data: bytes) -> None:
    """Claims one after another, of any speeds at any times: a budget is never negative."""
    claims = TokenClaims()
    for tokens, speed, now in struct.iter_unpack(">Qdd", data[: len(data) // 24 * 24]):
        if tokens < 1 << 62 and 0 <= speed < 1e18 and 0 <= now < 1e11:
            assert 0 <= claims.covered(PeerId("B"), tokens, speed, now) <= tokens


# HTTP


def http(data: bytes) -> None:
    """What a caller sends to the page and to /v1 before it hangs up: nothing fails, and nothing goes on without it."""
    page, runner, failures = _page()

    async def call() -> None:
        wire = page.connect()
        page.send(wire, data)
        for _ in range(20):
            await asyncio.sleep(0)
        wire.abort()
        await asyncio.gather(*page.state.tasks)

    runner.run(call())
    page.timers.pass_(0.0)
    assert not page.updates.browsers
    assert not page.state.connections
    assert failures == []


@cache
def _page() -> tuple[Page, asyncio.Runner, list[str]]:
    """The page, what runs it, and what it has logged as its own failures."""
    failures, failing = list[str](), logging.Handler(logging.ERROR)
    failing.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    page = Page(endpoint.api(ServedModel("m", Device(torch.device("cpu"), torch.float32))))
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addHandler(failing)
    return page, asyncio.Runner(), failures


# Files that a disk may have spoilt


def journal_file(data: bytes) -> None:
    path = written("journal.jsonl", data)
    assert all("event" in entry for entry in journal.read(path))
    assert [*journal.recent(path, len(data))] == [*journal.read(path)]
    list(running_peer.checks(path.parent, NOW))
    shown(path)
    assert list(journal.Tail(path).new()) == [*journal.read(path)][: data.count(b"\n")]


def shown(path: Path) -> None:
    """A page takes any line, and has something to show."""
    view, time, folder = SwarmView(), SwarmTime(lambda: NOW), JournalFolder(path.parent)
    view.facts |= folder.facts()
    also = (("A", found) for line in journal.read(path) if (found := PAGE_LINES.parse(line)) is not None)
    for peer, line in [*folder.lines(), *also]:
        time.saw(line, live=True)
        view.take(peer, line)
    view.tick(time.now())
    strict_json.dumps([view.snapshot(), view.changes()])


def checkpoint_file(data: bytes) -> None:
    written(checkpoint.FILE, data)
    refused(lambda _: checkpoint.span(folder()), data)
    checkpoint.read(folder())


def retained_file(data: bytes) -> None:
    written("kept-0.safetensors", data)
    store = checkpoint.RetainedStateStore(folder(), RUN)
    store.steps([0])
    store.read(0)


def position_file(data: bytes) -> None:
    written("position.json", data)
    assert micro_batch_numbers.MicroBatchNumbers.of(folder()).reserved >= 0


def run_file(data: bytes) -> None:
    written("run.json", data)
    JournalFolder(written("journal.jsonl", b"").parent).facts()
    StateFolder(folder()).read_run()


def listen_file(data: bytes) -> None:
    written("listen.json", data)
    assert all(isinstance(one, str) for one in StateFolder(folder()).listen([]))


def profile_file(data: bytes) -> None:
    written("profile.json", data)
    StateFolder(folder()).read_profile("key")


def peers_file(data: bytes) -> None:
    AddressBook.load(written("peers.json", data))


def identity_file(data: bytes) -> None:
    identity.Identity.load_or_create(written("identity.key", data or b"\0"))


def upload_manifest(data: bytes) -> None:
    """A manifest that is accepted is one when it is sent on, and its files have names that leave no folder."""
    found = manifest.parsed(data, "manifest.json")
    assert manifest.parsed(found.packed(), "manifest.json") == found
    assert not [part for part in found.parts if {"/", ".."} & {part.name, part.of, part.name[:2]}]


def topology_file(data: bytes) -> None:
    topology.load(written("topology.yaml", data))


def trace_file(data: bytes) -> None:
    faults.trace(written("trace.csv", data))


def _choice(data: bytes, count: int) -> int:
    return (data[0] if data else 0) % count


@cache
def _rule(name: str) -> tuple[update_rules.UpdateRule, Layout]:
    gossip = config.GossipConfig.model_validate({"algorithm": name})
    rule = update_rules.rule(gossip, torch.zeros(300), PeerId("A"), TOOLS)
    return rule, (*update_rules.layout_of(rule.sections, 300, blockwise), *rule.on_request)


DECODERS: dict[str, Decoder] = {
    "header": Decoder(
        header,
        (
            "comm.wire.codec.decode",
            "comm.wire.codec._header",
            "comm.rounds.contributions.check_report",
            "comm.rounds.contributions.check_sum",
        ),
    ),
    "stream": Decoder(stream, ("comm.wire.blobs.read_rest", "comm.wire.blobs.read_length")),
    "seal": Decoder(
        seal, ("comm.wire.identity.open_sealed", "comm.wire.identity._parts", "comm.wire.identity._verify")
    ),
    "dht_record": Decoder(dht_record, ("comm.net.libp2p_directory.validate", "comm.net.dht_values.plain")),
    "proof": Decoder(
        private.proof,
        (
            "comm.wire.private_swarm.verify",
            "comm.wire.private_swarm.check",
            "comm.wire.invitations.read_proof",
            "comm.wire.invitations.invitation_of",
            "comm.wire.invitations.require_founder",
            "comm.wire.invitations._parts",
            "comm.wire.invitations._verify",
        ),
        1200,
    ),
    "membership": Decoder(private.membership, ("comm.wire.private_swarm.heard",)),
    "revocations": Decoder(private.revocations, ("comm.wire.invitations.parse",)),
    "private_record": Decoder(
        private.private_record, ("comm.wire.private_swarm._decrypted", "comm.wire.private_swarm.open")
    ),
    "record": Decoder(record, ("peers.membership.records.unpack", "peers.membership.records.checked")),
    "plan": Decoder(plan, ("scheduler.placement.evaluate.unpack",)),
    "received_config": Decoder(received_config, ("core.received.received",)),
    "own_config": Decoder(own_config, ("core.own_yaml.tree", "core.config.validated")),
    "yaml_value": Decoder(yaml_value, ("core.own_yaml.value",)),
    "address": Decoder(address, ("comm.net.libp2p.parse_address",)),
    "libp2p_answer": Decoder(
        libp2p_answer, ("comm.net.libp2p_services._unpacked", "comm.net.libp2p_services.address_text"), 1024
    ),
    "fault": Decoder(fault, ("sim.faults.parse", "sim.faults._one")),
    "section": Decoder(
        section,
        (
            "comm.codecs.blockwise.decode",
            "comm.codecs.blockwise.as_bytes",
            "comm.codecs.blockwise.refuse",
            "comm.codecs.blockwise.unpack",
        ),
    ),
    "contribution": Decoder(
        contribution,
        (
            "engine.gossip_jobs.require_layout",
            "comm.gossip.update_rules.partner_window",
            "comm.rounds.synchronous_rule.check",
        ),
    ),
    "donated_state": Decoder(donated_state, ("engine.gossip_jobs.unpacked", "comm.codecs.sections.unpack")),
    "pieces": Decoder(
        pieces, ("peers.joining.fetch.take", "peers.joining.cross_check.largest", "peers.joining.cross_check._numbers")
    ),
    "activation": Decoder(activation, ("comm.pipeline.activations.unpack", "comm.pipeline.activations._decode")),
    "gradient": Decoder(gradient, ("comm.pipeline.activations.decode_gradient",)),
    "http": Decoder(
        http,
        (
            "view.page.connections.buffer_updated",
            "view.page.connections.data_received",
            "view.callers.is_ours",
            "serving.openai_requests.parsed",
        ),
    ),
    "token_claim": Decoder(token_claim, ("comm.gossip.snapshots.covered",)),
    "journal_file": Decoder(
        journal_file,
        (
            "core.journal.file.read",
            "core.journal.file.recent",
            "core.journal.file.first",
            "core.journal.file._entry",
            "core.strict_json.loads",
            "view.page.sources.lines",
        ),
    ),
    "checkpoint_file": Decoder(checkpoint_file, ("engine.checkpoint.read", "engine.checkpoint._read"), 1 << 14),
    "retained_file": Decoder(retained_file, ("engine.checkpoint._step_and_layout", "engine.checkpoint.read")),
    "position_file": Decoder(position_file, ("engine.micro_batch_numbers.of",), 64),
    "run_file": Decoder(
        run_file, ("peers.startup.state.read_run", "peers.startup.state._read", "view.page.sources.facts")
    ),
    "listen_file": Decoder(listen_file, ("peers.startup.state.listen",), 256),
    "profile_file": Decoder(profile_file, ("peers.startup.state.read_profile",), 512),
    "peers_file": Decoder(peers_file, ("peers.membership.address_book.load",)),
    "identity_file": Decoder(identity_file, ("comm.wire.identity.load_or_create", "comm.wire.identity._strip")),
    "invitation_file": Decoder(
        private.invitation_file,
        (
            "peers.startup.invitation_files._read",
            "peers.startup.invitation_files.read_holding",
            "comm.wire.invitations.require_secret",
        ),
    ),
    "founder_file": Decoder(
        private.founder_file, ("peers.startup.invitation_files._read", "peers.startup.invitation_files._parsed")
    ),
    "upload_manifest": Decoder(upload_manifest, ("store.manifest.parsed",)),
    "topology_file": Decoder(
        topology_file,
        (
            "scheduler.topology.topology.load",
            "scheduler.topology.topology_file.read",
            "scheduler.topology.topology_file.validated",
            "scheduler.topology.topology._matrices",
            "scheduler.topology.topology._by_region",
            "scheduler.topology.topology_file.require",
            "scheduler.topology.topology_file.find",
        ),
    ),
    "trace_file": Decoder(trace_file, ("sim.faults.trace",)),
}
