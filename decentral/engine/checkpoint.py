"""What a peer keeps on its disk: a checkpoint, the micro-batch numbers it has given out, and fragments it has given up.

A checkpoint is one safetensors file (engine/tensor_file.py), written beside the old one, fsynced, then renamed over it.
So `kill -9` or a full disk at any moment leaves the old checkpoint or the new one, never half of one.
"""

import json
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_arrays
from torch import Tensor

from decentral.core import strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import ProtocolError, UserError
from decentral.core.fragments import Layout, Section
from decentral.core.jobs import Donated, RetainedStates
from decentral.core.reasons import Reason
from decentral.core.strict_json import JsonFields, JsonObject
from decentral.engine.gossip_jobs import GossipedFragment
from decentral.engine.micro_batch_names import SPACE, MicroBatchNames
from decentral.engine.span import RetainedState, Span
from decentral.engine.step import Counters
from decentral.engine.tensor_file import SUMS, TensorFile, checksum
from decentral.engine.threads import Phase

FILE = "checkpoint.safetensors"
DAMAGED = "checkpoint.damaged"  # what a file is renamed to that cannot be read
COPY_ALIGNED = 64  # bytes
RESERVED = 1024  # micro-batch numbers given out for one write to the disk
ELSEWHERE = SPACE // 2  # the least number that no disk has reserved
Read = TypeVar("Read")


def write(folder: Path, tensors: Mapping[str, Tensor], facts: JsonFields) -> int:
    """Replaces the folder's checkpoint; `facts` are JSON. Gives its bytes. Raises OSError and leaves the old one."""
    file = TensorFile(folder / FILE, tensors)
    for name, tensor in tensors.items():
        file.add(name, tensor)
    return file.finish(facts)


def read(folder: Path) -> tuple[dict[str, Tensor], JsonObject] | None:
    """The tensors and facts of the folder's checkpoint; None where there is none. Raises UserError if it is damaged."""
    return _read(folder, _content)


def _content(file: Any, facts: JsonObject) -> tuple[dict[str, Tensor], JsonObject]:
    """Raises ValueError where a tensor is not what was written."""
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, expected in facts.pop(SUMS, {}).items():
        _check_sum(name, tensors[name], expected)
    return tensors, facts


def span(folder: Path) -> tuple[int, int] | None:
    """Layers [first, last) of the folder's checkpoint; None where there is none. Raises UserError, as `read` does."""
    return _read(folder, lambda _, facts: (int(facts["fragments"][0]["first"]), int(facts["fragments"][-1]["last"])))


def lr_step(folder: Path) -> int | None:
    """The swarm's step of the folder's checkpoint; None where there is none. Raises UserError, as `read` does."""
    return _read(folder, lambda _, facts: int(facts["lr_step"]))


def verify(folder: Path) -> None:
    """Reads the folder's checkpoint tensor by tensor. Raises UserError, as `read` does, if it is damaged."""
    _read(folder, _verified)


def _verified(file: Any, facts: JsonObject) -> bool:
    """True. Raises ValueError where a tensor is not what was written."""
    for name, expected in facts.get(SUMS, {}).items():
        _check_sum(name, file.get_tensor(name), expected)
    return True


def _check_sum(name: str, tensor: Tensor, expected: int) -> None:
    if checksum(tensor) != expected:
        raise ValueError(f"{name} has another checksum")


def _read(folder: Path, what: Callable[[Any, JsonObject], Read]) -> Read | None:
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return what(file, strict_json.loads(file.metadata()["facts"]))
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(folder, str(error)) from None


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be read, or whose content is not what was written."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder / FILE} is damaged ({why}); move it away to start from the swarm")
        self.folder, self.why = folder, why

    def set_aside(self) -> str:
        """Renames the file, so that the peer can start without it. Says so in one line. Raises OSError."""
        aside = self.folder / DAMAGED
        (self.folder / FILE).replace(aside)
        return f"the checkpoint is damaged ({self.why}) and now called {aside}; this peer starts from the swarm"


