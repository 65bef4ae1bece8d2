"""A stand-in for an accelerator, on which the engine's own code runs, and which checks the order of streams.

Tensors of the stand-in are CPU tensors that say that they are on DEVICE, and its streams and events do nothing but
order. Each operation notes which buffers it reads and writes, and on which stream; an operation that is not ordered
after the last write of what it reads, or after the last uses of what it writes, raises OutOfOrder. On a real device
such an operation would sometimes see half-written memory.

Order is kept by vector clocks (Lamport 1978; Mattern 1989). The threads of the host count as one actor: that they wait
for each other is the subject of other tests.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 1)
HOST = "host"
Clock = dict[str, int]  # by actor (a stream or HOST), the number of its operations that are known to be over


class OutOfOrder(AssertionError):
    """An operation uses a buffer that an operation of another stream may still be writing or reading."""


@dataclass(slots=True)
class Buffer:
    """A storage: whether it is in the device's memory, its last write, and the reads since."""

    storage: torch.UntypedStorage  # kept, so that no other storage gets its address
    on_device: bool = False
    made_on: str = ""  # the side stream that allocated it: others use it only after `record_stream`
    recorded: set[str] = field(default_factory=set)
    written: tuple[str, int] | None = None
    read: Clock = field(default_factory=dict)


class Order:
    """What is known of each buffer, and each actor's clock."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.lock = threading.RLock()

    def buffer(self, tensor: torch.Tensor) -> Buffer:
        storage = tensor.untyped_storage()
        return self.buffers.setdefault(storage.data_ptr() or id(tensor), Buffer(storage))

    def join(self, actor: str, other: Mapping[str, int]) -> None:
        clock = self.clocks.setdefault(actor, {})
        clock.update({one: max(count, clock.get(one, 0)) for one, count in other.items()})

    def use(self, actor: str, reads: list[Buffer], writes: list[Buffer], what: str) -> None:
        if actor != HOST:  # a stream's work comes after what the host did before it queued this work
            self.join(actor, self.clocks[HOST])
        clock = self.clocks.setdefault(actor, {})
        clock[actor] = clock.get(actor, 0) + 1
        for buffer in [*reads, *writes]:
            if buffer.made_on and actor not in (HOST, buffer.made_on, *buffer.recorded):
                raise OutOfOrder(f"{what} on {actor} uses memory that may be given to others on {buffer.made_on}")
            if buffer.written and clock.get(buffer.written[0], 0) < buffer.written[1]:
                raise OutOfOrder(f"{what} on {actor} uses what {buffer.written[0]} may still be writing")
        for buffer in writes:
            late = [one for one, count in buffer.read.items() if clock.get(one, 0) < count]
            if late:
                raise OutOfOrder(f"{what} on {actor} writes what {late[0]} may still be reading")
            buffer.written, buffer.read = (actor, clock[actor]), {}
        for buffer in reads:
            buffer.read[actor] = clock[actor]


class OwnStream:
    """A stream of the stand-in."""

    def __init__(self, device: "StandIn", name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: "OwnEvent") -> None:
        self.device.order.join(self.name, event.clock)

    def wait_stream(self, stream: "OwnStream") -> None:
        self.device.order.join(self.name, self.device.order.clocks.get(stream.name, {}))

    def synchronize(self) -> None:
        self.device.order.join(HOST, self.device.order.clocks.get(self.name, {}))


class OwnEvent:
    """An event of the stand-in."""

    def __init__(self, device: "StandIn") -> None:
        self.device, self.clock = device, Clock()

    def record(self, stream: OwnStream | None = None) -> None:
        """Mark what is queued on the stream; like torch's, without a stream, on the present stream of GPU 0."""
        name = self.device.present(0).name if stream is None else stream.name
        self.clock = dict(self.device.order.clocks.get(name, {}))

    def synchronize(self) -> None:
        self.device.order.join(HOST, self.clock)


