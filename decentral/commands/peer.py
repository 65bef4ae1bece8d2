"""python -m decentral.peer: run one peer, which starts a swarm, joins one, or continues from its state folder.

peers/startup/start_peer.py     opens the network, reaches the swarm, prepares and trains
decentral/engine/launch.py      starts one process per device, if a peer has several devices
"""

import argparse
import asyncio
import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # let a signal end the process at once during imports: nothing needs saving
    from decentral.commands.lifeline import heed
    from decentral.commands.shared import ending_signals

    for _each in ending_signals():
        signal.signal(_each, lambda *_: os._exit(0))
    heed()

from decentral.comm.net import ports
from decentral.commands import push, shared
from decentral.commands.hook_flags import add_hook_flags, hooks_of
from decentral.commands.lifeline import heed
from decentral.core import config, quantities
from decentral.core.device_names import CHOICES, valid_devices
from decentral.core.errors import ExitCode, UserError
from decentral.core.near_names import did_you_mean
from decentral.core.own_inputs import FLAGS, MEANINGS, NO_UPLOAD, NOTHING_NAMED, OwnInputs
from decentral.core.peer_names import PEER_NAME_CHARS
from decentral.core.plain_text import SHOWN_CHARS, plain_text
from decentral.core.rank_place import ATTEMPT, Place, Split
from decentral.core.units import Amount
from decentral.engine import compile_caches
from decentral.peers.membership import records
from decentral.peers.startup import state
from decentral.peers.startup.flags import StartFlags
from decentral.store.fetching import fetched, holds_uploads
from decentral.store.places import PLACES, checked_place
from decentral.view.page.address import add_dashboard_flag

MAX_JOIN_WAIT_S = 7 * 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    heed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)  # skip the garbage collection at exit, which would take a second
    arguments = sys.argv[1:] if argv is None else argv
    return shared.run(lambda: _start(arguments), lasting=True)


def _start(arguments: Sequence[str]) -> None:
    """Run the peer; with several devices, run one of its ranks, or the launcher that starts the ranks."""
    place = Place.here()
    try:
        flags = parse(arguments)
        _require_consistent(flags)
        if place and not flags.state_dir:
            raise UserError("a peer of several ranks needs --state-dir DIR, so that it finds its checkpoint again")
        if flags.state_dir and ATTEMPT not in os.environ:  # a rank skips this check, because its launcher has made it
            says_run = any((flags.say_config, flags.join, flags.private, flags.invite, flags.resume_from))
            says_run = says_run or flags.own != NOTHING_NAMED
            state.require_meant(flags.state_dir, says_run, flags.peer != state.PeerFlags())
        with shared.loading():
            from decentral.engine import launch, measure
            from decentral.peers.startup import start_peer
        devices = measure.devices(flags.peer.device, place)
    except UserError:
        if place is None or place.rank == 0:
            raise
        raise SystemExit(ExitCode.MISTAKE) from None  # only rank 0 prints the error
    if place is not None:
        assert flags.state_dir, "a rank has a state folder"
        compile_caches.keep_in(Path(flags.state_dir).absolute())
        device, again = devices[place.local_rank], place.restarts > 0
        lead = partial(start_peer.start, device=device, again=again)
        # Rank 0 downloads when all ranks have connected: they wait for its orders much longer than for its connection.
        launch.rank(
            device, flags.peer.throttle, place, lambda island: asyncio.run(lead(_downloaded(flags), island=island))
        )
    elif len(devices) > 1:
        raise SystemExit(launch.island(arguments, flags.state_dir or str(state.new_path()), devices))
    elif flags.peer.split is not Split.AUTO:
        ways = "name them, such as --device cuda:0,cuda:1, or give --split auto for one device"
        raise UserError(f"--split {flags.peer.split} is for several devices; {ways}")
    else:
        asyncio.run(start_peer.start(_downloaded(flags), flags.peer.device))


