"""Write and read the checkpoint and the other files that a peer needs after a restart.

Start reading at `save` and `resume`. A checkpoint is one safetensors file (`TensorFile`). The new file is written
beside the old file, fsynced, then renamed over it. So `kill -9` or a full disk at any moment leaves either the old or
the new checkpoint whole. Other files have states of fragments that the peer does not hold (`RetainedStateStore`), and
the used micro-batch numbers (micro_batch_numbers.py).
"""

import errno
import json
import shutil
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

from decentral.core import foreign_file, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import ProtocolError, UserError
from decentral.core.fragments import Layout, Section
from decentral.core.jobs import Donated, RetainedStates
from decentral.core.peer_folders import CHECKPOINT
from decentral.core.reasons import Reason
from decentral.core.strict_json import JsonFields, JsonObject
from decentral.engine.gossip_jobs import GossipedFragment
from decentral.engine.span import RetainedState, Span
from decentral.engine.step import Counters
from decentral.engine.tensor_file import SUMS, TensorFile, checksum
from decentral.engine.threads import Phase

FILE = CHECKPOINT
DAMAGED = "checkpoint.damaged"  # an unreadable checkpoint is renamed to this, so that the peer can start without it
COPY_ALIGNED = 64  # each tensor begins at a multiple of this many bytes, the size of a cache line
# Retained states and copies may take at most this share of the disk space that would be free without them.
COPIES_SHARE = 0.2
Read = TypeVar("Read")


def write(folder: Path, tensors: Mapping[str, Tensor], facts: JsonFields) -> int:
    """Replace the folder's checkpoint, and return the new file's size in bytes.

    Args:
        folder: The peer's state folder.
        tensors: Tensors by name.
        facts: JSON fields to store beside the tensors.

    Raises:
        OSError: If the file cannot be written; the old checkpoint stays.
    """
    file = TensorFile(folder / FILE, tensors)
    for name, tensor in tensors.items():
        file.add(name, tensor)
    return file.finish(facts)


def read(folder: Path) -> tuple[dict[str, Tensor], JsonObject] | None:
    """Return the tensors and JSON facts of the folder's checkpoint; None if the folder has no checkpoint.

    Raises:
        DamagedCheckpoint: If the file cannot be read, or a tensor's checksum does not match.
    """
    return _read(folder, _content)


def _content(file: Any, facts: JsonObject) -> tuple[dict[str, Tensor], JsonObject]:
    """Return all tensors by name, and `facts`, from which this function removes the checksums.

    Raises:
        ValueError: If a tensor's checksum does not match.
    """
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, expected in facts.pop(SUMS, {}).items():
        _check_sum(name, tensors[name], expected)
    return tensors, facts


def span(folder: Path) -> tuple[int, int] | None:
    """Return (first, last) if the folder's checkpoint has the layers [first, last); None if there is no checkpoint.

    Raises:
        DamagedCheckpoint: If the checkpoint's header cannot be read.
    """
    return _read(folder, lambda _, facts: (int(facts["fragments"][0]["first"]), int(facts["fragments"][-1]["last"])))


def lr_step(folder: Path) -> int | None:
    """Return the learning-rate step that the folder's checkpoint stores for the swarm; None if there is no checkpoint.

    Raises:
        DamagedCheckpoint: If the checkpoint's header cannot be read.
    """
    return _read(folder, lambda _, facts: int(facts["lr_step"]))


def verify(folder: Path) -> None:
    """Raise DamagedCheckpoint if a checksum in the folder's checkpoint does not match; do nothing without a checkpoint.

    Only one tensor is in memory at a time.
    """
    _read(folder, _verified)


def _verified(file: Any, facts: JsonObject) -> bool:
    """Return True if each tensor has the checksum that `facts` has for it. Raises ValueError if a checksum differs."""
    for name, expected in facts.get(SUMS, {}).items():
        _check_sum(name, file.get_tensor(name), expected)
    return True


def _check_sum(name: str, tensor: Tensor, expected: int) -> None:
    if checksum(tensor) != expected:
        raise ValueError(f"the checksum of tensor {name} does not match")


def _read(folder: Path, what: Callable[[Any, JsonObject], Read]) -> Read | None:
    path = folder / FILE
    while path.exists():
        version = _version(path)
        try:
            foreign_file.require_fit(path)
            with safe_open(path, framework="pt") as file:
                return what(file, strict_json.loads(file.metadata()["facts"]))
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            # safetensors opens the path again for the tensors, and a running peer may have replaced the file by then.
            if _version(path) == version:
                raise DamagedCheckpoint(folder, str(error)) from None
    return None


