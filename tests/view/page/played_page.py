"""A page whose connections a test plays without sockets: callers send bytes, and time passes when the test says so."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from decentral.view.page.connections import BoundedConnection, settings
from decentral.view.page.server import Updates, application
from decentral.view.page.swarm_view import SwarmView


@dataclass(slots=True)
class Timers:
    """The event loop of a connection, whose timers go by a clock that the test moves."""

    now: float = 0.0
    set_at: list[tuple[float, asyncio.TimerHandle]] = field(default_factory=list)

    def call_later(self, seconds: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.now + seconds, function, (), asyncio.get_running_loop())
        self.set_at.append((self.now + seconds, timer))
        return timer

    def create_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return asyncio.create_task(work)

    def pass_(self, seconds: float) -> None:
        """Let time pass, and call what is due."""
        self.now += seconds
        due = [timer for at, timer in self.set_at if at <= self.now and not timer.cancelled()]
        self.set_at = [(at, timer) for at, timer in self.set_at if at > self.now and not timer.cancelled()]
        for timer in due:
            timer._run()


class Wire(asyncio.Transport):
    """A connection's other end and its socket.

    `reads`: whether it reads what is sent. `tells_later`: whether the server hears of the end a turn of the loop later.
    """

    def __init__(self, address: str, reads: bool = True) -> None:
        super().__init__({"socket": self})
        self.address = address
        self.protocol: BoundedConnection | None = None
        self.reads, self.sent, self.closed, self.tells_later = reads, b"", False, False

    def getpeername(self) -> tuple[str, int]:
        return self.address, 5

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8420

    def setsockopt(self, *_: int) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        if not self.reads and not self.closed and self.protocol is not None:
            self.protocol.pause_writing()

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        """A connection that does not read stays open, as bytes wait to be sent."""
        if self.reads:
            self.abort()

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            if self.protocol is not None and self.tells_later:
                asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
            elif self.protocol is not None:
                self.protocol.connection_lost(None)


@dataclass(slots=True)
class Page:
    """A page whose connections the test plays."""

    model_api: ASGIApp | None = None
    updates: Updates = field(default_factory=lambda: Updates(SwarmView()))
    timers: Timers = field(default_factory=Timers)
    state: ServerState = field(default_factory=ServerState)
    settings: uvicorn.Config = field(init=False)

    def __post_init__(self) -> None:
        self.settings = settings(application(self.updates, model_api=self.model_api))

    def connect(self, address: str = "10.0.0.1", reads: bool = True) -> Wire:
        wire = Wire(address, reads)
        loop = cast("asyncio.AbstractEventLoop", self.timers)
        wire.protocol = BoundedConnection(self.settings, self.state, {}, loop)
        wire.protocol.connection_made(wire)
        return wire

    def send(self, wire: Wire, data: bytes) -> None:
        """Send as the event loop does, in pieces that fit the connection's buffer."""
        assert wire.protocol is not None
        while data and not wire.closed:
            buffer = wire.protocol.get_buffer(-1)
            piece, data = data[: len(buffer)], data[len(buffer) :]
            buffer[: len(piece)] = piece
            wire.protocol.buffer_updated(len(piece))

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await asyncio.sleep(0)