def _require_consistent(flags: StartFlags) -> None:
    """Raise UserError before torch is loaded if flags contradict each other or the run, or a new run's config is wrong.

    The check is left to `start_peer.start` if a launcher restarts the peer, since the folder then replaces some flags,
    and if --model-from names an upload that is not downloaded yet.
    """
    if ATTEMPT in os.environ or (flags.own.model_folder is not None and holds_uploads(flags.own.model_folder)):
        return
    folder = Path(flags.state_dir or "")
    kept = state.StateFolder(folder).read_run(flags.own) if _has_run(flags) else None
    flags.require_consistent(kept, folder)
    if flags.say_config and kept is None:
        config.load(flags.config, flags.overrides, flags.own)


def _has_run(flags: StartFlags) -> bool:
    return flags.state_dir is not None and (Path(flags.state_dir) / "run.json").exists()


def _downloaded(flags: StartFlags) -> StartFlags:
    """Download the uploads that these flags name, and return the flags with the downloads' folders in their place.

    A checkpoint is not downloaded if the state folder has a run already, so that the same command restarts a peer.

    Raises:
        UserError: If an upload cannot be downloaded.
    """
    own, resumed = flags.own, flags.resume_from
    if own.model_folder is not None and holds_uploads(own.model_folder):
        own = replace(own, model_folder=str(fetched(own.model_folder, "model", "--model-from", shared.starting)))
    if resumed is not None and _has_run(flags):
        shared.starting(f"--resume-from {resumed} is not used: {flags.state_dir} has a run, whose state goes on")
        resumed = None
    elif resumed is not None:
        resumed = str(fetched(resumed, "checkpoint", "--resume-from", shared.starting))
    return replace(flags, own=own, resume_from=resumed)


def parse(argv: Sequence[str] | None) -> StartFlags:
    """Return the command's flags, completed from the state folder, or raise UserError if they are not valid."""
    about = "Run one peer: start a swarm, join one, or continue from a state folder."
    parser = shared.Parser(prog="python -m decentral.peer", description=about)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a shipped one")
    shared.add_join_flag(parser, "address of a peer of the swarm")
    wait = "keep trying the addresses of --join for so long, such as 10m; default: not again"
    parser.add_argument("--join-wait", type=quantities.duration_s, default=0.0, metavar="TIME", help=wait)
    parser.add_argument("--invite", metavar="FILE", help="this peer's invitation, if the swarm is private")
    parser.add_argument("--private", action="store_true", help="begin a swarm that only invited peers may join")
    shared.add_set_flag(parser)
    _add_own_flags(parser)
    parser.add_argument("--state-dir", metavar="DIR", help="the peer's state folder; default: a new one")
    several = f"{CHOICES}; or several: cuda:0,cuda:1"
    parser.add_argument("--device", type=valid_devices, help=several)
    ways = f"{{{','.join(Split)}}}"
    parser.add_argument("--split", type=_split, metavar=ways, help="how several devices divide the model")
    memory = "memory for the model, such as 8GB; default: the device's"
    parser.add_argument("--memory", type=quantities.memory_bytes, metavar="BYTES", help=memory)
    parser.add_argument("--listen", action="append", metavar="MULTIADDR", help="address to listen at")
    parser.add_argument("--announce", action="append", metavar="MULTIADDR", help="address where others reach this peer")
    called = "what people see this peer called, up to 32 characters; default: the host name"
    parser.add_argument("--name", help=called)
    parser.add_argument("--region", help="name of this peer's place, for the planner")
    parser.add_argument("--throttle", type=shared.finite, metavar="F", help="train F times slower than the device can")
    amount = "stop after 15m, 2h, 500steps or 2Mtokens of this peer, counted from this start, not from an earlier one"
    parser.add_argument("--stop-after", metavar="AMOUNT", help=amount)
    parser.add_argument("--plain", action="store_true", help="print a line every few seconds instead of the live view")
    _add_watch_flags(parser)
    given = parser.parse_args(argv)
    shared.refuse_number(given.config)
    peer = _of_peer(given)
    if not 1 <= peer.throttle <= 1e4:
        raise UserError(f"--throttle expects a factor of 1 to 10000; got {peer.throttle:g}")
    if given.join_wait > MAX_JOIN_WAIT_S:
        raise UserError(f"--join-wait expects at most {MAX_JOIN_WAIT_S:g} s; got {given.join_wait:g} s")
    stop_after = Amount.parse(given.stop_after) if given.stop_after else None
    if peer.metrics:
        shared.require_extra("--metrics", "prometheus-client", "prometheus_client", "metrics")
    for name in peer.log:
        shared.require_extra(f"--log {name}", name, name, name)
    _check_record(peer)
    if given.upload not in (None, NO_UPLOAD):
        checked_place(given.upload, "--upload")
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
        hooks=hooks_of(given),
        resume_from=given.resume_from,
    )


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this peer's own inputs and uploads: its data, its model, and where to upload checkpoints."""
    for name, (metavar, meaning) in MEANINGS.items():
        parser.add_argument(FLAGS[name], metavar=metavar, help=meaning.format(places=PLACES))
    resumed = "go on from an uploaded checkpoint, at a place that decentral push names"
    parser.add_argument("--resume-from", metavar="PLACE", help=resumed)
    keep = "this peer's newest N uploads of the run stay there; default 3"
    parser.add_argument("--upload-keep", type=push.kept, metavar="N", help=keep)
    rate = "upload at most this fast, such as 20Mb/s"
    parser.add_argument("--upload-rate", type=quantities.rate_bytes, metavar="RATE", help=rate)


