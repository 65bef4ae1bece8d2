"""The services that benchmarks.fuzz_services fuzzes, each in a process of its own: `serve`.

A service prints one line with where it is reached, and ends when its standard input does; then it prints how long its
event loop was silent.
"""

import asyncio
import json
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fuzz.fuzzed_dht import KINDS, FuzzedDht, Kind
from tests.fuzz.http_requests import MODEL

TICK_S = 0.02
UPDATE_S = 0.5  # between two updates of the page
KEYS = ["fuzzed-000000/peers", "fuzzed-000000/plan"]
CHECK_EVERY = 1000  # calls
TIMED_TOGETHER = 10  # calls; the event loop is silent for at most as long as they take
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps "


class Watch:
    """How long the event loop of this process is silent, and what tasks leave behind.

    `wall_s`: longest time from one tick to the next. `computed_s`: the same, as far as this process computed in it.
    """

    def __init__(self) -> None:
        self.wall_s = self.computed_s = 0.0
        self.left = list[str]()

    async def stay(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.left.append(repr(context)[:500]))
        while True:
            wall, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            silent = max(0.0, time.monotonic() - wall - TICK_S)
            self.wall_s = max(self.wall_s, silent)
            self.computed_s = max(self.computed_s, min(silent, time.process_time() - computed))


def serve(name: str) -> None:
    """Serve "peer" or "page" until the standard input ends, or play a "KIND:CALLS:SEED:UNTIL" of FuzzedDht."""
    if name in ("peer", "page"):
        asyncio.run(_serve(name))
        return
    kind, calls, seed, until = name.split(":")
    played = _played(KINDS[kind == "private"], int(calls), int(seed), float(until))
    print(json.dumps(asyncio.run(played)), flush=True)


async def _played(kind: Kind, calls: int, seed: int, until: float) -> dict[str, Any]:
    fuzzed = await FuzzedDht(kind, seed).begin()
    longest_s = 0.0
    while fuzzed.calls < calls and time.monotonic() < until:
        began = time.thread_time()  # reading it takes as long as a call on some machines
        for _ in range(TIMED_TOGETHER):
            await fuzzed.step()
        longest_s = max(longest_s, time.thread_time() - began)
        if fuzzed.calls % CHECK_EVERY == 0:
            fuzzed.check()
    fuzzed.check()
    await fuzzed.leave()
    figures = fuzzed.figures
    return {
        "calls": figures.said.total(), "accepted": figures.accepted.total(), "ended": dict(figures.refused),
        "longest_s": longest_s, "answers": fuzzed.network.answers,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


async def _serve(name: str) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        watch = Watch()
        at = await stack.enter_async_context(peer(folder) if name == "peer" else page(folder))
        watching = asyncio.create_task(watch.stay())
        print(json.dumps(at), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        watching.cancel()
        said = {"silent_s": watch.computed_s, "silent_wall_s": watch.wall_s, "left": watch.left[:5]}
        print(json.dumps(said), flush=True)


@asynccontextmanager
async def peer(folder: Path) -> AsyncIterator[dict[str, Any]]:
    """A peer's DHT node behind its daemon, and the metrics of a peer that has trained."""
    from decentral.comm.net.libp2p import Libp2p
    from decentral.view.metrics_server import bound, metrics_served

    host = await asyncio.to_thread(_trained, folder)
    network = await Libp2p.start(folder / "key", ("/ip4/127.0.0.1/tcp/0",), ())
    server = bound(("127.0.0.1", 0))
    try:
        await network.directory(KEYS, [])
        async with metrics_served(server, host):
            yield {
                "address": (await network.addresses())[0],
                "keys": KEYS,
                "ports": {"metrics": server.server_port},
            }
    finally:
        await network.close()


def _trained(folder: Path) -> Any:
    """A host of tests/peers/runtime/host_swarm.py that has trained a step, and has stopped."""
    import torch

    from decentral.comm.codecs import blockwise
    from decentral.comm.wire.identity import Identity
    from decentral.core import config
    from decentral.core.ids import PeerId
    from decentral.data import corpora
    from decentral.engine.compute import ComputeSetup
    from decentral.engine.step import Device
    from tests.peers.runtime.host_swarm import Swarm

    (folder / "words.txt").write_text(WORDS * 400)

    def setup_of(peer: str, algorithm: str, **gossip: float) -> ComputeSetup:
        run = config.Config(
            model=config.ModelConfig(depth=1, width=32, context=16),
            data=config.DataConfig(kind="text", path=str(folder / "words.txt")),
            train=config.TrainConfig(micro_batch=4, compile=False),
            gossip=config.GossipConfig.model_validate({"algorithm": algorithm, "fragment_parameters": 1000, **gossip}),
        )
        (folder / "A").mkdir(exist_ok=True)
        corpus = corpora.load(run.data, run.model)
        device = Device(torch.device("cpu"), torch.float32)
        return ComputeSetup(run, PeerId(peer), corpus, blockwise, device, folder / "A")

    swarm = Swarm(setup_of, {"A": Identity.load_or_create(folder / "A.key")}, "pull")

    async def story() -> None:
        running = await swarm.start("A")
        swarm.hosts["A"].stop("enough")
        await running

    swarm.play(story())
    return swarm.hosts["A"]


@asynccontextmanager
async def page(folder: Path) -> AsyncIterator[dict[str, Any]]:
    """The page of a run with some peers, and /v1 with a small model, in one server."""
    import torch
    import uvicorn

    from decentral.core.config import ModelConfig
    from decentral.data.text_codec import ByteCodec
    from decentral.engine.step import Device
    from decentral.model import decoder
    from decentral.serving import chat_template, endpoint
    from decentral.serving.loaded_model import LoadedModel
    from decentral.serving.served_model import ServedModel
    from decentral.view.page.connections import settings
    from decentral.view.page.server import Updates, application
    from decentral.view.page.swarm_view import SwarmView

    config = ModelConfig(depth=1, width=32, heads=2, context=64)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    served = ServedModel(MODEL, Device(torch.device("cpu"), torch.float32), chat_template.of_tokenizer(str(folder)))
    served.take(LoadedModel(config, decoder.build(config, 0), ByteCodec(), "a fuzzed model"))
    updates = Updates(SwarmView())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(settings(application(updates, model_api=endpoint.api(served))))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve(sockets=[listening]))

    async def follow() -> None:
        while True:
            await asyncio.sleep(UPDATE_S)
            updates.publish()

    following = asyncio.create_task(follow())
    port = listening.getsockname()[1]
    try:
        yield {"ports": {"page": port, "model": port}}
    finally:
        following.cancel()
        server.should_exit = True
        await serving