def _version(path: Path) -> tuple[int, int] | None:
    """Return what tells this file from one that replaces it; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


class DamagedCheckpoint(UserError):
    """Raised if a checkpoint cannot be read, or its content differs from what was written."""

    def __init__(self, folder: Path, why: str) -> None:
        """Build the error's text from the state folder and `why`, a description of the damage."""
        super().__init__(f"{folder / FILE} is damaged ({why}); move it away to start with the swarm's weights")
        self.folder, self.why = folder, why

    def set_aside(self) -> str:
        """Rename the checkpoint to DAMAGED so that the peer can start without it, and return a line for the user.

        Raises:
            OSError: If the checkpoint cannot be renamed.
        """
        aside = self.folder / DAMAGED
        (self.folder / FILE).replace(aside)
        remedy = "this peer starts with the swarm's weights"
        return f"the checkpoint is damaged ({self.why}) and now called {aside}; {remedy}"


def save(folder: Path, span: Span, counters: Counters, whole: bool) -> Generator[Phase, None, tuple[int, int]]:
    """Return a program (see `threads`) that writes a checkpoint and returns its learning-rate step and size in bytes.

    Unless `whole`, the training thread copies only one fragment between two steps, and the worker thread writes the
    copy while training goes on. So copies of two fragments may be some steps apart, but each copy has the weights,
    optimizer state and gossip state of the same step.

    Args:
        folder: The peer's state folder.
        span: The layers that the peer holds.
        counters: The peer's counters; the checkpoint stores them.
        whole: Copy all fragments between the same two steps, as synchronous rounds need.

    Raises:
        OSError: If the file cannot be written; the old checkpoint stays.
        ProtocolError: If a tensor has a number that is not finite: training has diverged, and the old checkpoint stays.
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
            copies = [one.live.copied(room) for one in group]
            facts = _facts(span.run.digest(), fragments, counters)
            windows += [one.counts() for one in group]
            steps += [one.live.steps for one in group]
            yield Phase.BESIDE
            for one, copied in zip(group, copies, strict=True):
                for name, tensor in one.with_rule(copied):
                    if not finite(tensor):
                        raise ProtocolError(Reason.NAN, f"tensor {name} has a number that is not finite")
                    file.add(name, tensor)
                    del tensor  # the next one may be a new vector
        return facts["lr_step"], file.finish({**facts, "window": windows, "fragment_steps": steps})
    except BaseException:
        file.abandon()
        raise


def finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite.

    If the sum is finite, all numbers are finite. If not, the sum of finite numbers may have overflowed, so a second
    pass checks the largest absolute value.
    """
    if not tensor.is_floating_point() or not tensor.numel() or bool(torch.isfinite(tensor.detach().sum())):
        return True
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor.detach(), ord=float("inf"))))


class CopyRoom:
    """A buffer in host memory for copies of tensors. After `clear`, the next group of tensors reuses its memory."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Allocate the bytes that the largest group needs, and write zeros so that copies need no new memory pages."""
        self._room = torch.empty(max(sum(map(_aligned_bytes, group)) for group in groups), dtype=torch.uint8).fill_(0)
        self._used = 0

    def clear(self) -> None:
        """Discard all copies: the next call of `copied` begins at the buffer's start."""
        self._used = 0

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append copies of the tensors to the buffer, and return these copies by name."""
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
    """Return a checkpoint's JSON facts: the digest `run` of the run's config, the fragments and the counters."""
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
    """Load the folder's checkpoint into `span` and `counters`; return False if there is no checkpoint.

    Only the tensors of one fragment are in memory at a time, beside the span's own.

    Raises:
        DamagedCheckpoint: If the checkpoint is damaged, or has a number that is not finite.
        UserError: If the checkpoint is of another run, model or optimizer.
    """
    return _read(folder, lambda file, facts: _resumed(tuple(file.keys()), facts, folder, span, counters)) is not None


def _resumed(names: Sequence[str], facts: JsonObject, folder: Path, span: Span, counters: Counters) -> bool:
    stored, sums = StoredTensors(folder / FILE, names), facts.pop(SUMS, {})
    for name in sorted({*stored, *sums}):
        tensor = stored[name]
        if name in sums:
            _check_sum(name, tensor, sums[name])
        if not finite(tensor):
            raise ValueError(f"tensor {name} has a number that is not finite")
    if facts["run"] != span.run.digest():
        raise UserError(f"{folder} has a checkpoint of another run; use another --state-dir")
    try:
        windows = [(tokens, resting) for tokens, *_, resting in facts["window"]]  # a sum of rates until wire version 11
        span.gossip.load(stored, windows, facts["inner_steps"])
        for live, steps in zip(span.inner.lives, facts.get("fragment_steps", ()), strict=False):
            live.steps = steps
        counters.own_steps, counters.lr_step = facts["own_steps"], facts["lr_step"]
        counters.micro_batches, counters.tokens = facts["micro_batches"], facts["tokens"]
        counters.versions = {int(index): bytes.fromhex(text) for index, text in facts.get("versions", {}).items()}
    except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} is of another model or optimizer ({error}); use another --state-dir") from None
    return True


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint file by name; each access to a tensor reads it from the disk."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """Read from the safetensors file `path`, which has tensors of these names."""
        self._path, self._names = path, names

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor. Raises KeyError if the file has none of this name.

        Each call maps the file anew, because pages read through an open mapping count as this process's memory.
        """
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self._path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._names)


