"""Set the limits of the page's HTTP server on connections: their number, and the time that a caller may take.

Start reading at `settings`. uvicorn has limits for the size of a request's header and for idle connections.
`BoundedConnection` adds the others. A limit on time ends the connection, however many bytes still wait to be sent.
"""

import asyncio
import resource
import socket
from contextlib import suppress

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from decentral.core.ip_networks import CALLER, network_of
from decentral.core.units import KiB
from decentral.view.callers import has_room

MOST_CONNECTIONS = 128  # at most this many connections are open, half of them from one network
FILES_PER_CONNECTION = 4  # a connection may open a socket, a file that it reads, and two for journals and models
ACCEPTED_AT_ONCE = 32  # the system may accept this many connections before the first of them is counted
HEADER_S = 10.0  # a connection without a complete request header is closed after this time
UNREAD_S = 30.0  # a caller must read each part of an answer within this time; a state of 2 MB then needs 0.5 Mbit/s
PARSED_BYTES = 4 * KiB  # after parsing this many bytes (at most 2 us each), other connections get a turn
SENDING_BYTES = 64 * KiB  # size of the system's send buffer; with a larger one, an unread stream is noticed late


def settings(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of a server of this application, with all limits on connections."""
    return uvicorn.Config(
        app, http=BoundedConnection, ws="none", lifespan="off", proxy_headers=False, access_log=False,
        log_level="error",  # at the level "warning", any caller could fill the log
        limit_concurrency=most_connections(), backlog=ACCEPTED_AT_ONCE, timeout_graceful_shutdown=1,
    )  # fmt: skip


def most_connections() -> int:
    """Return the largest number of open connections that the process's limit of open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, files // FILES_PER_CONNECTION)


class BoundedConnection(H11Protocol, asyncio.BufferedProtocol):
    """One connection of a caller, which ends if the caller exceeds a limit of this module."""

    _header: asyncio.TimerHandle | None = None  # closes the connection if no request header arrives
    _write: asyncio.TimerHandle | None = None  # closes the connection if the caller does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or end the connection if its network has too many."""
        super().connection_made(transport)
        self._read = bytearray(PARSED_BYTES)
        self.network = network_of(self.client[0] if self.client else "", CALLER)
        networks = [one.network for one in self.connections if isinstance(one, BoundedConnection)]
        if not has_room(self.network, networks, self.limit_concurrency or MOST_CONNECTIONS):
            self.connections.discard(self)
            transport.abort()
            return
        self._header = self.loop.call_later(HEADER_S, transport.abort)
        transport.set_write_buffer_limits(0)  # `pause_writing` is called as soon as bytes wait
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENDING_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a connection that has ended."""
        _stop(self._header)
        _stop(self._write)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer for the next bytes of the caller."""
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the first `nbytes` bytes of the buffer."""
        self.data_received(bytes(self._read[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the caller, and end the connection if they are not HTTP while an answer is being sent."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:
            self.transport.abort()
        if self._answering():
            _stop(self._header)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with status 400, or end the connection if a request still has to be answered.

        The application does not know of the error and will still answer that request, but one request must not get two
        answers.
        """
        if self._answering():
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, unless it has arrived already."""
        super().on_response_complete()
        if not self._answering() and not self.transport.is_closing():
            self._header = self.loop.call_later(HEADER_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Begin to wait for the caller to read."""
        super().pause_writing()
        self._write = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue to send, as the caller has read everything."""
        super().resume_writing()
        _stop(self._write)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