def _split(text: str) -> Split:
    if text in list(Split):
        return Split(text)
    raise argparse.ArgumentTypeError(f"expected one of {', '.join(Split)}; got {text!r}{did_you_mean(text, Split)}")


def _of_peer(given: argparse.Namespace) -> state.PeerFlags:
    """Return the flags to store in the state folder: those of this call, completed by the stored flags.

    Raises:
        UserError: If the stored flags are damaged.
    """
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
        name=kept.name if given.name is None else given.name,
        upload_keep=given.upload_keep or kept.upload_keep,
        upload_rate=given.upload_rate or kept.upload_rate,
        split=given.split or kept.split,
    )


def _add_watch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with which people and programs watch a peer: the live page, metrics, curves and hooks."""
    add_dashboard_flag(parser)
    parser.add_argument("--metrics", type=shared.host_port, metavar="[HOST:]PORT", help="serve metrics for Prometheus")
    curves = "write curves for tensorboard, wandb (offline)"
    parser.add_argument("--log", type=shared.log_names, metavar="NAMES", help=curves)
    add_hook_flags(parser)


def _check_record(flags: state.PeerFlags) -> None:
    """Raise UserError if other peers would refuse a DHT record with these flags, or an address is no multiaddr."""
    if flags.region != plain_text(flags.region):
        raise UserError(f"--region expects up to {SHOWN_CHARS} printable characters, no brackets; got {flags.region!r}")
    if flags.name is not None and flags.name != plain_text(flags.name, PEER_NAME_CHARS):
        raise UserError(f"--name expects up to {PEER_NAME_CHARS} printable characters, no brackets; got {flags.name!r}")
    for name, given in (("announce", flags.announce), ("listen", flags.listen)):
        if len(given) > records.MOST_ADDRESSES or any(len(one) > records.ADDRESS_CHARS for one in given):
            most = f"{records.MOST_ADDRESSES} addresses of at most {records.ADDRESS_CHARS} characters"
            longest = max(map(len, given))
            raise UserError(f"--{name} expects at most {most}; got {len(given)}, the longest with {longest} characters")
        for address in given:
            ports.require_multiaddr(address, f"--{name}")


if __name__ == "__main__":
    sys.exit(main())
