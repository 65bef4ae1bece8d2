"""python -m decentral.peer: one peer, which starts a swarm, joins one, or goes on where its state folder stopped.

peers/startup/start_peer.py     opens the network, reaches the swarm, prepares and trains
decentral/engine/launch.py      starts a process for each device, where a peer has several
"""

import argparse
import asyncio
import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # while the libraries below load there is nothing to save
    from decentral.commands.lifeline import heed
    from decentral.commands.shared import ending_signals

    for _each in ending_signals():
        signal.signal(_each, lambda *_: os._exit(0))
    heed()

from decentral.commands import shared
from decentral.commands.lifeline import heed
from decentral.core.errors import UserError
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.plain_text import SHOWN_CHARS, plain_text
from decentral.core.rank_place import ATTEMPT, Place
from decentral.core.units import Amount
from decentral.engine import compile_caches
from decentral.peers.membership import records
from decentral.peers.startup import state
from decentral.peers.startup.flags import StartFlags
from decentral.view.page.address import add_dashboard_flag

MAX_JOIN_WAIT_S = 7 * 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    heed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)  # what is left the system frees at once; Python would look through it for a second
    arguments = sys.argv[1:] if argv is None else argv
    return shared.run(lambda: _start(arguments), lasting=True)


def _start(arguments: Sequence[str]) -> None:
    """Runs the peer, or with several devices one of its ranks, or the launcher that starts these."""
    place = Place.here()
    try:
        flags = parse(arguments)
        with shared.loading():
            from decentral.engine import launch, measure
            from decentral.peers.startup import start_peer
        devices = measure.devices(flags.peer.device, place)
        if place and not flags.state_dir:
            raise UserError("a peer of several ranks needs --state-dir, so that it finds its checkpoint again")
        if flags.state_dir and ATTEMPT not in os.environ:  # ranks of our own launcher: it has looked
            says_run = any((flags.say_config, flags.join, flags.private, flags.invite, flags.own != NOTHING_NAMED))
            state.require_meant(flags.state_dir, says_run, flags.peer != state.PeerFlags())
    except UserError:
        if place is None or place.rank == 0:
            raise
        raise SystemExit(2) from None  # rank 0 says it
    if place is not None:
        assert flags.state_dir, "a rank has a state folder"
        compile_caches.keep_in(Path(flags.state_dir).absolute())
        device, again = devices[place.local_rank], place.restarts > 0
        lead = partial(start_peer.start, flags, device, again=again)
        launch.rank(device, flags.peer.throttle, place, lambda island: asyncio.run(lead(island=island)))
    elif len(devices) > 1:
        raise SystemExit(launch.island(arguments, flags.state_dir or str(state.new_path()), devices))
    else:
        asyncio.run(start_peer.start(flags, flags.peer.device))