@dataclass(frozen=True, slots=True)
class RetainedStateStore:
    """A store on disk for states of fragments that this peer does not hold; lost layers can be recovered from them.

    Each fragment has one file, with the state that a holder sends to a joining peer, and the state's learning-rate
    step. The state is either the state that this peer had when it gave the fragment up, or a copy of another holder's
    state. Files of another run are ignored.
    """

    folder: Path
    run: str  # digest of the run's config; a file with another digest is ignored

    def write(self, state: Donated, step: int) -> None:
        """Write a fragment's state in place of an older one. Raises OSError if the disk fails; the old state stays."""
        fragment, layout, blob = state
        facts = {"run": self.run, "step": step, "layout": [asdict(section) for section in layout]}
        data = save_arrays({"state": np.frombuffer(blob, dtype=np.uint8)}, {"facts": json.dumps(facts)})
        write_atomically(self._path(fragment), data)

    def write_copy(self, state: Donated, step: int) -> None:
        """Write another holder's state of a fragment in place of an older one.

        Raises:
            OSError: If the folder's states would take more than COPIES_SHARE of the disk space that would be free
                without them, or the disk fails; the old state stays.
        """
        sizes = {path: path.stat().st_size for path in self.folder.glob("kept-*.safetensors")}
        free, others = shutil.disk_usage(self.folder).free + sum(sizes.values()), {**sizes, self._path(state[0]): 0}
        if sum(others.values()) + len(state[2]) > COPIES_SHARE * free:
            raise OSError(errno.ENOSPC, f"a copy of {len(state[2])} bytes is too large for the disk; free more space")
        self.write(state, step)

    def read(self, fragment: int) -> RetainedState | None:
        """Return a fragment's retained state; None if the folder has no readable state of this fragment and run."""
        if (found := self._step_and_layout(fragment)) is None:
            return None
        try:
            with safe_open(self._path(fragment), framework="np") as file:
                return *found, file.get_tensor("state").tobytes()
        except (SafetensorError, OSError):
            return None

    def forget(self, fragments: Iterable[int]) -> None:
        """Delete the retained states of these fragments. A file that cannot be deleted stays."""
        for fragment in fragments:
            with suppress(OSError):
                self._path(fragment).unlink(missing_ok=True)

    def steps(self, fragments: Iterable[int]) -> RetainedStates:
        """Return (fragment, learning-rate step) for each of `fragments` that has a retained state of this run."""
        found = ((fragment, self._step_and_layout(fragment)) for fragment in fragments)
        return tuple((fragment, facts[0]) for fragment, facts in found if facts is not None)

    def _step_and_layout(self, fragment: int) -> tuple[int, Layout] | None:
        try:
            with safe_open(self._path(fragment), framework="np") as file:
                facts = strict_json.loads(file.metadata()["facts"])
            layout = tuple(Section(**section) for section in facts["layout"])
            return (int(facts["step"]), layout) if facts["run"] == self.run else None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, fragment: int) -> Path:
        return self.folder / f"kept-{fragment}.safetensors"
