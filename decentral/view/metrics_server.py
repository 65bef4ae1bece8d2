"""Serve a peer's metrics to Prometheus, and its health: `python -m decentral.peer --metrics [HOST:]PORT`.

    /metrics    all metrics (also at other paths)
    /healthz    200 if the peer's event loop answers within SCRAPE_S, else 503: then restart the peer
    /readyz     200 if the peer trains and has no trouble, else 503 with the reason

It needs the extra `metrics`.

Start reading at `bound` and `metrics_served`. A scrape (one request for all metrics) reads the node in the event loop's
thread, so that all numbers are from the same moment. Each connection has a thread, but scrapes are answered one after
another. A connection is closed if it sends nothing for SCRAPE_S seconds, and in any case after WHOLE_SCRAPE_S seconds.
"""

import asyncio
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decentral.core.errors import UserError
from decentral.core.ip_networks import CALLER, network_of
from decentral.core.plain_text import printable
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase
from decentral.peers.runtime.host import Host
from decentral.view.callers import has_room, is_ours, own_names
from decentral.view.metrics import METRICS, PeerMetric

SCRAPE_S = 5.0  # a connection that sends nothing for this time is closed; reading the metrics may take as long
WHOLE_SCRAPE_S = 15.0
REASON_CHARS = 500  # a longer reason of /readyz is cut
MOST_SCRAPES = 16  # at most this many connections are open, half of them from one network
ACCEPT_RETRY_S = 1.0  # pause after a connection could not be accepted, usually for lack of a file descriptor

Request = socket.socket | tuple[bytes, socket.socket]  # socketserver's type of a connection: a socket for TCP


def bound(address: tuple[str, int]) -> "MetricsServer":
    """Return a server that listens at this (host, port). It answers no request until `metrics_served` starts it.

    Raises:
        UserError: If the address cannot be used.
    """
    try:
        return MetricsServer(address, None)
    except OSError as error:
        text = f"--metrics: {address[0]}:{address[1]} cannot be used ({error.strerror}); choose another port"
        raise UserError(text) from None


@asynccontextmanager
async def metrics_served(server: "MetricsServer", host: Host) -> AsyncIterator[str]:
    """Serve the metrics of this host until the block ends; yield their URL."""
    registry = CollectorRegistry()
    registry.register(PeerCollector(host, asyncio.get_running_loop()))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    server.set_app(_Health(host, asyncio.get_running_loop(), make_wsgi_app(registry)).answer)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.shutdown)  # in a thread: a scrape in progress still needs this event loop
        server.server_close()


class PeerCollector(Collector):
    """The collector of a host's METRICS; prometheus_client calls `collect` for each scrape, in the serving thread."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare to read the metrics of `host` in the thread of `loop`, its event loop."""
        self._host, self._loop = host, loop

    def describe(self) -> list[Metric]:
        """Return no metrics, so that prometheus_client reads nothing when this collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, which the event loop reads at the same moment.

        Raises:
            TimeoutError: If the event loop does not read the metrics within SCRAPE_S.
        """
        yield from asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_S)

    async def _read(self) -> list[Metric]:
        now = self._host.now()
        return [_family(metric, self._host, now) for metric in METRICS]


class _Health:
    """The WSGI application of the port: health of a host at /healthz and /readyz, its metrics at any other path."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop, metrics: WSGIApplication) -> None:
        self._host, self._loop, self._metrics = host, loop, metrics

    def answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "")
        if path not in ("/healthz", "/readyz"):
            return self._metrics(environ, start)
        try:
            waits = asyncio.run_coroutine_threadsafe(self._not_ready(), self._loop).result(SCRAPE_S)
            reasons = waits if path == "/readyz" else []
        except TimeoutError:
            reasons = [f"the event loop has not answered for {SCRAPE_S:g} s"]
        start("503 Service Unavailable" if reasons else "200 OK", [("content-type", "text/plain; charset=utf-8")])
        return ["".join(f"{line}\n" for line in reasons or ["ok"]).encode()]

    async def _not_ready(self) -> list[str]:
        """Return why the host is not ready, one printable line for each reason; [] if it is."""
        phase = self._host.node.phase
        waits = [] if phase is PeerPhase.TRAINING else [f"the peer is {phase}"]
        return [*waits, *(printable(trouble, REASON_CHARS) for trouble in self._host.troubles())]


def _family(metric: PeerMetric, host: Host, now: Seconds) -> Metric:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.values(host, now).items():
        family.add_metric(labels, value)
    return family


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server for a few connections at a time. It refuses requests that do not name this machine as the host."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], app: WSGIApplication | None) -> None:
        """Bind to a host and port, and answer with a WSGI application. Raises OSError if the address cannot be used."""
        self.address_family = socket.getaddrinfo(address[0], address[1], type=socket.SOCK_STREAM)[0][0]
        self._names, self._one_scrape = own_names(address[0]), threading.Lock()
        self._callers: dict[Request, str] = {}  # the client's network for each open connection
        super().__init__(address, _Scrape)
        self.set_app(app)

    def get_app(self) -> WSGIApplication:
        """Return the application, which answers only requests with a host name of this machine (status 421)."""
        return self._answer

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if not is_ours(environ.get("HTTP_HOST", ""), self._names):
            start("421 Misdirected Request", [("content-type", "text/plain")])
            return [b"the metrics are not served under this host name; give the name to --metrics"]
        app = super().get_app()
        assert app is not None, "requests are answered only after set_app"
        with self._one_scrape:
            return app(environ, start)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection. If that fails, raise OSError after a pause, since the caller tries again at once."""
        try:
            return super().get_request()
        except OSError:
            threading.Event().wait(ACCEPT_RETRY_S)
            raise

    def verify_request(self, request: Request, client_address: tuple[str, int]) -> bool:
        """Return whether the connection may stay open, and count it until `shutdown_request`."""
        caller = self._callers[request] = network_of(client_address[0], CALLER)
        return has_room(caller, list(self._callers.values()), MOST_SCRAPES)

    def shutdown_request(self, request: Request) -> None:
        """Close a connection, and no longer count it towards the limit on the caller's connections."""
        self._callers.pop(request, None)
        super().shutdown_request(request)

    @property
    def url(self) -> str:
        """URL of the metrics."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def server_bind(self) -> None:
        """Bind the socket without a DNS lookup of the machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, *_: object) -> None:
        """Ignore errors of a connection, such as a client that disconnects."""


class _Scrape(WSGIRequestHandler):
    timeout = SCRAPE_S

    def handle(self) -> None:
        """Answer one connection, and close it if it takes longer than WHOLE_SCRAPE_S seconds."""
        end = threading.Timer(WHOLE_SCRAPE_S, self._end)
        end.daemon = True
        end.start()
        try:
            super().handle()
        finally:
            end.cancel()

    def _end(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Do not print requests, because the terminal shows the progress of training."""
