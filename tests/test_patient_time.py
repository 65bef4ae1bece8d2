"""Time in tests of swarms stands still while the machine is busy with other things."""

import asyncio
from pathlib import Path

import pytest

from tests.patient_time import LEAST_SHARE, SHARE_EVERY_S, TURN_S, PatientLoop, ProcessorShare


class Machine:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Processes:
    """What Linux would say of this process's one thread and of its child's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.say("self", "1", 5_000_000_000, 7_000_000_000, child="9")
        self.say("9", "9", 0, 0)

    def say(self, process: str, thread: str, ran_ns: int, waited_ns: int, child: str = "") -> None:
        task = self.folder / process / "task" / thread
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran_ns} {waited_ns} 3\n")
        (task / "children").write_text(child)


def test_a_turn_that_took_long_counts_little_and_a_short_one_as_it_is() -> None:
    machine = Machine()
    loop = PatientLoop(machine, lambda: 1.0)
    began = loop.time()
    machine.at += 30.0
    assert loop.time() == pytest.approx(began + TURN_S)
    machine.at += TURN_S / 2
    assert loop.time() == pytest.approx(began + 1.5 * TURN_S)
    loop.close()


def test_time_passes_as_slowly_as_the_processes_get_on() -> None:
    machine = Machine()
    loop = PatientLoop(machine, lambda: 0.25)
    machine.at += SHARE_EVERY_S
    began = loop.time()
    machine.at += TURN_S / 2
    assert loop.time() == pytest.approx(began + TURN_S / 8)
    loop.close()


def test_the_share_is_that_of_late_and_of_all_threads_and_children(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    share = ProcessorShare(tmp_path)
    assert share.look() == 1.0, "what was before does not count"
    processes.say("9", "9", 10_000_000_000, 30_000_000_000)
    assert share.look() == pytest.approx(0.25, rel=1e-3)
    for _ in range(200):
        share.look()
    assert share.look() == pytest.approx(1.0, abs=0.01)
    processes.say("9", "9", 10_000_000_000, 90_000_000_000)
    assert share.look() == LEAST_SHARE


def test_where_the_system_counts_nothing_the_share_is_1(tmp_path: Path) -> None:
    assert ProcessorShare(tmp_path).look() == 1.0


def test_a_deadline_is_not_missed_because_the_process_was_not_let_run() -> None:
    machine = Machine()

    async def story() -> None:
        async with asyncio.timeout(10 * TURN_S):
            machine.at += 60.0
            await asyncio.sleep(0)

    PatientLoop(machine, lambda: 1.0).play(story(), limit_s=1.0)
