"""Serves the page: static files, one stream of server-sent events for each browser, and JSON for programs.

    /                    the page
    /static/...          its parts; nothing comes from another host, and the policy below forbids it
    /stream              first everything, then what has changed, about once a second
    /api/swarm           everything, once
    /api/peers/N         the loss of peer N over time
    /v1/...              text from a model, where the user wants one served (decentral/serving)

An update is encoded once for all browsers. One that is slow gets everything anew, so nothing queues up for it.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from decentral.core import strict_json
from decentral.view.page.swarm_view import SwarmView

STATIC = Path(__file__).parent / "static"
MOST_BROWSERS = 32
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Updates:
    """The updates of the page, numbered; the latest is encoded once, and whoever has missed one gets everything."""

    def __init__(self, view: SwarmView) -> None:
        self.view, self.number, self.browsers = view, 0, 0
        self._latest = b""
        self._whole = (-1, "")  # everything as JSON, as of update N
        self._news = asyncio.Event()

    def publish(self) -> None:
        """What has changed goes to all who listen. While nobody does, nothing is encoded."""
        self.number += 1
        if not self.browsers:
            return
        self._latest = _message("changes", self.number, strict_json.dumps(self.view.changes()))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def everything(self) -> str:
        """All that a page shows, as JSON; it is encoded once for an update, however many ask."""
        if self._whole[0] != self.number:
            self._whole = self.number, strict_json.dumps(self.view.snapshot())
        return self._whole[1]

    async def listen(self) -> AsyncGenerator[bytes]:
        """Server-sent events, for one browser."""
        known = -1
        self.browsers += 1
        try:
            while True:
                if known != self.number:
                    missed = known < 0 or known < self.number - 1
                    known = self.number
                    yield _message("everything", known, self.everything()) if missed else self._latest
                else:
                    await self._news.wait()
        finally:
            self.browsers -= 1


def _message(event: str, number: int, content: str) -> bytes:
    return f"event: {event}\nid: {number}\ndata: {content}\n\n".encode()


def application(updates: Updates, names: frozenset[str] = frozenset(), model_api: ASGIApp | None = None) -> Starlette:
    """The page's application. `names`: hosts by which browsers may ask for it, besides addresses and this machine.
    `model_api`: what answers below /v1."""

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def stream(request: Request) -> Response:
        if updates.browsers >= MOST_BROWSERS:
            return PlainTextResponse(f"at most {MOST_BROWSERS} browsers look at one time; close one", 503)
        return StreamingResponse(updates.listen(), media_type="text/event-stream")

    async def swarm(request: Request) -> Response:
        return _json(updates.everything())

    async def peer(request: Request) -> Response:
        number = re.fullmatch("[0-9]{1,9}", request.path_params["number"])
        found = updates.view.history(int(number[0])) if number else None
        return PlainTextResponse("no such peer", 404) if found is None else _json(strict_json.dumps(found))

    routes = [
        Route("/", page),
        Route("/stream", stream),
        Route("/api/swarm", swarm),
        Route("/api/peers/{number}", peer),
        Mount("/static", StaticFiles(directory=STATIC)),
        *([Mount("/v1", model_api)] if model_api else ()),
    ]
    own = names | {"localhost", socket.gethostname().lower()}
    return Starlette(routes=routes, middleware=[Middleware(Guarded, names=own)])


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")


class Guarded:
    """Answers under this machine's names only, and says in each answer what a page of ours may do.

    A page of somebody else's whose name was made to lead here (DNS rebinding) has that name in its `Host` header.
    """

    def __init__(self, app: Any, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Scope) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if not self._is_ours(host):
            refused = PlainTextResponse(
                "this page is served under this machine's names only; name it by --dashboard", 421
            )
            await refused(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)

    def _is_ours(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        try:
            ipaddress.ip_address(name.strip("[]"))
            return True
        except ValueError:
            return name.lower() in self.names
