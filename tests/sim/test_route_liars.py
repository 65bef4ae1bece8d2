"""Hostile hops of routes: what they give back, and that a swarm of real nodes finds them out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.activations import likeness
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, Hop
from decentral.core import config, jobs
from decentral.core.fragments import Section
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.sim import faults, sweep
from decentral.sim.faults import HOP_LIES
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.liars import HOP_LOSS, falsify_gradient
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

NUMBERS = 256
LIAR = PeerId("sim00004")
SPANS = ((0, 3), (3, 6), (0, 3), (3, 6), (3, 6))


def answer(seed: int) -> Envelope:
    """The answer of an honest hop."""
    gradient = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed))
    blob = blockwise.encode("bf16", gradient)
    layout = (Section("hidden", "bf16", NUMBERS, len(blob)),)
    return Envelope(BackwardResponse(RunId("run"), 8.0, 4, (Hop("X", 1, 2),), layout), blob)


@pytest.mark.parametrize("kind", HOP_LIES)
def test_a_hop_that_lies_sends_what_has_the_form_of_an_answer_and_is_none(kind: str) -> None:
    true, before = answer(1), answer(2)
    false = falsify_gradient(kind, "seed", true, blockwise, before)
    assert isinstance(false.message, BackwardResponse)
    assert isinstance(true.message, BackwardResponse)
    assert len(false.blob) == len(true.blob)
    if kind == "hop-loss":
        assert false.message.loss == HOP_LOSS * true.message.loss
        return
    assert replace(false.message, loss=0.0) == replace(true.message, loss=0.0)
    values = [blockwise.decode("bf16", memoryview(one.blob), NUMBERS) for one in (false, true)]
    found = likeness(*values)
    assert found.cosine < 0.3 or found.ratio > 5


@pytest.mark.parametrize("kind", HOP_LIES)
def test_a_spec_names_the_lie_of_a_hop(kind: str) -> None:
    (fault,) = faults.parse(f"lie 2 {kind} at 10 for 20")
    assert str(fault) == f"lie 2 {kind} at 10 for 20"


class Journals:
    """The lines of all peers' journals, with their times."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, PeerId, Log]] = []

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: Sequence[PeerEffect]) -> None:
        self.lines += [(host.agenda.now, host.peer, effect) for effect in effects if isinstance(effect, Log)]

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None: ...

    def of(self, event: str) -> list[tuple[float, PeerId, dict[str, Any]]]:
        return [
            (at, peer, JOURNAL_LINES.fields(line.event))
            for at, peer, line in self.lines
            if JOURNAL_LINES.name(line.event) == event
        ]


def played(spec: str, seconds: float = 90.0) -> Journals:
    """Five surrogate peers: two origin peers, three last ones. A surrogate's lie is a false loss."""
    run_config = config.load(None, [*sweep.SETTINGS, *sweep.SPAN_MODEL, "routes.overlap=true"])
    settings = SwarmSettings.of(run_config, Pace(0.5, 0.05, report_s=5.0), (1.0,), 64, sweep.QUICK)
    settings = replace(settings, memory=(1 << 28,), spans=SPANS)
    journals = Journals()
    scenario = Scenario(settings, 5, seconds, 1, tuple(faults.parse(spec)), TypicalLink(0.01), audited=False)
    run(scenario, observer=journals)
    return journals


def test_a_lying_hop_of_real_nodes_is_found_out_and_counts_nothing_any_more() -> None:
    journals = played("lie 4 hop-flipped at 0 for 1000")
    assert {line["wrong"] for _, _, line in journals.of("audit") if "wrong" in line} == {LIAR}
    late = [len(line["of"]) for at, peer, line in journals.of("counted") if peer == LIAR and at > 60.0]
    assert sum(late) == 0
    assert sum(len(line["of"]) for at, _, line in journals.of("counted") if at > 60.0) > 30


def test_honest_real_nodes_agree_and_keep_their_routes() -> None:
    journals = played("")
    verdicts = [line["verdict"] for _, _, line in journals.of("audit")]
    assert len(verdicts) >= 4
    assert set(verdicts) == {"agreed"}
