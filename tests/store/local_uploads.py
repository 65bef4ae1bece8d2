"""Folders to upload, for tests: a small model, and a state folder whose checkpoint has several parts."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors.numpy import save
from torch import zeros

from decentral.core.config import Config
from decentral.core.ids import PeerId, RunId
from decentral.engine import checkpoint
from decentral.peers.startup.state import StateFolder
from decentral.store.places import SEND_BYTES, UploadSource, store_of
from decentral.store.sending import LocalUpload, PushResult, SendPace, link_of, opened_upload, push

RUN = RunId("words-3fa2c1")
ANN = PeerId("QmAnn-abcdefgh")


def state_folder(folder: Path, step: int = 7, parts: int = 3) -> Path:
    """A state folder with a run, and with a checkpoint of this step in so many parts."""
    folder.mkdir(exist_ok=True)
    StateFolder(folder).write_run(RUN, Config())
    return at_step(folder, step, parts)


def at_step(folder: Path, step: int, parts: int = 3) -> Path:
    """The same folder with a checkpoint of another step, whose parts differ from each other and by the step."""
    tensor = zeros((parts - 1) * SEND_BYTES // 4 + 100_000)
    for part in range(parts):
        tensor[part * SEND_BYTES // 4 :] += part + step
    checkpoint.write(folder, {"0.theta": tensor}, {"lr_step": step, "fragments": [{"first": 0, "last": 4}]})
    return folder


def model_folder(folder: Path, weights: bytes = b"") -> Path:
    """A folder as `decentral export` writes one."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("# A model\n")
    (folder / "model.safetensors").write_bytes(weights or save({"w": zeros(10).numpy()}))
    (folder / "notes.html").write_text("not a file of a model")
    return folder


@contextmanager
def opened(
    folder: Path, place: Path, peer: PeerId = ANN, hashed: Callable[[int], None] = lambda _: None
) -> Iterator[LocalUpload]:
    with ExitStack() as stack:
        yield opened_upload(folder, peer, link_of(folder, str(place)), stack, hashed)


def pushed(folder: Path, place: Path, keep: int | None = None) -> PushResult:
    """Push a folder to another one, as the command does."""
    with opened(folder, place) as upload:
        result = push(upload, store_of(str(place)), keep, SendPace(None), lambda _: None)
    link_of(folder, str(place)).unlink(missing_ok=True)
    return result


class Interrupted(Exception):
    """The error of a store whose connection is broken."""


class CutOffStore:
    """A store that fails after it was sent `sends` files, as if the connection broke."""

    at_once = False

    def __init__(self, place: Path, sends: int) -> None:
        self.other, self.left = store_of(str(place)), sends

    def folders(self) -> list[str]:
        return self.other.folders()

    def files(self, folder: str) -> dict[str, int]:
        return self.other.files(folder)

    def has(self, name: str, source: UploadSource) -> bool:
        return self.other.has(name, source)

    def send(self, name: str, source: UploadSource) -> None:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        self.other.send(name, source)

    def finish(self, name: str, content: bytes, old: Sequence[str] = ()) -> None:
        raise Interrupted

    def read(self, name: str, most_bytes: int) -> Iterator[bytes]:
        return self.other.read(name, most_bytes)

    def remove(self, folder: str, first: str, removed: Callable[[], None]) -> None:
        self.other.remove(folder, first, removed)


class BytesSource:
    """Bytes as a store gets them."""

    def __init__(self, content: bytes) -> None:
        self.content, self.size = content, len(content)

    def pieces(self) -> Iterator[bytes]:
        yield from (self.content[at : at + SEND_BYTES] for at in range(0, self.size, SEND_BYTES))

    def reader(self) -> BinaryIO:
        return io.BytesIO(self.content)

    def hexdigest(self, method: str) -> str:
        import hashlib

        return hashlib.new(method, self.content).hexdigest()

    def equals(self, pieces: Iterable[bytes]) -> bool:
        return self.content == b"".join(pieces)