class StandIn:
    """Stands for the module torch.cuda, with two GPUs."""

    def __init__(self) -> None:
        self.order, self.mine, self.made = Order(), threading.local(), 0

    def Stream(self, device: torch.device) -> OwnStream:
        self.made += 1
        return OwnStream(self, f"{device} side {self.made}")

    def Event(self, blocking: bool = False) -> OwnEvent:
        return OwnEvent(self)

    def present(self, index: int) -> OwnStream:
        """The calling thread's stream of a GPU."""
        chosen: dict[int, OwnStream] = self.mine.__dict__.setdefault("streams", {})
        return chosen.get(index, OwnStream(self, f"cuda:{index}"))

    def current_stream(self, device: torch.device) -> OwnStream:
        return self.present(device.index or 0)

    @contextmanager
    def stream(self, stream: OwnStream) -> Iterator[None]:
        before = dict(self.mine.__dict__.setdefault("streams", {}))
        self.mine.streams[DEVICE.index] = stream
        yield
        self.mine.streams = before

    def synchronize(self, device: torch.device) -> None:
        for name, clock in list(self.order.clocks.items()):
            if name.startswith(f"cuda:{device.index or 0}"):
                self.order.join(HOST, clock)

    def device_count(self) -> int:
        return 2

    def empty_cache(self) -> None:
        pass


class _Places(TorchFunctionMode):
    """Lets tensors of the stand-in say that they are on DEVICE, and creates them."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device, self.order = device, device.order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is torch.Tensor.device:
            return DEVICE if self.order.buffer(args[0]).on_device else func(*args)
        if name == "pin_memory":
            return args[0]
        if name in ("numpy", "tolist", "item", "__float__", "__bool__"):
            with self.order.lock:
                self.order.use(HOST, [self.order.buffer(args[0])], [], name)
            return func(*args, **kwargs)
        if name in ("to", "cpu"):
            return self._moved(name, args, kwargs)
        if kwargs.get("device") is not None:
            here = torch.device(kwargs["device"]) == DEVICE
            made = func(*args, **{**kwargs, "device": "cpu"})
            if here:
                self.order.buffer(made).on_device = True
            return made
        return func(*args, **kwargs)

    def _moved(self, name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        tensor, others = args[0], list(args[1:])
        wait = not kwargs.pop("non_blocking", False)
        kwargs.pop("copy", None)
        target = torch.device("cpu") if name == "cpu" else kwargs.pop("device", None)
        if isinstance(others[0] if others else None, torch.device | str):
            target = torch.device(others.pop(0))
        dtype = kwargs.pop("dtype", None) or next((one for one in others if isinstance(one, torch.dtype)), tensor.dtype)
        here, there = self.order.buffer(tensor).on_device, target == DEVICE
        if target is None or here == there:
            return torch.Tensor.type(tensor, dtype) if dtype != tensor.dtype else tensor
        moved = torch.empty(tensor.shape, dtype=dtype)
        buffer, stream = self.order.buffer(moved), self.device.current_stream(DEVICE)
        buffer.on_device, buffer.made_on = there, stream.name if there and "side" in stream.name else ""
        moved.copy_(tensor)
        if wait:
            stream.synchronize()
        return moved


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each operation reads and writes: on the present stream if one of its tensors is on the device."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.order = device, device.order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, torch.Tensor)]
        written: list[torch.Tensor] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        with self.order.lock:
            known = {id(self.order.buffer(one)) for one in given}
            on_device = any(self.order.buffer(one).on_device for one in given)
            made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            new = [self.order.buffer(one) for one in made if id(self.order.buffer(one)) not in known]
            for buffer in new:
                buffer.on_device = on_device
            views = not written and made and not new
            if not views:
                writes = [self.order.buffer(one) for one in written]
                reads = [one for one in map(self.order.buffer, given) if all(one is not other for other in writes)]
                actor = self.device.current_stream(DEVICE).name if on_device else HOST
                self.order.use(actor, reads, [*writes, *new], str(func))
        return result


class Standing:
    """Both modes, entered in each thread that starts meanwhile."""

    def __init__(self, device: StandIn) -> None:
        self.device = device

    def __enter__(self) -> StandIn:
        self.modes = _Places(self.device), _Uses(self.device)
        for mode in self.modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self.device

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(kind, error, at)  # type: ignore[no-untyped-call]


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Let torch have DEVICE, in this thread and in those that start meanwhile."""
    device, run = StandIn(), threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with Standing(device):
            run(thread)

    def record_stream(tensor: torch.Tensor, stream: OwnStream) -> None:
        device.order.buffer(tensor).recorded.add(stream.name)

    monkeypatch.setattr(threading.Thread, "run", run_there)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.accelerator, "synchronize", device.synchronize)
    with Standing(device):
        yield device
