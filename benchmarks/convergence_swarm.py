"""Four peers that gossip in virtual time: which of them train or close a window, and when messages arrive.

A unit of time is one step of a fast peer; a slow peer needs several. Corrections are added at step edges,
as in engine/compute.py. No peer waits: it pulls what its partners have published by the end of its own window,
and merges it `latency` later. The numerics are outer_step.py's and comm/codecs/blockwise.py's. The whole model is one
fragment. Synchronous averaging is the same thing with aligned windows, all partners, no latency, and fp32.

With `parts` each peer owns one part of the vector: it gets that part of everybody's pseudo-gradient, and sends the
mean, quantised anew with an error feedback of its own, to all. So everybody merges everybody's progress, for twice one
pseudo-gradient's bytes however many peers there are. No peer has this algorithm yet: it is an experiment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from benchmarks import outer_step
from benchmarks.convergence_model import BETA1, BETA2, EPSILON, Optimizer, Replicas, Shape
from decentral.comm.codecs import blockwise
from decentral.comm.codecs.compiled_sparse import GROUP
from decentral.comm.gossip.influence import token_weights
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import SPARSE_CODEC, rho_of
from decentral.comm.gossip.pull_rule import UNSENT_KEPT
from decentral.core import config, rng
from decentral.data import corpora
from decentral.engine.muon import orthogonalised

SEQUENCES = 8  # a peer's micro-batch
PEERS = 4
BEHIND = 1.5  # as in comm/gossip/exchange.py
NEVER = 1 << 30  # windows
KERNELS = CompiledKernels()


@dataclass(frozen=True, slots=True)
class Method:
    """What is trained, and how its peers exchange updates."""

    peers: int = PEERS
    sequences: int = SEQUENCES
    slow: bool = False  # the last peer is slow
    talks: bool = True
    window: int = 0  # steps; 0: the command line's
    dense: int = 0  # the number of first steps with windows of one step
    latency: float = -1.0  # windows; -1: the command line's
    partners: int = PEERS - 1
    phi_every: int = 3  # windows from one pull of slow weights to the next
    rarer: int = 0  # of how many numbers sparse windows send one, as its sign; 0: as comm/codecs/blockwise.py does
    mean_rarer: int = 0  # the same of the means that owners of parts send; 0: as windows
    kept: float = UNSENT_KEPT  # share of what a sparse window has not sent that the live weights keep
    slices: int = 1  # a pull of slow weights takes one of so many parts of them, in turn
    exponential: bool = False  # partners at the distances 1, 2, 4 ... in turn, not random ones
    exact: bool = False  # nothing is quantised
    code: Literal["q4", "q1", "sparse"] = "q4"  # of pseudo-gradients, but for the windows of the first steps
    code_from: int = 0  # the number of first steps whose windows are in q4
    aligned: bool = True  # windows end on the same instants on all peers
    rho: float = 0.0  # 0: rho_of
    late_as: str = ""  # the optimizer whose rule for late corrections is used; its own, if none is named
    constants: outer_step.Constants = field(default_factory=outer_step.Constants)
    beside: bool = False  # a merge goes on during the next step, and its correction is added at that step's end
    kappa: float = 0.0  # how far AdamW's first moment follows the merged step
    parts: bool = False  # owners of parts send means, in the place of partners' own pseudo-gradients
    orthogonal: bool = False  # the blocks' matrices of a mean are made semi-orthogonal, and as long as our own
    missed: float = 0.0  # the chance that a window's end passes, because the last one's pulls are still under way


@dataclass(frozen=True, slots=True)
class Setting:
    window: int
    latency: float
    slow: int
    horizon: int
    seed: int
    rate: float
    model: config.ModelConfig
    optimizer: Optimizer = "adamw"


@dataclass(slots=True)
class Snapshot:
    """What a peer has published last, with all vectors as the partners will decode them."""

    window: outer_step.WindowUpdate  # includes phi
    sequence: int


@dataclass(slots=True)
class Pull:
    peer: int
    steps: int  # the peer's steps when it closed the window
    arrives: int
    own: outer_step.WindowUpdate
    partners: list[outer_step.WindowUpdate]


class Swarm:
    """All peers, and the pulls that are under way, unit by unit."""

    def __init__(self, method: Method, setting: Setting, corpus: corpora.Corpus) -> None:
        self.method, self.setting, self.corpus = method, setting, corpus
        self.replicas = Replicas(Shape(setting.model), method.peers, setting.seed, setting.optimizer)
        self.draws = [rng.arrays(setting.seed, "data", peer) for peer in range(method.peers)]
        self.chance = rng.stream(setting.seed, "partners")
        self.misses = rng.stream(setting.seed, "missed windows")
        self.slow = [outer_step.start(row) for row in self.replicas.theta_PN]
        self.pending: list[Tensor | None] = [None] * method.peers  # corrections until the next step edge
        self.tokens = [0] * method.peers
        self.lr_sums = [0.0] * method.peers
        self.closed = [0] * method.peers  # how many windows
        self.codes = [""] * method.peers  # of what each has published last
        self.closed_at = [0] * method.peers
        self.next_close = [self._first_close(peer) for peer in range(method.peers)]
        self.published: list[Snapshot | None] = [None] * method.peers
        self.seen = [[-1] * method.peers for _ in range(method.peers)]
        self.wire: list[Pull] = []
        self.received = 0.0  # bytes per parameter, by all peers
        self.owed = torch.zeros_like(self.replicas.theta_PN[0])  # what quantising the means of parts has kept back

    def step(self, now: int) -> None:
        """From `now` to `now + 1`: train, then merge what has arrived, then close windows and pull."""
        steppers = self._steppers(now + 1)
        batches = [self.corpus.micro_batch(self.draws[peer], self.method.sequences) for peer in range(steppers)]
        rate = rate_at(self.setting, now)
        inputs_PST, targets_PST = (torch.stack(side) for side in zip(*batches, strict=True))
        self.replicas.train(inputs_PST, targets_PST, rate)
        for peer in range(steppers):
            self.tokens[peer] += 1
            self.lr_sums[peer] += rate
            self._apply(peer)
        if self.method.talks:
            self._merge_arrived(now + 1)
            self._close_windows(now + 1)
            self._merge_arrived(now + 1)
            for peer in range(0 if self.method.beside else steppers):
                self._apply(peer)

    def _steppers(self, now: int) -> int:
        """How many of the first peers end a step at `now`."""
        return self.method.peers - int(self.method.slow and now % self.setting.slow != 0)

    def _apply(self, peer: int) -> None:
        pending, self.pending[peer] = self.pending[peer], None
        if pending is not None:
            self.replicas.theta_PN[peer] += pending

    def _window(self, now: int) -> int:
        return 1 if now < self.method.dense else self.method.window or self.setting.window

    def _first_close(self, peer: int) -> int:
        window = self._window(0)
        return window if self.method.aligned else max(1, window * (peer + 1) // self.method.peers)

    # Windows

    def _close_windows(self, now: int) -> None:
        at_edge = self._steppers(now)
        due = [peer for peer in range(at_edge) if now >= self.next_close[peer]]
        missed = [peer for peer in due if now >= self.method.dense and self.misses.random() < self.method.missed]
        for peer in missed:
            self.next_close[peer] = now + self._window(now)
        ending = [peer for peer in due if peer not in missed]
        closed = {peer: self._close(peer) for peer in ending}
        if self.method.parts and ending:
            closed = dict.fromkeys(ending, self._mean_of_parts([closed[peer] for peer in ending]))
        for peer in ending:
            window = self._window(now)
            latency = self.method.latency if self.method.latency >= 0 else self.setting.latency
            arrives = now + math.ceil(latency * window)
            behind = now - self.closed_at[peer] > BEHIND * window
            partners = [] if self.method.parts else self._pull(peer, behind)
            self.wire.append(Pull(peer, self.replicas.steps[peer], arrives, closed[peer], partners))
            self.closed_at[peer] = now
            self.next_close[peer] = now + window

    def _close(self, peer: int) -> outer_step.WindowUpdate:
        # A correction is added at the next step edge; until then neither theta nor the baseline may include it.
        pending, slow = self.pending[peer], self.slow[peer]
        theta = self.replicas.theta_PN[peer] if pending is None else self.replicas.theta_PN[peer] + pending
        in_start = self.replicas.steps[peer] <= self.method.code_from
        code = self.codes[peer] = "q4" if in_start else self.method.code
        self.slow[peer], sent = outer_step.close(slow, theta, lambda x: self._coded(code, x))
        own = outer_step.WindowUpdate(sent, self.tokens[peer], self.lr_sums[peer])
        self.published[peer] = Snapshot(replace(own, phi=self._coded("int8", slow.phi)), self.closed[peer])
        self.closed[peer] += 1
        self.tokens[peer], self.lr_sums[peer] = 0, 0.0
        return own

    def _mean_of_parts(self, windows: Sequence[outer_step.WindowUpdate]) -> outer_step.WindowUpdate:
        """What all merge: each owner's mean of its part of these windows, as everybody reads it."""
        mean = self.owed.clone()
        weights = token_weights([window.tokens for window in windows])
        for weight, window in zip(weights, windows, strict=True):
            mean += weight * window.pseudo_gradient
        rarer = self.method.mean_rarer
        sent = signs_of_the_largest(mean, rarer) if rarer else self._coded(self.method.code, mean)
        self.owed = mean - sent
        others = (len(windows) - 1) / len(windows)  # what is in other peers' hands: of the parts, and of the means
        window_bytes = self._bytes(self.method.code)
        mean_bytes = signs_bytes(rarer) if rarer else window_bytes
        self.received += len(windows) * others * (window_bytes + mean_bytes)
        lr_sum = sum(weight * window.lr_sum for weight, window in zip(weights, windows, strict=True))
        return outer_step.WindowUpdate(sent, sum(window.tokens for window in windows), lr_sum)

    def _pull(self, peer: int, behind: bool) -> list[outer_step.WindowUpdate]:
        """Pseudo-gradients from all partners; slow weights from one now and then, from all when windows were missed."""
        others = [other for other in range(self.method.peers) if other != peer and self.published[other]]
        chosen = self._chosen(peer, others)
        turn, due = divmod(self.closed[peer], self.method.phi_every)
        with_phi = due == 0
        part, share = (slice(None), 1.0) if behind else self._part(turn)
        partners = []
        for place, other in enumerate(chosen):
            snapshot = self.published[other]
            assert snapshot is not None
            if snapshot.sequence <= self.seen[peer][other]:
                continue
            self.seen[peer][other] = snapshot.sequence
            whole = behind or (with_phi and place == 0)
            self.received += self._bytes(self.codes[other]) + (self._bytes("int8") * share if whole else 0)
            partners.append(replace(snapshot.window, part=part) if whole else replace(snapshot.window, phi=None))
        return partners

    def _chosen(self, peer: int, others: Sequence[int]) -> list[int]:
        count = min(self.method.partners, len(others))
        if not self.method.exponential:
            return self.chance.sample(others, count)
        distances = max(1, math.ceil(math.log2(self.method.peers)))
        first = self.closed[peer] * count
        return [(peer + (1 << (first + at) % distances)) % self.method.peers for at in range(count)]

    def _part(self, turn: int) -> tuple[slice, float]:
        """Return the numbers of the slow weights that the pull number `turn` takes, and their share of all."""
        elements, at = self.replicas.theta_PN.shape[1], turn % self.method.slices
        begin, end = (elements * place // self.method.slices for place in (at, at + 1))
        return slice(begin, end), (end - begin) / elements

    def _merge_arrived(self, now: int) -> None:
        arrived = [pull for pull in self.wire if pull.arrives <= now]
        self.wire = [pull for pull in self.wire if pull.arrives > now]
        for pull in arrived:
            taken = self.replicas.steps[pull.peer] + int(self.method.beside)  # when the correction is added
            rho = self.method.rho or rho_of(taken - pull.steps, self.method.late_as or self.setting.optimizer)
            parts = self.slow[pull.peer], pull.own, pull.partners, self.method.constants, rho
            outcome = outer_step.merge(*parts, self._orthogonal if self.method.orthogonal else None)
            outcome = self._kept(outcome, rho) if self.method.code == SPARSE_CODEC else outcome
            self.slow[pull.peer] = outcome.slow
            self._shift_moment(pull, outcome, rho * self.method.kappa)
            pending = self.pending[pull.peer]
            self.pending[pull.peer] = outcome.correction if pending is None else pending + outcome.correction

    def _orthogonal(self, mean_N: Tensor, own_N: Tensor) -> Tensor:
        """The mean of all windows; each matrix of its blocks is made nearly semi-orthogonal, with our own's norm."""
        found_N = mean_N.clone()
        matrices, ours = (self.replicas.block_matrices(row_N[None], 0) for row_N in (found_N, own_N))
        for matrix, own in zip(matrices, ours, strict=True):
            matrix.copy_(orthogonalised(matrix.contiguous()))
            matrix.mul_(own.norm() / matrix.norm().clamp_min(1e-30))
        return found_N

    def _kept(self, outcome: outer_step.OuterStep, rho: float) -> outer_step.OuterStep:
        """The outer step towards slow weights that have a part of this peer's own progress that is not sent yet."""
        kept = -rho * self.method.kept * outcome.slow.residual
        slow = replace(outcome.slow, baseline=outcome.slow.baseline + kept)
        return replace(outcome, slow=slow, correction=outcome.correction + kept)

    def _shift_moment(self, pull: Pull, outcome: outer_step.OuterStep, strength: float) -> None:
        steps = self.replicas.steps[pull.peer]
        if not strength or not steps:
            return
        first, second = self.replicas.first_PN[pull.peer], self.replicas.second_PN[pull.peer]
        moments = outer_step.Moments(second, 1 - BETA1**steps, 1 - BETA2**steps, EPSILON)
        first += outer_step.limited(outer_step.moment_shift(pull.own, outcome, moments, strength), first.norm())

    def _coded(self, codec: str, values: Tensor) -> Tensor:
        if self.method.exact:
            return values.clone()
        if codec == SPARSE_CODEC and self.method.rarer:
            return signs_of_the_largest(values, self.method.rarer)
        if codec == SPARSE_CODEC:  # the kernel is faster than the formula
            zeros = torch.zeros_like(values)
            blob, _ = KERNELS.close(zeros, zeros, values.clone(), codec)
            return blockwise.decode("q4", blob, values.numel())
        return blockwise.decode(codec, blockwise.encode(codec, values), values.numel())

    def _bytes(self, codec: str) -> float:
        size = self.replicas.theta_PN.shape[1]
        if codec == SPARSE_CODEC and self.method.rarer:
            return signs_bytes(self.method.rarer)
        return blockwise.CODECS["fp32" if self.method.exact else codec].size(size) / size


def signs_of_the_largest(values: Tensor, rarer: int) -> Tensor:
    """Return values [n] with one number in `rarer` of each group kept, as its sign times their mean magnitude."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
    largest, places = padded.abs().topk(GROUP // rarer, dim=1)
    signs = padded.gather(1, places).sign() * largest.mean(dim=1, keepdim=True)
    return torch.zeros_like(padded).scatter_(1, places, signs).view(-1)[: len(values)]


def signs_bytes(rarer: int) -> float:
    """Return the bytes a parameter of `signs_of_the_largest`: a scale for a group; of each number place and sign."""
    return 2 / GROUP + (math.log2(rarer) + 2 + 1) / rarer / 8


def rate_at(setting: Setting, now: int) -> float:
    """Linear warm-up over 2% of the horizon (at least 20 steps), then a cosine down to a tenth."""
    warm = max(20, setting.horizon // 50)
    if now < warm:
        return setting.rate * (now + 1) / warm
    left = (now - warm) / max(1, setting.horizon - warm)
    return setting.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * left)))
