"""Makes the faults happen to the swarm, one after another, and watches what becomes of each.

A fault begins when its time has come, and fewer than MOST_AT_ONCE others are still being recovered from. It is taken
back after its time, and is over when the peer trains again, and exchanges again where the network was hit.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks.soak.evidence import Evidence, Exit, Hit
from benchmarks.soak.faults import MOST_AT_ONCE, Fault
from benchmarks.soak.judge import MOST_RECOVERY_S
from benchmarks.soak.swarm import SoakSwarm, daemons, signal_all
from decentral.core.errors import ExitCode

TICK_S = 0.2
SAMPLE_S = 5.0
STALL_S = 5.0  # between two ticks: this process did not run, and perhaps none did
TAIL_S = 30.0  # watched after the last fault
OF_NETWORK = ("cut", "daemon")
KILLED = -signal.SIGKILL
# Exit codes of a peer that left when it was told to, the second one while it started.
LEFT = ExitCode.DONE, ExitCode.INTERRUPTED


class Driver:
    """One swarm, from when all have joined until they have left. What it sees is in `found`."""

    def __init__(self, swarm: SoakSwarm, found: Evidence, console: Console) -> None:
        self.swarm, self.found, self.console = swarm, found, console
        self.open: list[tuple[Hit, Fault]] = []  # of each place at most one
        self._ticked = self._sampled = time.time()

    def quiet(self, seconds: float) -> None:
        begin = time.time()
        self._until(lambda: time.time() >= begin + seconds)
        self.found.quiet = begin, time.time()

    def faults(self, plan: Sequence[Fault], seconds: float) -> None:
        """All faults of the plan; then all recover, and are watched for a while."""
        begin = time.time()
        self.found.faulty = begin, begin + seconds
        waiting = list(plan)
        while waiting or time.time() < begin + seconds:
            self._tick()
            due = waiting[0].at + begin + self._stalled(begin) if waiting else float("inf")
            if time.time() >= due and self._room_for(waiting[0]):
                self._begin(waiting.pop(0), time.time() - due)
        self.found.faulty = begin, time.time()
        self._until(lambda: not self.open)
        ended = time.time()
        self._until(lambda: time.time() >= ended + TAIL_S)
        self.found.tail = ended, time.time()

    def end(self) -> None:
        """All peers leave by Ctrl-C."""
        last = [self.swarm.at(place) for place in range(self.swarm.size)]
        self.swarm.stop()
        self.swarm.follow()
        for place, member in enumerate(last):
            self._ended(place, member.number, member.process.returncode, LEFT)
        self.found.tracebacks = self.swarm.tracebacks()
        for number in sorted(self.swarm.journals):
            self.found.journals.setdefault(number % self.swarm.size, []).append(self.swarm.journals[number])

    def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._tick()

    def _tick(self) -> None:
        time.sleep(TICK_S)
        now, before = time.time(), self._ticked
        self._ticked = now
        if now - before > STALL_S:
            self.found.stalls.append((before, now))
            for hit, _ in self.open:
                hit.stalled_s += 0.0 if hit.lifted is None else now - before
        self.swarm.follow()
        for hit, fault in list(self.open):
            self._advance(hit, fault, now)
        self._look_for_dead(now)
        if now >= self._sampled + SAMPLE_S:
            self._sampled = now
            self.found.samples += self.swarm.samples(now)
            for place in range(self.swarm.size):
                used = max(self.found.disk_bytes.get(place, 0), self.swarm.disk_bytes(place))
                self.found.disk_bytes[place] = used

    def _room_for(self, fault: Fault) -> bool:
        return len(self.open) < MOST_AT_ONCE and all(hit.place != fault.place for hit, _ in self.open)

    def _stalled(self, since: float) -> float:
        return sum(end - begin for begin, end in self.found.stalls if begin >= since)

    def _begin(self, fault: Fault, late_s: float) -> None:
        place, swarm = fault.place, self.swarm
        pid = swarm.at(place).process.pid
        hit = Hit(fault.kind, place, time.time(), late_s)
        match fault.kind:
            case "kill" | "replace":
                self._kill(place)
            case "leave":
                os.kill(pid, signal.SIGTERM)
            case "freeze":
                signal_all(pid, signal.SIGSTOP)
            case "full":
                swarm.fill(place)
            case "cut":
                assert swarm.lab is not None
                swarm.lab.change(f"part {place} for {fault.lasts}")
            case "daemon":
                for one in daemons(pid):
                    os.kill(one, signal.SIGKILL)
        self.found.hits.append(hit)
        self.open.append((hit, fault))
        self._say(f"place {place}: {fault.kind} for {fault.lasts:.0f} s")

    def _kill(self, place: int) -> None:
        member = self.swarm.at(place)
        member.process.kill()
        member.process.wait()
        self._ended(place, member.number, member.process.returncode, (KILLED,))

    def _advance(self, hit: Hit, fault: Fault, now: float) -> None:
        """Takes a fault back when its time has come, and sees whether it is over."""
        if hit.lifted is None:
            if now >= hit.began + fault.lasts and self._lift(hit):
                hit.lifted = time.time()
        elif self._recovered(hit):
            hit.over = now
            self.open.remove((hit, fault))
            self._say(f"place {hit.place}: {hit.kind} is over, {hit.recovered_s:.1f} s after it was taken back")
        elif now > hit.lifted + hit.stalled_s + MOST_RECOVERY_S:
            self.open.remove((hit, fault))
            self._say(f"place {hit.place} has not recovered from {hit.kind}")

    def _lift(self, hit: Hit) -> bool:
        """False: not yet."""
        place, swarm = hit.place, self.swarm
        member = swarm.at(place)
        match hit.kind:
            case "kill" | "itself":
                swarm.restart(place)
            case "replace":
                others = {one.place for one, _ in self.open}
                swarm.replace(place, next(at for at in range(swarm.size) if at not in others))
            case "leave":
                if member.process.poll() is None:
                    return False
                self._ended(place, member.number, member.process.returncode, LEFT)
                swarm.restart(place)
            case "freeze":
                signal_all(member.process.pid, signal.SIGCONT)
            case "full":
                swarm.free(place)
        return True

    def _recovered(self, hit: Hit) -> bool:
        assert hit.lifted is not None
        number = self.swarm.at(hit.place).number
        wanted = ("step", "exchange") if hit.kind in OF_NETWORK else ("step",)
        return all(self.swarm.latest(number, event, hit.lifted) for event in wanted)

    def _look_for_dead(self, now: float) -> None:
        """A peer that ends by itself is noted, and started again."""
        hit_ones = {hit.place for hit, _ in self.open if hit.kind in ("kill", "replace", "leave", "itself")}
        for place in range(self.swarm.size):
            member = self.swarm.at(place)
            if place not in hit_ones and member.process.poll() is not None:
                self._ended(place, member.number, member.process.returncode, ())
                self.open = [one for one in self.open if one[0].place != place]
                hit = Hit("itself", place, now)
                self.found.hits.append(hit)
                self.open.append((hit, Fault(0.0, "itself", place, 0.0)))
                self.swarm.free(place)

    def _ended(self, place: int, number: int, code: int | None, expected: tuple[int, ...]) -> None:
        self.found.exits.append(Exit(place, number, code, expected, self.swarm.last_words(number)))
        if code not in expected:
            self._say(f"place {place}: peer {number} ended with {code}: {self.swarm.last_words(number)}")

    def _say(self, text: str) -> None:
        since = self.found.faulty[0] or time.time()
        self.console.print(f"{time.time() - since:5.0f} s  {text}", markup=False, soft_wrap=True)
