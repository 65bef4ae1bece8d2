"""A gloo process group whose members come and go, as torchelastic's rendezvous has it, but within living processes.

Place 0 leads: it holds the store, and says who is in each generation of the group. When a collective fails (somebody
died) or somebody waits to be let in, all leave the group and ask for the next one. The leader writes its list when
every member of the last one has asked or is dead, which is what a member is that has sent no heartbeat for a while.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from benchmarks.wan.namespaces import DEVICE

Gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
PORT = 29400
BEAT_S = 0.4  # between two heartbeats
DEAD_S = 2.0  # without one a member is dead
START_S = 120.0
FORMING_S = 40.0  # of a member with the list of a generation that it asked for
LOOK_S = 0.05


class Lost(Exception):
    """A collective failed: somebody has died, or cannot be reached. `form` makes a group of those who are left."""


class Group:
    """Create it, then `form`. Errors of collectives are `Lost`."""

    def __init__(self, name: str, leads: bool, leader: str, peers: int, timeout_s: float) -> None:
        """`peers`: how many are there at the beginning; `timeout_s`: of a collective."""
        self.name, self.leads, self.timeout = name, leads, timedelta(seconds=timeout_s)
        self.interface = DEVICE
        self._store = self._connect(leader)
        self._generation = 0
        self._last = [f"{place}-0" for place in range(peers)]
        self._group: Any = None
        self.rank, self.size = 0, 0
        if leads:
            self._store.set("generation", "0")
        threading.Thread(target=self._beat, args=(self._connect(leader, leads=False),), daemon=True).start()

    def _connect(self, leader: str, leads: bool | None = None) -> Store:
        leads = self.leads if leads is None else leads
        host = "0.0.0.0" if leads else "127.0.0.1" if self.leads else leader
        return TCPStore(host, PORT, None, leads, timeout=timedelta(seconds=START_S), wait_for_workers=False)

    def _beat(self, store: Store) -> None:
        while True:
            store.add(f"beat {self.name}", 1)
            time.sleep(BEAT_S)

    def form(self, first: bool = False) -> None:
        """Leaves the group, and forms the next one with all who want to be in it."""
        while True:
            self._group = None  # its connections close, so that the others see it
            try:
                world = self._next_world(first)
                if self.name not in world:
                    continue
                self.rank, self.size, self._last = world.index(self.name), len(world), world
                options = Gloo._Options()
                options._devices = [Gloo.create_device(interface=self.interface)]
                options._timeout = self.timeout
                store = PrefixStore(f"group {self._generation}", self._store)
                self._group = Gloo(store, self.rank, self.size, options)
                self.barrier()
                return
            except (RuntimeError, Lost):
                time.sleep(LOOK_S)

    def _next_world(self, first: bool) -> list[str]:
        generation = int(self._store.get("generation")) + 1
        if self.leads:
            self._generation = generation
        ticket = self._store.add(f"{generation}/count", 1)
        self._store.set(f"{generation}/{ticket}", self.name)
        if self.leads:
            self._write_world(generation)
        self._generation = generation
        self._store.wait([f"{generation}/world"], timedelta(seconds=START_S if first else FORMING_S))
        return list(json.loads(self._store.get(f"{generation}/world")))

    def _write_world(self, generation: int) -> None:
        beats = dict.fromkeys(self._last, (-1, time.monotonic()))  # by member: its last count, and since when
        while True:
            count = self._store.add(f"{generation}/count", 0)
            asked = {self._store.get(f"{generation}/{ticket}").decode() for ticket in range(1, count + 1)}
            now = time.monotonic()
            for member, (beat, _) in beats.items():
                if (new := self._store.add(f"beat {member}", 0)) != beat:
                    beats[member] = (new, now)
            if all(member in asked or (beat > 0 and now - at > DEAD_S) for member, (beat, at) in beats.items()):
                break
            time.sleep(LOOK_S)
        self._store.set("generation", str(generation))
        self._store.set(f"{generation}/world", json.dumps([self.name, *sorted(asked - {self.name})]))

    def someone_waits(self) -> bool:
        """Whether somebody wants to be let in; only the leader knows."""
        return self.leads and self._store.add(f"{self._generation + 1}/count", 0) > 0

    def mean(self, vector: Tensor, half: bool = False) -> tuple[Tensor, bool]:
        """The mean over all members of a vector [n], and whether somebody waits. `half`: it travels in fp16."""
        flag = torch.tensor([float(self.someone_waits())])
        flat = torch.cat([vector / self.size, flag])
        flat = flat.half() if half else flat
        self._do(lambda group: group.allreduce([flat]))
        return flat[:-1].float(), bool(flat[-1] > 0)

    def barrier(self) -> None:
        ones = torch.ones(1)
        self._do(lambda group: group.allreduce([ones]))

    def agree(self, state: list[Tensor], progress: int) -> int:
        """Where members are not equally far, all take the state of the one that is farthest. Gives how far it is."""
        mine, all_progress = torch.tensor([float(progress)]), [torch.zeros(1) for _ in range(self.size)]
        self._do(lambda group: group.allgather([all_progress], [mine], AllgatherOptions()))
        far = [float(one) for one in all_progress]
        if min(far) == max(far):
            return progress
        flat = torch.cat([one.detach().float().flatten() for one in state])
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = far.index(max(far)), 0
        self._do(lambda group: group.broadcast([flat], options))
        for one, part in zip(state, torch.split(flat, [one.numel() for one in state]), strict=True):
            one.data.copy_(part.view(one.shape))
        return int(max(far))

    def _do(self, collective: Callable[[Any], Work]) -> None:
        if self._group is None:
            raise Lost("there is no group")
        try:
            collective(self._group).wait()
        except RuntimeError as error:
            self._group = None
            raise Lost(str(error)) from None
