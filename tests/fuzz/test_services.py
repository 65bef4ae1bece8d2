"""Some hundred calls and requests of each kind at the services that benchmarks/fuzz_services.py fuzzes by the million.

Nothing has a network here: the DHT's node gets bytes, and so do the page's connections; only metrics have sockets.
"""

import asyncio
import logging
import socket
import threading
from wsgiref.types import StartResponse

import pytest
import torch

from decentral.core import rng
from decentral.core.config import ModelConfig
from decentral.data.text_codec import ByteCodec
from decentral.engine.step import Device
from decentral.model import decoder
from decentral.serving import endpoint
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.served_model import ServedModel
from decentral.view.metrics_server import MetricsServer
from tests.fuzz.fuzzed_dht import KINDS, FuzzedDht, Kind
from tests.fuzz.http_requests import MODEL, Clients, Target
from tests.patient_time import LIMIT_S
from tests.view.page.played_page import Page, Wire

CALLS, VISITS, SCRAPES = 400, 60, 100
LEAST_ACCEPTED = 0.1
TURNS = 50  # of the event loop, for what is no whole request: its application may wait for the rest


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_of_the_dht_breaks_a_node(kind: Kind) -> None:
    async def story() -> None:
        fuzzed = await FuzzedDht(kind, 7).begin()
        try:
            for _ in range(CALLS):
                await fuzzed.step()
            fuzzed.check()
        finally:
            await fuzzed.leave()
        figures = fuzzed.figures
        for call in ("ping", "store", "find"):
            assert figures.accepted[call] > LEAST_ACCEPTED * figures.said[call] > 0
        assert fuzzed.stored()

    asyncio.run(story())


@pytest.mark.parametrize("target", ["page", "model"])
def test_no_request_breaks_the_page_or_the_model(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    left = list[object]()

    async def story() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
        served = ServedModel(MODEL, Device(torch.device("cpu"), torch.float32))
        config = ModelConfig(depth=1, width=32, heads=2, context=64)
        served.take(LoadedModel(config, decoder.build(config, 0), ByteCodec(), "a fuzzed model"))
        page, clients = Page(endpoint.api(served)), Clients(rng.stream(7, "visits", target), target)
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        return sum([await visit(page, clients) for _ in range(VISITS)])

    assert asyncio.run(story()) > LEAST_ACCEPTED * VISITS
    assert left == []
    assert caplog.messages == []


async def visit(page: Page, clients: Clients) -> int:
    """Plays one visit, and returns how many of its requests were accepted. Nothing of it is left."""
    said = clients.visit()
    wire = page.connect(reads=said.ending != "unread")
    wire.tells_later = True
    for piece in said.pieces:
        page.send(wire, piece)
        await asyncio.sleep(0)
    if said.whole:
        await page.until(lambda: answers(wire) == said.requests)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    wire.abort()
    await page.until(lambda: not page.state.tasks and not page.state.connections)
    return wire.sent.count(b"HTTP/1.1 200 ")


def answers(wire: Wire) -> int:
    return wire.sent.count(b"HTTP/1.1 ")


def test_no_request_breaks_the_metrics_server(capfd: pytest.CaptureFixture[str]) -> None:
    def metrics(_: object, start: StartResponse) -> list[bytes]:
        start("200 OK", [])
        return [b"metrics"]

    server = MetricsServer(("127.0.0.1", 0), metrics)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    clients, accepted = Clients(rng.stream(7, "visits", "metrics"), "metrics"), 0
    try:
        for _ in range(SCRAPES):
            accepted += b" 200 " in scraped(server, b"".join(clients.visit().pieces))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert accepted > LEAST_ACCEPTED * SCRAPES
    assert capfd.readouterr() == ("", "")


def scraped(server: MetricsServer, data: bytes) -> bytes:
    with socket.create_connection((server.server_name, server.server_port), LIMIT_S) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            return client.recv(1000)
        except OSError:  # the server has ended the connection already
            return b""