def save(folder: Path, span: Span, counters: Counters, whole: bool) -> Generator[Phase, None, int]:
    """Replaces the folder's checkpoint, fragment by fragment; gives its size in bytes.

    Raises OSError, and ProtocolError where a number is not finite, and leaves the old one: a replica that has diverged
    is worth less than what it was before.

    At a step edge the training thread copies one fragment (all fragments, if the checkpoint must be `whole`: of one
    step), and the worker writes it while training goes on. So the fragments may be some steps apart, as those of
    different peers always are; each is consistent in itself, with its optimizer's and its gossip's state.
    """
    yield Phase.BESIDE
    fragments = span.gossip.fragments
    groups = [fragments] if whole else [[one] for one in fragments]
    room = CopyRoom([[tensor for one in group for tensor in one.live.tensors().values()] for group in groups])
    file = TensorFile(folder / FILE, {name: like for one in fragments for name, like in one.checkpoint_shapes()})
    facts: JsonObject = {}
    windows, steps = [], []
    try:
        for group in groups:
            yield Phase.HELD
            room.clear()
            copies = [room.copied(one.live.tensors()) for one in group]
            facts = _facts(span.run.digest(), fragments, counters)
            windows += [one.counts() for one in group]
            steps += [one.live.steps for one in group]
            yield Phase.BESIDE
            for one, copied in zip(group, copies, strict=True):
                for name, tensor in one.with_rule(copied):
                    if not finite(tensor):
                        raise ProtocolError(Reason.NAN, f"{name} has numbers that are not finite")
                    file.add(name, tensor)
        return file.finish({**facts, "window": windows, "fragment_steps": steps})
    except BaseException:
        file.abandon()
        raise


def finite(tensor: Tensor) -> bool:
    """Whether all its numbers are finite. A sum says so in one fast pass, but where it is too large itself."""
    if not tensor.is_floating_point() or not tensor.numel() or bool(torch.isfinite(tensor.detach().sum())):
        return True
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor.detach(), ord=float("inf"))))


class CopyRoom:
    """Host memory for copies of one group of tensors at a time, touched already: the training thread only copies."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._room = torch.empty(max(sum(map(_aligned_bytes, group)) for group in groups), dtype=torch.uint8).fill_(0)
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            place = self._room[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor)
            self._used += _aligned_bytes(tensor)
        return copies


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // COPY_ALIGNED) * COPY_ALIGNED


def _facts(run: str, fragments: Sequence[GossipedFragment], counters: Counters) -> JsonObject:
    """`run`: the digest of its config."""
    return {
        "run": run,
        "fragments": [asdict(one.live.fragment) for one in fragments],
        "own_steps": counters.own_steps,
        "lr_step": counters.lr_step,
        "inner_steps": fragments[0].live.steps,
        "micro_batches": counters.micro_batches,
        "tokens": counters.tokens,
        "versions": {index: version.hex() for index, version in counters.versions.items()},
    }


def resume(folder: Path, span: Span, counters: Counters) -> bool:
    """Goes on from the folder's checkpoint, if there is one. Raises UserError if it is of another run or damaged."""
    found = read(folder)
    if found is None:
        return False
    tensors, facts = found
    if spoilt := sorted(name for name, tensor in tensors.items() if not finite(tensor)):
        raise DamagedCheckpoint(folder, f"{spoilt[0]} has numbers that are not finite")
    if facts["run"] != span.run.digest():
        raise UserError(f"{folder} holds a checkpoint of another run; use another --state-dir")
    try:
        span.gossip.load(tensors, facts["window"], facts["inner_steps"])
        for live, steps in zip(span.inner.lives, facts.get("fragment_steps", ()), strict=False):
            live.steps = steps
        counters.own_steps, counters.lr_step = facts["own_steps"], facts["lr_step"]
        counters.micro_batches, counters.tokens = facts["micro_batches"], facts["tokens"]
        counters.versions = {int(index): bytes.fromhex(text) for index, text in facts.get("versions", {}).items()}
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} holds a checkpoint of another model or optimizer ({error})") from None
    return True


