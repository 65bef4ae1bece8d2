"""python -m decentral.push DIR DEST: copy a checkpoint or an exported model to a folder, a bucket or the Hub.

    python -m decentral.push swarm/peer-1 s3://bucket/runs        the newest checkpoint of a peer, which may be running
    python -m decentral.push my-model hf://me/my-model            what `decentral export` wrote

The copy is whole or absent: its manifest, with sizes and digests, is written last. Run the command again to go on after
an interruption. `peer --resume-from DEST` and `peer --model-from DEST` begin from the copy. Credentials come from the
provider's own environment and files.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from decentral.comm.wire.identity import Identity
from decentral.commands import shared
from decentral.commands.export import CARD_FILE
from decentral.core import quantities, strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.peer_folders import KEY
from decentral.core.units import Seconds, readable_bytes
from decentral.store.fetching import FLAG_OF
from decentral.store.places import PLACES, asking, checked_place, store_of
from decentral.store.sending import PushResult, SendPace, kind_of_folder, link_of, opened_upload, push

TOLD_EVERY_S = 5.0  # progress is printed at this interval


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    folder, place = Path(flags.folder), checked_place(flags.place, "DEST")
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give a peer's state folder, or a model that decentral export wrote")
    kind, link = kind_of_folder(folder), link_of(folder, place)
    goes_on = link.exists()  # True: finish an interrupted upload first, then upload the folder's present content
    result = _pushed(flags, folder, place, link)
    if goes_on:
        result = _pushed(flags, folder, place, link)
    if flags.json:
        print(strict_json.dumps(asdict(result)))
        return
    print(_said(result, place))
    if kind == "model" and not (folder / CARD_FILE).exists():
        print(f"it has no model card ({CARD_FILE}), which decentral export writes")


def _pushed(flags: argparse.Namespace, folder: Path, place: str, link: Path) -> PushResult:
    with ExitStack() as stack:
        hashed = _teller("hashed", None, flags.json, time.monotonic)
        peer = Identity.load_or_create(folder / KEY).peer if (folder / KEY).exists() else PeerId("")
        upload = opened_upload(folder, peer, link, stack, hashed)
        with asking(place):
            sent = _teller("sent", upload.manifest.size, flags.json, time.monotonic)
            result = push(upload, store_of(place), flags.keep, SendPace(flags.rate), sent)
    link.unlink(missing_ok=True)
    return result


def _said(result: PushResult, place: str) -> str:
    """Return text for the user: what was uploaded and removed, and the command that begins from the upload."""
    where = f"{place}/{result.name}".rstrip("/")
    done = f"{where}: whole, {readable_bytes(result.size)}, of which {readable_bytes(result.sent)} sent now"
    gone = f"; removed {len(result.removed)} older" if result.removed else ""
    command = shared.as_called("python -m decentral.peer")
    return f"{done}{gone}\nbegin from it with: {command} {FLAG_OF[result.kind]} {where}"


def _teller(done: str, size: int | None, as_json: bool, clock: Callable[[], Seconds]) -> Callable[[int], None]:
    """Return a function that counts bytes as they are `done`, such as "sent", and prints the sum every TOLD_EVERY_S.

    `size` is the sum at the end; None: not known.
    """
    count, told_at = 0, clock()

    def tell(more: int) -> None:
        nonlocal count, told_at
        count += more
        if clock() - told_at >= TOLD_EVERY_S:
            told_at = clock()
            known = {} if size is None else {"size": size}
            line = f"{readable_bytes(count)} {done}" + (f" of {readable_bytes(size)}" if size is not None else "")
            print(strict_json.dumps({done: count} | known) if as_json else line, flush=True)

    return tell


def kept(text: str) -> int:
    """Return the number of checkpoints to keep. Raises ArgumentTypeError unless it is a whole number above 0."""
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number of checkpoints, at least 1; got {text!r}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Copy a checkpoint or an exported model to a folder, a bucket or the Hugging Face Hub."
    parser = shared.Parser(prog="python -m decentral.push", description=about)
    parser.add_argument("folder", metavar="DIR", help="a peer's state folder, or a folder that decentral export wrote")
    place = f"{PLACES}, or another address that fsspec knows"
    parser.add_argument("place", metavar="DEST", help=place)
    parser.add_argument("--rate", type=quantities.rate_bytes, help="send at most this fast, such as 20Mb/s")
    keep = "remove all but this peer's newest N checkpoints of the run there; default: remove none"
    parser.add_argument("--keep", type=kept, metavar="N", help=keep)
    parser.add_argument("--json", action="store_true", help="print progress and the result as lines of JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
