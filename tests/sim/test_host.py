"""A training thread in virtual time does jobs at step edges, and beside training what needs none."""

from random import Random

import pytest

from decentral.comm.codecs import blockwise
from decentral.core import config, jobs, rng
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim import sweep
from decentral.sim.host import Engine, Pace
from decentral.sim.network.agenda import Agenda
from decentral.sim.surrogate import SurrogateDisk, SurrogateWorkload
from decentral.sim.surrogate_model import SurrogateModel
from decentral.sim.swarm import SwarmSettings

STEP_S = 10.0
JOB_S = 0.5


class Thread:
    """An engine whose outcomes are noted with their times, a window of it being closed."""

    def __init__(self, job_bytes: float = 1e12) -> None:
        settings = SwarmSettings.of(config.load(None, sweep.SETTINGS), Pace(STEP_S), (1.0,), 64, sweep.QUICK)
        model = SurrogateModel(settings.config, settings.fragments, blockwise, 64, settings.model.forms)
        span = 0, settings.fragments[-1].last
        training = SurrogateWorkload(model, PeerId("A"), span, rng.arrays(0, "noise"), SurrogateDisk())
        self.agenda, self.outcomes = Agenda(), list[tuple[Seconds, str]]()
        self.engine = Engine(self.agenda, training, Pace(STEP_S, job_s=JOB_S, job_bytes=job_bytes), Random(0), self)
        self.engine.put(jobs.Start(newcomer=False))
        self.engine.put(jobs.CloseWindow(0, 1))
        self.agenda.run(5.0)
        self.outcomes.clear()

    def report(self, job: jobs.Job | None, outcome: jobs.Outcome) -> None:
        if job is not None:
            self.outcomes.append((self.agenda.now, type(outcome).__name__))


def test_slow_weights_are_encoded_while_a_step_goes_on() -> None:
    thread = Thread()
    thread.engine.put(jobs.EncodeSections(0, 1, ("phi.0",)))
    thread.agenda.run(STEP_S)
    ((at, outcome),) = thread.outcomes
    assert outcome == "SectionsEncoded"
    assert at == pytest.approx(5.0 + JOB_S)


def test_the_worker_does_one_thing_after_another() -> None:
    thread = Thread()
    for _ in range(3):
        thread.engine.put(jobs.EncodeSections(0, 1, ("phi.0",)))
    thread.agenda.run(STEP_S)
    assert [at for at, _ in thread.outcomes] == [pytest.approx(5.0 + JOB_S * (1 + number)) for number in range(3)]


def test_a_window_is_closed_at_the_next_step_edge() -> None:
    thread = Thread()
    thread.engine.put(jobs.CloseWindow(0, 2))
    thread.agenda.run(2 * STEP_S)
    ((at, outcome),) = thread.outcomes
    assert outcome == "WindowClosed"
    assert at > STEP_S


def test_the_next_job_waits_until_slow_weights_are_encoded() -> None:
    """The edge is at 11.0, in the middle of the encoding."""
    thread = Thread()
    thread.agenda.run(11.0 - JOB_S / 2)
    thread.engine.put(jobs.EncodeSections(0, 1, ("phi.0",)))
    thread.engine.put(jobs.CloseWindow(0, 2))
    thread.agenda.run(2 * STEP_S)
    assert [outcome for _, outcome in thread.outcomes] == ["SectionsEncoded", "WindowClosed"]
    assert thread.outcomes[1][0] - thread.outcomes[0][0] == pytest.approx(JOB_S)


def test_training_waits_for_the_copies_of_a_checkpoint_and_goes_on_while_the_worker_writes_it() -> None:
    thread = Thread(job_bytes=1e4)
    thread.agenda.run(500.0)  # the window is closed
    thread.outcomes.clear()
    thread.engine.put(jobs.Save())
    thread.engine.put(jobs.Rest(0))
    thread.agenda.run(10_000.0)
    (rested_at, rested), (saved_at, saved) = thread.outcomes
    assert (rested, saved) == ("Rested", "Saved")
    assert saved_at - rested_at > 5 * STEP_S
