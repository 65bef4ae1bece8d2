"""Time in tests of swarms stands still while the machine is busy with other things."""

import asyncio

import pytest

from tests.patient_time import TURN_S, PatientLoop


class Machine:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_turn_that_took_long_counts_little_and_a_short_one_as_it_is() -> None:
    machine = Machine()
    loop = PatientLoop(machine)
    began = loop.time()
    machine.at += 30.0
    assert loop.time() == pytest.approx(began + TURN_S)
    machine.at += TURN_S / 2
    assert loop.time() == pytest.approx(began + 1.5 * TURN_S)
    loop.close()


def test_a_deadline_is_not_missed_because_the_process_was_not_let_run() -> None:
    machine = Machine()

    async def story() -> None:
        async with asyncio.timeout(10 * TURN_S):
            machine.at += 60.0
            await asyncio.sleep(0)

    PatientLoop(machine).play(story(), limit_s=1.0)
