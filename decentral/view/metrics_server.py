"""Serves a peer's metrics for Prometheus: `python -m decentral.peer --metrics [HOST:]PORT`. Needs the extra `metrics`.

Nothing runs between two scrapes. A scrape reads the node in the event loop's thread, so that all its figures are of one
moment. One thread answers one scraper at a time. A connection that says nothing for SCRAPE_S is closed, and any other
one after WHOLE_SCRAPE_S, so that nobody keeps the next scraper out.
"""

import asyncio
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decentral.core.errors import UserError
from decentral.core.units import Seconds
from decentral.peers.runtime.host import Host
from decentral.view.metrics import METRICS, PeerMetric

SCRAPE_S = 5.0  # for each read of a connection, and for the event loop to answer
WHOLE_SCRAPE_S = 15.0  # for a connection, however slowly it asks and reads


def bound(address: tuple[str, int]) -> "MetricsServer":
    """Return a server that has the address, and answers nobody yet. Raises UserError if the address cannot be had."""
    try:
        return MetricsServer(address, None)
    except OSError as error:
        text = f"--metrics: {address[0]}:{address[1]} cannot be used ({error.strerror}); choose another port"
        raise UserError(text) from None


@asynccontextmanager
async def metrics_served(server: "MetricsServer", host: Host) -> AsyncIterator[str]:
    """Serve the metrics of this host until the block ends, and give their URL."""
    registry = CollectorRegistry()
    registry.register(PeerCollector(host, asyncio.get_running_loop()))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.shutdown)  # a scrape that is under way may still need the event loop
        server.server_close()


class PeerCollector(Collector):
    """Reads all METRICS at a scrape, on behalf of the thread that serves them."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host, self._loop = host, loop

    def describe(self) -> list[Metric]:
        """Nothing is read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Raises TimeoutError where the event loop does not come to it in SCRAPE_S."""
        yield from asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_S)

    async def _read(self) -> list[Metric]:
        now = self._host.now()
        return [_family(metric, self._host, now) for metric in METRICS]


def _family(metric: PeerMetric, host: Host, now: Seconds) -> Metric:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.values(host, now).items():
        family.add_metric(labels, value)
    return family


class MetricsServer(WSGIServer):
    """Answers one connection after the other. `url` is where."""

    def __init__(self, address: tuple[str, int], app: Any) -> None:
        self.address_family = socket.getaddrinfo(address[0], address[1], type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Scrape)
        self.set_app(app)

    @property
    def url(self) -> str:
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def server_bind(self) -> None:
        """Binds without asking DNS for the machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, *_: object) -> None:
        """A scraper that hangs up is no trouble of this peer's."""


class _Scrape(WSGIRequestHandler):
    timeout = SCRAPE_S

    def handle(self) -> None:
        """Answers one question, in time."""
        end = threading.Timer(WHOLE_SCRAPE_S, self._end)
        end.daemon = True
        end.start()
        try:
            super().handle()
        finally:
            end.cancel()

    def _end(self) -> None:
        with suppress(OSError):  # it has ended by itself
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """The user's terminal shows training, not scrapes."""
