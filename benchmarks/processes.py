"""What processes use, from /proc: CPU seconds by thread, and resident memory. Linux only."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU seconds of a peer: its event loop, its training thread, its other threads, and its network daemon."""

    loop: float
    training: float
    others: float
    daemon: float

    def __truediv__(self, seconds: float) -> "CpuSeconds":
        return CpuSeconds(self.loop / seconds, self.training / seconds, self.others / seconds, self.daemon / seconds)

    @property
    def beside(self) -> float:
        """All but the training thread's."""
        return self.loop + self.others + self.daemon


def cpu_by_thread(pid: int) -> dict[int, float]:
    """CPU seconds so far of each thread of a process, by the thread's number."""
    found = {}
    for task in _tasks(pid):
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # the thread has ended
            continue
    return found


def cpu_of_peer(pid: int) -> dict[int, dict[int, float]]:
    """By process, the peer's own first, CPU seconds so far of each thread of it and of its children."""
    children = [int(child) for task in _tasks(pid) for child in (task / "children").read_text().split()]
    return {process: cpu_by_thread(process) for process in (pid, *children)}


def spent(pid: int, before: dict[int, dict[int, float]], after: dict[int, dict[int, float]]) -> CpuSeconds:
    """What a peer used between two calls of cpu_of_peer. Of its threads beside the loop, the busiest one trains."""
    own = {thread: total - before[pid].get(thread, 0.0) for thread, total in after[pid].items()}
    loop = own.pop(pid, 0.0)
    training = max(own.values(), default=0.0)
    daemons = [
        total - before.get(process, {}).get(thread, 0.0)
        for process, threads in after.items()
        if process != pid
        for thread, total in threads.items()
    ]
    return CpuSeconds(loop, training, sum(own.values()) - training, sum(daemons))


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in RAM."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def started_at(pid: int) -> float:
    """The Unix time at which a process was started, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())
