"""python -m decentral.dashboard: a swarm in a browser, live or from what its journals keep.

    python -m decentral.dashboard --join ADDR        a live swarm, as a visitor
    python -m decentral.dashboard DIR                the journals of one peer, or of all in a folder of state folders
    ... --serve-model                                and text from its model, as OpenAI's API (decentral/serving)
    ... --serve-model FOLDER                         from the model of a Hugging Face folder, or of a state folder

`decentral.peer --dashboard`, `decentral.local --dashboard` and `decentral.simulate --dashboard` start this command as a
process of their own, so that what serves browsers takes nothing from what trains.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.view.page.address import HERE, PageAddress, link
from decentral.view.page.follow import PageFollower, SwarmTime
from decentral.view.page.sources import JournalFolder, LineSource, ParentFeed

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from decentral.view.page.visitor import Visitor

HERE_TOO = ""  # --serve-model without a folder: the model of what the page shows
NICENESS = 5  # of a page that a peer has started: what trains goes first, and the page is served all the same
LAST_UPDATE_S = 2.0  # in which browsers get the last update


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    if flags.feed is not None:
        with suppress(OSError):
            os.nice(NICENESS)
    with socket.socket(fileno=flags.socket) if flags.socket is not None else flags.at.bind() as listening:
        if flags.feed is None:
            print(f"the page: {link(listening)}", flush=True)
        with suppress(asyncio.CancelledError):
            asyncio.run(_serve(flags, listening))


async def _serve(flags: argparse.Namespace, listening: socket.socket) -> None:
    """Until Ctrl-C, or until the process that has started this one ends."""
    import uvicorn

    from decentral.view.page.server import Updates, application

    async with AsyncExitStack() as stack:
        sources: list[LineSource] = [JournalFolder(Path(flags.folder))] if flags.folder else []
        if flags.feed is not None:
            sources.append(ParentFeed(flags.feed))
        visitor = await stack.enter_async_context(_visitor(flags)) if flags.join else None
        if visitor is not None:
            sources.append(visitor)
        model_api = (
            await stack.enter_async_context(_model_api(flags, visitor)) if flags.serve_model is not None else None
        )
        follower = PageFollower(sources, SwarmTime(time.time))
        updates = Updates(follower.view)
        settings = uvicorn.Config(
            application(updates, _names(flags.at), model_api), log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        following = asyncio.create_task(follower.run(updates.publish))
        await asyncio.wait((serving, following), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await asyncio.wait((serving,), timeout=LAST_UPDATE_S)
        server.should_exit = True
        following.cancel()
        await serving
        if following.done() and not following.cancelled() and (error := following.exception()) is not None:
            raise error


@asynccontextmanager
async def _model_api(flags: argparse.Namespace, visitor: "Visitor | None") -> AsyncIterator["ASGIApp"]:
    """What answers below /v1. Of a folder the weights are loaded first, so that a mistake ends the command with one
    line; those of a swarm come while the page is served. Loads torch."""
    from decentral.engine import measure
    from decentral.serving import endpoint, served_model

    device = measure.choose(flags.device, "auto", 1.0, 0.0)
    if visitor is not None and flags.serve_model == HERE_TOO:
        source = served_model.of_swarm(visitor.swarm, flags.tokenizer, device)
    else:
        folder = Path(flags.folder if flags.serve_model == HERE_TOO else flags.serve_model)
        if not folder.is_dir():
            raise UserError(f"--serve-model {folder}: no folder is there; give a model's, or a state folder")
        source = served_model.of_folder(folder, flags.tokenizer, device)
        await source.load_first()
    refreshing = asyncio.create_task(source.served.keep_fresh(source.load, source.every_s))
    try:
        yield endpoint.api(source.served)
    finally:
        refreshing.cancel()


@asynccontextmanager
async def _visitor(flags: argparse.Namespace) -> AsyncIterator["Visitor"]:
    """Loaded only where it is needed: libp2p takes a second, and a process of its own."""
    from decentral.view.page.visitor import visiting

    async with visiting(flags.join, flags.invite) as visitor:
        yield visitor


def _names(address: PageAddress) -> frozenset[str]:
    return frozenset({address.host.lower()}) - {HERE}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(prog="python -m decentral.dashboard", description="A swarm, in a browser.")
    parser.add_argument("folder", nargs="?", metavar="DIR", help="state folder of a peer, or a folder of such")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a peer to look from")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    where = "where to serve; default 127.0.0.1:8420"
    parser.add_argument("--at", type=PageAddress.parse, default=PageAddress(), metavar="[HOST:]PORT", help=where)
    model = "answer programs that speak OpenAI's API at /v1: with this model, or with that of FOLDER"
    parser.add_argument("--serve-model", nargs="?", const=HERE_TOO, metavar="FOLDER", help=model)
    tokenizer = "with --serve-model: its file or folder, where tokens are not bytes"
    parser.add_argument("--tokenizer", metavar="PATH", help=tokenizer)
    device = "with --serve-model: where to compute"
    parser.add_argument("--device", default="cpu", metavar="auto|cpu|cuda|cuda:N", help=f"{device}; default: cpu")
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)  # a socket that listens already
    parser.add_argument("--feed", type=int, help=argparse.SUPPRESS)  # what the process that starts this one writes
    flags = parser.parse_args(argv)
    if not (flags.folder or flags.join or flags.serve_model or flags.feed is not None):
        raise UserError("expected --join ADDR of a live peer, or the folder of a peer's journal")
    if flags.folder and not Path(flags.folder).is_dir():
        raise UserError(f"{flags.folder} is no folder; give the state folder of a peer, or a folder of such")
    return flags


if __name__ == "__main__":
    sys.exit(main())