class MicroBatchNumbers:
    """Numbers of drawn micro-batches that no restart gives out again, not even a restart from an old checkpoint.

    While the disk cannot be written, numbers come from blocks far above those that it has reserved, drawn by chance
    (two of them overlap with a probability of 1e-12), and the disk is tried again after each block.
    """

    def __init__(
        self,
        reserved: int,
        write: Callable[[int], None],
        names: MicroBatchNames,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """`draw(n)` gives a number below n by chance, another one in each life of the peer."""
        self.reserved = reserved  # every number of ours below ELSEWHERE is below this one, as the disk has it
        self.write = write  # puts a new value of `reserved` on the disk
        self.names, self.draw = names, draw
        self.least = reserved  # the least number that this process may give out
        self._elsewhere: Iterator[int] = iter(())

    @classmethod
    def of(cls, folder: Path) -> "MicroBatchNumbers":
        """The numbers of the peer in this folder. If the file is damaged, they go on in a block of their own."""
        path = folder / "position.json"
        try:
            reserved = int(strict_json.loads(path.read_text())) if path.exists() else 0
        except (OSError, ValueError, TypeError):
            reserved = secrets.randbelow(ELSEWHERE)
        names = MicroBatchNames.of(folder / "names.key")
        return cls(reserved, lambda new: write_atomically(path, json.dumps(new).encode()), names)

    def name(self, number: int) -> int:
        """The number by which other peers know this micro-batch: one of a pair by chance."""
        return self.names.pair(number) + self.draw(2)

    def take(self, wished: int) -> int:
        """The next number, from `wished` on where the disk can reserve it."""
        for number in self._elsewhere:
            return number
        number = max(wished, self.least)
        if number >= self.reserved:
            try:
                self.write(number + RESERVED)
            except OSError:
                return self._take_elsewhere()
            self.reserved = number + RESERVED
        self.least = number + 1
        return number

    def _take_elsewhere(self) -> int:
        first = ELSEWHERE + self.draw(ELSEWHERE - RESERVED)
        self._elsewhere = iter(range(first + 1, first + RESERVED))
        return first


@dataclass(frozen=True, slots=True)
class RetainedStateStore:
    """States of fragments that this peer has given up: a layer whose last holder is lost can be recovered from here.

    Each fragment has a file in the folder: the state as a newcomer would get it, with its sections, and the
    learning-rate step at which it was given up. Those of another run than the one with this digest count as none.
    """

    folder: Path
    run: str

    def write(self, state: Donated, step: int) -> None:
        """Replaces the retained state of this fragment. Raises OSError and leaves the old one."""
        fragment, layout, blob = state
        facts = {"run": self.run, "step": step, "layout": [asdict(section) for section in layout]}
        data = save_arrays({"state": np.frombuffer(blob, dtype=np.uint8)}, {"facts": json.dumps(facts)})
        write_atomically(self._path(fragment), data)

    def read(self, fragment: int) -> RetainedState | None:
        """The retained state of this fragment, or None if none of this run can be read."""
        if (found := self._facts(fragment)) is None:
            return None
        try:
            with safe_open(self._path(fragment), framework="np") as file:
                return *found, file.get_tensor("state").tobytes()
        except (SafetensorError, OSError):  # such as too many open files
            return None

    def forget(self, fragments: Iterable[int]) -> None:
        """Deletes the states of fragments that this peer holds again."""
        for fragment in fragments:
            with suppress(
                OSError
            ):  # a disk that is read-only: it is older than what we hold, which is all that it costs
                self._path(fragment).unlink(missing_ok=True)

    def steps(self, fragments: Iterable[int]) -> RetainedStates:
        """Which of these fragments have a retained state, each with its learning-rate step."""
        found = ((fragment, self._facts(fragment)) for fragment in fragments)
        return tuple((fragment, facts[0]) for fragment, facts in found if facts is not None)

    def _facts(self, fragment: int) -> tuple[int, Layout] | None:
        try:
            with safe_open(self._path(fragment), framework="np") as file:
                facts = strict_json.loads(file.metadata()["facts"])
            layout = tuple(Section(**section) for section in facts["layout"])
            return (int(facts["step"]), layout) if facts["run"] == self.run else None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, fragment: int) -> Path:
        return self.folder / f"kept-{fragment}.safetensors"
