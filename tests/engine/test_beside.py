"""Gossip beside training, on the two threads that a peer has: nothing is lost, and nothing is counted twice.

The numbers are whole and halves, and the codecs exact, so that every sum is exact whatever the order of its terms. The
test is the training thread, and it goes on training while windows are closed and merged.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from decentral.comm.codecs.sections import Packer, unpack
from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.gossip.update_rules import RuleTools
from decentral.core import config, jobs
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.engine.fragment import Live
from decentral.engine.gossip_jobs import FragmentGossip
from decentral.engine.threads import JobThreads, Phase, Program, finish
from tests.comm.gossip.credulous import believe_all
from tests.patient_time import LIMIT_S

SIDE = 8
SIZE = SIDE * SIDE
WINDOWS = 40


class Exact:
    """fp32 under every codec's name."""

    def encode(self, codec: str, values: Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        return torch.frombuffer(bytearray(blob), dtype=torch.float32)

    def size(self, codec: str, elements: int) -> int:
        return 4 * elements


def whole_numbers(seed: int, low: int = -3, high: int = 4) -> Tensor:
    return torch.randint(low, high, (SIZE,), generator=torch.Generator().manual_seed(seed)).float()


class Peer:
    """One fragment and its gossip, trained by adding whole numbers. AdamW takes no step, so no correction is late."""

    def __init__(self, algorithm: str = "pull", name: str = "A") -> None:
        gossip = config.GossipConfig.model_validate({"algorithm": algorithm})
        layer = nn.Linear(SIDE, SIDE, bias=False)
        self.live = Live(Fragment(0, 0, 1, SIZE), [layer], torch.device("cpu"), config.TrainConfig())
        self.live.theta.copy_(whole_numbers(0))
        self.gossip = FragmentGossip(gossip, PeerId(name), RuleTools(Exact(), TorchKernels(Exact())))
        self.gossip.set_lives([self.live])
        self.gossip.begin(newcomer=False)
        believe_all(self.gossip.of(0).rule)
        self.trained = torch.zeros(SIZE)
        self.steps = 0
        self.outcomes: list[jobs.Outcome] = []

    @property
    def pull(self) -> PullRule:
        rule = self.gossip.of(0).rule
        assert isinstance(rule, PullRule)
        return rule

    @property
    def phi(self) -> Tensor:
        return self.pull.phi

    def step(self) -> None:
        self.steps += 1
        move = whole_numbers(self.steps)
        self.live.theta += move
        self.trained += move
        self.live.tokens += 1

    def do(self, job: jobs.GossipJob) -> jobs.Outcome:
        return finish(self.gossip.program(job))

    def close(self, seq: int = 1) -> jobs.Contribution:
        closed = self.do(jobs.CloseWindow(0, seq))
        assert isinstance(closed, jobs.WindowClosed)
        return jobs.Contribution(self.gossip.peer, closed.tokens, closed.layout, closed.blob)

    def train_beside(self, first: jobs.GossipJob, then: Callable[[jobs.Outcome], list[jobs.GossipJob]]) -> None:
        """Trains until no job is left; each outcome may bring more."""

        def program(job: jobs.Job) -> Program:
            return self.gossip.program(job)  # type: ignore[arg-type]

        def report(outcome: jobs.Outcome) -> None:
            self.outcomes.append(outcome)
            for job in then(outcome):
                pending.append(job)
                threads.submit(job)
            pending.pop()
            if not pending:
                threads.submit(jobs.Finish())

        threads = JobThreads(program, _raise)
        threads.report = report
        pending: list[jobs.Job] = [first]
        threads.submit(first)
        worker = threading.Thread(target=threads.work_beside, daemon=True)
        worker.start()
        while not threads.done:
            task = threads.at_edge(wait=threads.finishing)
            if task is not None:
                threads.do_at_edge(task)
            elif not threads.finishing:
                self.step()
                threads.begin_edge()
        worker.join(LIMIT_S)
        assert not worker.is_alive()


def _raise(job: jobs.Job, error: Exception) -> jobs.JobFailed:
    raise error


def partner(number: int) -> jobs.Contribution:
    """A partner's pseudo-gradient of a window without tokens. All have the same length, so none is clipped."""
    move = torch.cat([torch.full((SIZE // 2,), 2.0), torch.full((SIZE // 2,), -2.0)]).roll(number)
    packer = Packer(Exact())
    packer.add("pseudo_gradient", "q4", move)
    return jobs.Contribution(PeerId("B"), 0, *packer.finish())


def pseudo_gradient(one: jobs.Contribution) -> Tensor:
    return unpack(Exact(), one.layout, one.blob)["pseudo_gradient"]


# Windows that are closed and merged while the training thread steps


def windows_alone(outcome: jobs.Outcome) -> list[jobs.GossipJob]:
    match outcome:
        case jobs.WindowClosed(seq=seq):
            return [jobs.EncodeSections(0, seq, ("phi.0",)), jobs.Merge(0, seq, ())]
        case jobs.Merged(seq=seq) if seq < WINDOWS:
            return [jobs.CloseWindow(0, seq + 1), jobs.ExportState(0)]
    return []


def test_the_slow_weights_of_a_lone_peer_have_all_that_it_trained_once() -> None:
    peer = Peer()
    peer.train_beside(jobs.CloseWindow(0, 1), windows_alone)
    assert peer.steps > 0
    assert torch.equal(peer.live.theta, whole_numbers(0) + peer.trained)
    peer.close(WINDOWS + 1)
    peer.do(jobs.Merge(0, WINDOWS + 1, ()))
    assert torch.equal(peer.phi, peer.live.theta)
    assert torch.equal(peer.pull.baseline, peer.live.theta)  # no residual is left


def test_progress_of_two_counts_once_though_both_threads_are_at_work() -> None:
    peer = Peer()
    peer.live.tokens = 0

    def then(outcome: jobs.Outcome) -> list[jobs.GossipJob]:
        peer.live.tokens = 0  # nobody's tokens count, so both have half of the weight
        match outcome:
            case jobs.WindowClosed(seq=seq):
                return [jobs.Merge(0, seq, (partner(seq),))]
            case jobs.Merged(seq=seq) if seq < WINDOWS:
                return [jobs.CloseWindow(0, seq + 1)]
        return []

    step = peer.step

    def uncounted() -> None:
        step()
        peer.live.tokens = 0

    peer.step = uncounted  # type: ignore[method-assign]
    peer.train_beside(jobs.CloseWindow(0, 1), then)
    last = WINDOWS + 1
    peer.close(last)
    peer.do(jobs.Merge(0, last, (partner(last),)))
    theirs = torch.stack([pseudo_gradient(partner(seq)) for seq in range(1, last + 1)]).sum(dim=0)
    assert torch.equal(peer.phi, whole_numbers(0) + peer.trained / 2 - theirs / 2)
    assert torch.equal(peer.live.theta, peer.phi)
    assert torch.equal(peer.pull.baseline, peer.phi)


def test_the_first_step_waits_for_no_window() -> None:
    peer = Peer()
    first = list(peer.gossip.program(jobs.CloseWindow(0, 1)))
    assert first == [Phase.EDGE, Phase.EDGE, Phase.BESIDE]
    peer.do(jobs.Merge(0, 1, ()))
    peer.live.steps = 1
    assert list(peer.gossip.program(jobs.CloseWindow(0, 2))) == [Phase.EDGE, Phase.BESIDE]


# Rest


def test_what_was_trained_alone_is_in_the_slow_weights_that_a_newcomer_gets() -> None:
    peer = Peer()
    peer.do(jobs.Rest(0))
    for _ in range(5):
        peer.step()
    exported = peer.do(jobs.ExportState(0))
    assert isinstance(exported, jobs.StateExported)
    assert torch.equal(unpack(Exact(), exported.layout, exported.blob)["phi"], peer.live.theta)


def test_a_newcomer_waits_for_one_step_edge_of_a_peer_that_trained_alone() -> None:
    peer = Peer()
    peer.do(jobs.Rest(0))
    peer.step()
    assert list(peer.gossip.program(jobs.ExportState(0))) == [Phase.BESIDE, Phase.EDGE, Phase.BESIDE]


def test_a_peer_that_rests_apart_from_its_slow_weights_is_corrected_once() -> None:
    peer = Peer()
    peer.pull.baseline = peer.phi + 3.0  # it includes the residual of windows that were closed before
    peer.do(jobs.Rest(0))
    peer.step()
    phases = [list(peer.gossip.program(jobs.ExportState(0))) for _ in range(2)]
    assert phases[0] == [Phase.BESIDE, Phase.EDGE, Phase.BESIDE, Phase.EDGE, Phase.BESIDE]
    assert phases[1] == [Phase.BESIDE, Phase.EDGE, Phase.BESIDE]
    assert torch.equal(peer.live.theta, whole_numbers(0) + peer.trained - 3.0)


def test_the_first_window_after_a_rest_does_not_count_what_was_trained_alone() -> None:
    peer = Peer()
    peer.do(jobs.Rest(0))
    for _ in range(5):
        peer.step()
    first = peer.close()
    assert first.tokens == 0
    assert not pseudo_gradient(first).any()
    assert torch.equal(peer.phi, peer.live.theta)
    peer.do(jobs.Merge(0, 1, ()))
    before = peer.live.theta.clone()
    peer.step()
    second = peer.close(2)
    assert second.tokens == 1
    assert torch.equal(pseudo_gradient(second), before - peer.live.theta)


def test_a_newcomer_and_a_partner_that_come_at_once_find_all_progress_once() -> None:
    peer, seqs = Peer(), iter(range(1, WINDOWS))

    def then(outcome: jobs.Outcome) -> list[jobs.GossipJob]:
        match outcome:
            case jobs.Rested():
                return [jobs.ExportState(0), jobs.CloseWindow(0, next(seqs)), jobs.ExportState(0)]
            case jobs.WindowClosed(seq=seq):
                return [jobs.Merge(0, seq, ())]
            case jobs.Merged(seq=seq) if seq < WINDOWS - 1:
                return [jobs.Rest(0)]
        return []

    peer.train_beside(jobs.Rest(0), then)
    peer.close(WINDOWS)
    peer.do(jobs.Merge(0, WINDOWS, ()))
    assert torch.equal(peer.live.theta, whole_numbers(0) + peer.trained)
    assert torch.equal(peer.phi, peer.live.theta)
