"""Serve the live page: static files, a stream of server-sent events for each browser, and JSON for programs.

    /                    the page
    /static/...          the page's scripts and styles; the browser may load nothing from other hosts (HEADERS)
    /stream              first the whole state, then changes, about once a second
    /api/swarm           the whole state, once
    /api/peers/N         the loss of peer N over time
    /healthz             200 while this server answers
    /readyz              200 while a peer trains, else 503
    /v1/...              text from a model, if the user serves one (decentral/serving)

Start reading at `application`. An update is encoded once for all browsers. There is no queue of updates for a slow
browser: a browser that has missed an update receives the whole state.
"""

import asyncio
import re
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
from decentral.core.ip_networks import CALLER, network_of
from decentral.view.callers import has_room, is_ours, own_names
from decentral.view.page.address import HERE
from decentral.view.page.swarm_view import SwarmView

STATIC = Path(__file__).parent / "static"
MOST_BROWSERS = 64  # at most this many browsers get updates, half of them from one network, to bound an update's work
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
    """Sender of the page's numbered updates. Only the latest update is stored, encoded once for all browsers."""

    def __init__(self, view: SwarmView) -> None:
        """Prepare to publish updates of `view`."""
        self.view, self.number = view, 0
        self.browsers: list[str] = []  # the network of each connected browser
        self._latest = b""
        self._whole = (-1, "")  # the whole state as JSON, and the number of the update for which it was encoded
        self._news = asyncio.Event()

    def publish(self) -> None:
        """Send the changes since the last update to all browsers. If no browser listens, nothing is encoded."""
        self.number += 1
        if not self.browsers:
            return
        self._latest = _message("changes", self.number, strict_json.dumps(self.view.changes()))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def everything(self) -> str:
        """Return the whole state of the page as JSON, encoded at most once per update."""
        if self._whole[0] != self.number:
            self._whole = self.number, strict_json.dumps(self.view.snapshot())
        return self._whole[1]

    async def listen(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events for one browser, which is in `browsers`: the whole state, then each change."""
        known = -1
        while True:
            if known != self.number:
                missed = known < 0 or known < self.number - 1
                known = self.number
                yield _message("everything", known, self.everything()) if missed else self._latest
            else:
                await self._news.wait()


def _message(event: str, number: int, content: str) -> bytes:
    return f"event: {event}\nid: {number}\ndata: {content}\n\n".encode()


def application(updates: Updates, host: str = HERE, model_api: ASGIApp | None = None) -> Starlette:
    """Return the page's web application.

    Args:
        updates: The state to show, and its changes.
        host: Host name or IP address at which the page is served.
        model_api: The application that answers below /v1, if a model is served.
    """

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def stream(request: Request) -> Response:
        return _Stream(updates, network_of(request.client.host if request.client else "", CALLER))

    async def swarm(request: Request) -> Response:
        return _json(updates.everything())

    async def peer(request: Request) -> Response:
        number = re.fullmatch("[0-9]{1,9}", request.path_params["number"])
        found = updates.view.history(int(number[0])) if number else None
        return PlainTextResponse("no such peer", 404) if found is None else _json(strict_json.dumps(found))

    async def healthz(request: Request) -> Response:
        return _health("")

    async def readyz(request: Request) -> Response:
        return _health("" if updates.view.totals.training else "no peer trains")

    routes = [
        Route("/", page),
        Route("/stream", stream),
        Route("/api/swarm", swarm),
        Route("/api/peers/{number}", peer),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Mount("/static", StaticFiles(directory=STATIC)),
        *([Mount("/v1", model_api)] if model_api else ()),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guarded, names=own_names(host))])


def _health(wrong: str) -> Response:
    return PlainTextResponse(f"{wrong or 'ok'}\n", 503 if wrong else 200)


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")


class _Stream(StreamingResponse):
    """The stream of updates for one browser, which counts towards MOST_BROWSERS until it has ended."""

    def __init__(self, updates: Updates, network: str) -> None:
        super().__init__(updates.listen(), media_type="text/event-stream")
        self._browsers, self._network = updates.browsers, network

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._browsers.append(self._network)
        try:
            if has_room(self._network, self._browsers, MOST_BROWSERS):
                await super().__call__(scope, receive, send)
                return
        finally:
            self._browsers.remove(self._network)
        text = f"at most {MOST_BROWSERS} browsers may show this page at one time, half of them from one network; "
        await PlainTextResponse(text + "close one", 503)(scope, receive, send)


class Guarded:
    """Middleware that refuses foreign host names (status 421), and adds HEADERS to each answer."""

    def __init__(self, app: Any, names: frozenset[str]) -> None:
        """Guard an application; `names` are the host names that requests may use, besides IP addresses."""
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Scope) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if not is_ours(host, self.names):
            refused = PlainTextResponse(
                "this page does not answer under this host name; give the name to --dashboard", 421
            )
            await refused(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)