def parse(argv: Sequence[str] | None) -> StartFlags:
    parser = shared.Parser(prog="python -m decentral.peer", description="One peer of a swarm that trains together.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped one's name")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a peer of the swarm")
    wait = "try --join's addresses for so long, where a peer there may start later; default 0"
    parser.add_argument("--join-wait", type=float, default=0.0, metavar="SECONDS", help=wait)
    parser.add_argument("--invite", metavar="FILE", help="this peer's invitation, where the swarm is private")
    parser.add_argument("--private", action="store_true", help="begin a swarm that only invited peers join")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    parser.add_argument("--data", metavar="PATH", help="this peer's own text or tokens, where the run needs them")
    parser.add_argument("--data-glob", metavar="PATTERN", help="which files of a folder; for text: default **/*.txt")
    parser.add_argument("--data-column", metavar="NAME", help="the column of text in rows of data; default text")
    parser.add_argument("--data-part", metavar="K/N", help="read the K-th of N parts of streamed data, no other peer's")
    parser.add_argument("--tokenizer", metavar="PATH", help="this peer's own file or folder of the run's tokenizer")
    parser.add_argument("--model-from", metavar="DIR", help="a Hugging Face folder whose weights the run starts from")
    code = "package.module:function of the model, which is imported and called here"
    parser.add_argument("--trust-model-code", metavar="NAME", help=code)
    parser.add_argument("--state-dir", metavar="DIR", help="identity, journal, checkpoints; default: a new one")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N, or several: cuda:0,cuda:1")
    parser.add_argument("--memory", type=shared.size, metavar="BYTES", help="for the model; default: the device's")
    parser.add_argument("--listen", action="append", metavar="MULTIADDR", help="where to listen")
    parser.add_argument("--announce", action="append", metavar="MULTIADDR", help="where others reach us")
    parser.add_argument("--region", help="a name for where this peer is, for the planner")
    parser.add_argument("--throttle", type=float, metavar="F", help="be F times slower than the device is")
    parser.add_argument("--stop-after", metavar="AMOUNT", help="500steps, 90s or 2e6tokens of this peer")
    parser.add_argument("--plain", action="store_true", help="a line every few seconds instead of the live view")
    add_dashboard_flag(parser)
    parser.add_argument("--metrics", type=shared.host_port, metavar="[HOST:]PORT", help="serve metrics for Prometheus")
    parser.add_argument("--log", type=shared.log_names, metavar="NAMES", help="curves for tensorboard, wandb (offline)")
    given = parser.parse_args(argv)
    peer = _of_peer(given)
    if not 1 <= peer.throttle <= 1e4:
        raise UserError(f"--throttle expects a factor of 1 to 10000; got {peer.throttle:g}")
    if not 0 <= given.join_wait <= MAX_JOIN_WAIT_S:
        raise UserError(f"--join-wait expects seconds up to {MAX_JOIN_WAIT_S:g}; got {given.join_wait:g}")
    stop_after = Amount.parse(given.stop_after) if given.stop_after else None
    if peer.metrics:
        shared.require_extra("--metrics", "prometheus-client", "prometheus_client", "metrics")
    for name in peer.log:
        shared.require_extra(f"--log {name}", name, name, name)
    _check_record(peer)
    return StartFlags(
        peer=peer,
        own=OwnInputs.named_by(given),
        config=given.config,
        overrides=tuple(given.set),
        join=tuple(given.join),
        join_wait=given.join_wait,
        invite=given.invite,
        private=given.private,
        state_dir=given.state_dir,
        stop_after=stop_after,
        plain=given.plain,
        dashboard=given.dashboard,
    )


def _of_peer(given: argparse.Namespace) -> state.PeerFlags:
    """Return the flags that say what the peer is: those given, else those that its folder keeps. Raises UserError."""
    kept = state.StateFolder(Path(given.state_dir)).read_flags() if given.state_dir else state.PeerFlags()
    return state.PeerFlags(
        device=kept.device if given.device is None else given.device,
        memory=given.memory or kept.memory,
        listen=tuple(given.listen or kept.listen),
        announce=tuple(given.announce or kept.announce),
        region=kept.region if given.region is None else given.region,
        throttle=kept.throttle if given.throttle is None else given.throttle,
        metrics=given.metrics or kept.metrics,
        log=tuple(given.log or kept.log),
    )


def _check_record(flags: state.PeerFlags) -> None:
    """Raises UserError where these flags would make a record that all other peers refuse, so that none sees us."""
    if flags.region != plain_text(flags.region):
        raise UserError(f"--region expects at most {SHOWN_CHARS} printable characters, no brackets; {flags.region!r}")
    for name, given in (("announce", flags.announce), ("listen", flags.listen)):
        if len(given) > records.MOST_ADDRESSES or any(len(one) > records.ADDRESS_CHARS for one in given):
            most = f"{records.MOST_ADDRESSES} addresses of at most {records.ADDRESS_CHARS} characters"
            raise UserError(f"--{name} expects {most}; it has {len(given)}, the longest of {max(map(len, given))}")


if __name__ == "__main__":
    sys.exit(main())
