"""python -m decentral.dashboard: serve a live web page about a running swarm, or about the peers in a folder.

    python -m decentral.dashboard --join ADDR        shows a running swarm, without training in it
    python -m decentral.dashboard DIR                shows the peers whose journals are in DIR
    ... --serve-model                                also serves the swarm's model by OpenAI's API (decentral/serving)
    ... --serve-model FOLDER                         also serves the model of a Hugging Face folder or a state folder
    ... --webhook URL --events peer_lost             also tells a chat or a program what happens

`decentral.peer --dashboard`, `decentral.local --dashboard` and `decentral.simulate --dashboard` start this command as a
separate process, so that serving browsers does not slow down training.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.commands import shared
from decentral.commands.hook_flags import add_hook_flags, hooks_of
from decentral.core.device_names import CHOICES, valid_device
from decentral.core.errors import UserError
from decentral.view.event_hooks import Hooks, hooks_running
from decentral.view.page.address import PageAddress, link

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from decentral.view.page.visitor import Visitor

HERE_TOO = ""  # with this value of --serve-model, the page also serves the model of the swarm that it shows
NICENESS = 5  # nice value of a dashboard process that a peer has started, so that training gets the CPU first
LAST_UPDATE_S = 2.0  # the server runs this long after the last journal line, so that browsers get the last update


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    hooks = hooks_of(flags)
    if hooks and not (flags.folder or flags.join):
        raise UserError("--on-event and --webhook need --join ADDR of a running peer, or a folder with journals")
    if flags.feed is not None:
        with suppress(OSError):
            os.nice(NICENESS)
    with socket.socket(fileno=flags.socket) if flags.socket is not None else flags.at.bind() as listening:
        if flags.feed is None:
            print(f"the page: {link(listening)}", flush=True)
        serving = asyncio.Event()
        try:
            asyncio.run(_serve(flags, listening, hooks, serving))
        except (asyncio.CancelledError, KeyboardInterrupt):
            if not serving.is_set():
                raise KeyboardInterrupt from None


async def _serve(
    flags: argparse.Namespace, listening: socket.socket, hooks: Hooks | None, is_served: asyncio.Event
) -> None:
    """Serve the page, and tell hooks what happens, until Ctrl-C, or until the parent process ends.

    `is_served` is set once the page can be served; Ctrl-C is then the command's orderly end.
    """
    import uvicorn

    from decentral.view.page.connections import settings
    from decentral.view.page.follow import PageFollower, SwarmTime
    from decentral.view.page.server import Updates, application
    from decentral.view.page.sources import JournalFolder, LineSource, ParentFeed
    from decentral.view.page.swarm_hooks import SwarmHooks

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
        if hooks:
            say = partial(print, file=sys.stderr, flush=True)
            await stack.enter_async_context(hooks_running(hooks, None, say))
        follower = PageFollower(sources, SwarmTime(time.time), hooks=SwarmHooks(hooks) if hooks else None)
        updates = Updates(follower.view)
        server = uvicorn.Server(settings(application(updates, flags.at.host, model_api)))
        is_served.set()
        serving = asyncio.create_task(_until_signal(server, listening))
        following = asyncio.create_task(follower.run(updates.publish))
        await asyncio.wait((serving, following), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await asyncio.wait((serving,), timeout=LAST_UPDATE_S)
        server.should_exit = True
        following.cancel()
        await serving
        if following.done() and not following.cancelled() and (error := following.exception()) is not None:
            raise error


async def _until_signal(server: "uvicorn.Server", listening: socket.socket) -> None:
    """Serve the page until SIGINT or SIGTERM comes, or until `server.should_exit` is set.

    At its end uvicorn raises the signal again, which becomes a KeyboardInterrupt here and is dropped.
    """
    with suppress(KeyboardInterrupt):
        await server.serve(sockets=[listening])


@asynccontextmanager
async def _model_api(flags: argparse.Namespace, visitor: "Visitor | None") -> AsyncIterator["ASGIApp"]:
    """Import torch, and yield the application that answers requests to paths below /v1.

    A folder's weights are loaded at once, so that the command ends with an error if the folder is wrong. A swarm's
    weights are fetched in the background.
    """
    from decentral.engine import measure
    from decentral.serving import endpoint, served_model

    device = measure.choose(flags.device)
    if visitor is not None and flags.serve_model == HERE_TOO:
        source = served_model.of_swarm(visitor.swarm, flags.tokenizer, device, flags.model_from)
    else:
        folder = Path(flags.folder if flags.serve_model == HERE_TOO else flags.serve_model)
        if not folder.is_dir():
            raise UserError(f"--serve-model {folder} is not a folder; give a model's folder or a state folder")
        source = served_model.of_folder(folder, flags.tokenizer, device, flags.model_from)
        await source.load_first()
    refreshing = asyncio.create_task(source.served.keep_fresh(source.load, source.every_s))
    try:
        yield endpoint.api(source.served)
    finally:
        refreshing.cancel()


@asynccontextmanager
async def _visitor(flags: argparse.Namespace) -> AsyncIterator["Visitor"]:
    """Visit the swarm of --join until the block ends, and yield the source of lines about the swarm.

    The import loads libp2p, which takes a second, so it is only done here. libp2p runs in a process of its own.
    """
    from decentral.view.page.visitor import visiting

    async with visiting(flags.join, flags.invite) as visitor:
        yield visitor


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Serve a live page about a swarm."
    parser = shared.Parser(prog="python -m decentral.dashboard", description=about)
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a peer's state folder, or a folder of state folders")
    shared.add_join_flag(parser, "address of a peer to visit")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    where = "address to serve at; default 127.0.0.1:8420"
    parser.add_argument("--at", type=PageAddress.parse, default=PageAddress(), metavar="[HOST:]PORT", help=where)
    model = "also serve OpenAI's API at /v1, with the swarm's model or the model in FOLDER"
    parser.add_argument("--serve-model", nargs="?", const=HERE_TOO, metavar="FOLDER", help=model)
    tokenizer = "with --serve-model: file or folder of the tokenizer, unless tokens are bytes"
    parser.add_argument("--tokenizer", metavar="PATH", help=tokenizer)
    base = "with --serve-model: folder of the base model, for a run that trains adapters"
    parser.add_argument("--model-from", metavar="DIR", help=base)
    device = f"with --serve-model: {CHOICES}; default: cpu"
    parser.add_argument("--device", type=valid_device, default="cpu", help=device)
    add_hook_flags(parser)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)  # descriptor of an inherited listening socket
    parser.add_argument("--feed", type=int, help=argparse.SUPPRESS)  # descriptor of a pipe with journal lines
    flags = parser.parse_args(argv)
    if not (flags.folder or flags.join or flags.serve_model or flags.feed is not None):
        raise UserError("expected --join ADDR of a running peer, or a folder with a peer's journal")
    if flags.folder and not Path(flags.folder).is_dir():
        raise UserError(f"{flags.folder} is not a folder; give a peer's state folder, or a folder of state folders")
    return flags


if __name__ == "__main__":
    sys.exit(main())
