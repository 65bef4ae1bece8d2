"""Measure how long a training step and a gossip window of a run take on this machine's processor. Start at `own_speed`.

A whole step is timed: passes, clipping and optimizer. A large model is not built. The time of its step is extrapolated
linearly from the times of two models with fewer blocks of the same shape or, if even these are large, follows from the
FLOPs of a narrower model's step. A window is closed and merged with another by the jobs of a running peer, on a
second thread, while training takes steps.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median

import torch

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.exchange import whole_every
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.comm.gossip.update_rules import RuleTools
from decentral.core import jobs
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.fragments import layout_bytes
from decentral.core.ids import PeerId
from decentral.core.units import readable_bytes
from decentral.engine.gossip_jobs import FragmentGossip, GossipedFragment
from decentral.engine.heap import keep_what_is_freed
from decentral.engine.measure import choose, machine_bytes
from decentral.engine.memory import needs
from decentral.engine.span import Span
from decentral.engine.step import flushed_denormals, train_step
from decentral.engine.threads import finish

WHOLE_PARAMETERS = 20e6  # a model with at most this many parameters is timed itself
FEWER_BLOCKS = (1, 3)  # for a larger model, two models with these numbers of blocks are timed
# If the larger one of the two has more parameters without its embedding, its step would take minutes, so a model of
# NARROW_WIDTH is timed.
MOST_PARAMETERS = 60e6
NARROW_WIDTH, NARROW_VOCABULARY = 256, 4096
WARM_STEPS, LEAST_STEPS, MOST_STEPS, TIMED_WINDOWS = 2, 3, 50, 3
TIMED_S = 3.0  # `timed_s` of `own_speed`, unless the caller has less time
MOST_TIMED = 16  # at most this many processes are timed at the same time


@dataclass(frozen=True, slots=True)
class OwnSpeed:
    """How fast one of several peers on this machine's processor trains and gossips."""

    step_s: float  # seconds of a training step, with its wait for a core if there are more peers than cores
    number_s: float  # core-seconds for each parameter of a window that is closed and merged with one partner's window


def own_speed(run: Config, peers: int, timed_s: float = TIMED_S, windows: int = TIMED_WINDOWS) -> OwnSpeed:
    """Return how fast a peer trains and gossips on this processor while `peers` peers train here.

    Several processes are timed at the same time, because cores share caches and memory: one for each peer, but not more
    than the cores can run.

    Args:
        run: The run's config; `train.micro_batch` must be a number.
        peers: Number of peers on this machine, each with one process.
        timed_s: More than LEAST_STEPS steps are timed until all timed steps together have taken this long.
        windows: Number of windows to time; 0 if `number_s` is not needed and is to be 0.

    Raises:
        UserError: If this machine has too little memory for the models that would be timed.
    """
    cores = os.cpu_count() or 1
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // peers))
    at_once = max(1, min(peers, cores // threads, MOST_TIMED))
    _check_memory(run, at_once)
    if at_once == 1:
        found = [_alone(run, threads, timed_s, windows)]
    else:
        with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
            timed = [pool.submit(_alone, run, threads, timed_s, windows) for _ in range(at_once)]
            found = [one.result() for one in timed]
    turns = max(1.0, peers * threads / cores)
    return OwnSpeed(turns * median(one.step_s for one in found), median(one.number_s for one in found))


def _check_memory(run: Config, at_once: int) -> None:
    """Raise UserError if `at_once` processes, each with the largest model that is timed, do not fit into the memory."""
    found = needs(_timed_runs(run)[-1])
    needed, has = at_once * found.span_bytes(0, len(found.fragments)), machine_bytes()
    if needed > has:
        why = f"timing this model takes {readable_bytes(needed)} of memory, and this machine has {readable_bytes(has)}"
        raise UserError(f"--peers: {why}; name a card instead of cpu, or a smaller model")


def _timed_runs(run: Config) -> list[Config]:
    """Return the runs whose steps are timed: the run itself, two with fewer blocks, or a narrow one."""
    if sum(run.model.layer_parameters) <= WHOLE_PARAMETERS or run.model.depth <= max(FEWER_BLOCKS):
        return [run]
    fewer = [_with_depth(run, depth) for depth in FEWER_BLOCKS]
    return fewer if sum(fewer[-1].model.layer_parameters[1:]) <= MOST_PARAMETERS else [narrowed(run)]


@flushed_denormals()
def _alone(run: Config, threads: int, timed_s: float, windows: int) -> OwnSpeed:
    """Return the speed of this process, with `threads` threads."""
    torch.set_num_threads(threads)
    keep_what_is_freed()
    runs = _timed_runs(run)
    *fewer, last = [_timed(one, timed_s, windows if one is runs[-1] else 0) for one in runs]
    if not fewer:
        return replace(last, step_s=last.step_s * _step_flops(run) / _step_flops(runs[0]))
    few, more = FEWER_BLOCKS
    block_s = max(0.0, last.step_s - fewer[0].step_s) / (more - few)
    return replace(last, step_s=fewer[0].step_s + block_s * (run.model.depth - few))


def _with_depth(run: Config, depth: int) -> Config:
    model = run.model
    shape = {"width": model.d_model, "heads": model.n_heads, "kv_heads": model.n_kv_heads, "hidden": model.d_hidden}
    changed = model.model_copy(update={**shape, "depth": depth, "start_from": None, "weights": None})
    return run.model_copy(update={"model": changed})


def narrowed(run: Config) -> Config:
    """Return the run with a model of NARROW_WIDTH and few blocks, and with a micro-batch that is smaller alike.

    The FLOPs of Muon's step grow with parameters times width, those of the passes with parameters times tokens. As the
    tokens shrink like the width, both parts have the same share in a step of either model.
    """
    model = run.model
    free = dict.fromkeys(("heads", "kv_heads", "hidden", "head_channels", "start_from", "weights"))
    size = {"depth": max(FEWER_BLOCKS), "width": NARROW_WIDTH, "vocabulary": min(model.vocabulary, NARROW_VOCABULARY)}
    if model.bottleneck is not None:
        size["bottleneck"] = max(1, model.bottleneck * NARROW_WIDTH // model.d_model)
    sequences = max(1, round(int(run.train.micro_batch) * NARROW_WIDTH / model.d_model))
    changed = {
        "model": model.model_copy(update={**free, **size}),
        "train": run.train.model_copy(update={"micro_batch": sequences}),
    }
    return run.model_copy(update=changed)


def _step_flops(run: Config) -> float:
    """Return the FLOPs of a step over the run's context and `train.accumulate`, which a narrowed run shares."""
    return sum(run.model.layer_flops) * int(run.train.micro_batch)


def _timed(run: Config, timed_s: float, windows: int) -> OwnSpeed:
    """Return the median seconds of a step on random tokens, without the first WARM_STEPS steps, and those of windows.

    Processor time is measured, divided by the number of threads, so that other running programs do not count.
    """
    train, threads = run.train, torch.get_num_threads()
    device = choose("cpu")
    kernels, _ = best_kernels(device.device, blockwise)
    tools = RuleTools(blockwise, kernels, optimizer=train.optimizer)
    span = Span(run, PeerId("A"), tools, device)
    span.build_layers(0, run.model.depth + 2)
    numbers = torch.Generator().manual_seed(0)
    shape = (int(train.micro_batch), run.model.context)

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens_BT = torch.randint(run.model.vocabulary, shape, generator=numbers)
        return tokens_BT, tokens_BT.roll(-1, 1)

    def step() -> float:
        began = time.process_time()
        train_step(span.forward, [fetch() for _ in range(train.accumulate)], span.inner, len(took_s), train, device)
        return (time.process_time() - began) / threads

    took_s: list[float] = []
    while len(took_s) < WARM_STEPS + LEAST_STEPS or (
        sum(took_s[WARM_STEPS:]) < timed_s and len(took_s) < WARM_STEPS + MOST_STEPS
    ):
        took_s.append(step())
    step_s = median(took_s[WARM_STEPS:])
    number_s = _gossip_s(span.gossip, windows, step) / sum(run.model.layer_parameters)
    emulated_s = train.accumulate * train.emulated_micro_batch_s
    return OwnSpeed(max(emulated_s, step_s), number_s)


def _gossip_s(gossip: FragmentGossip, windows: int, step: Callable[[], object]) -> float:
    """Return the core-seconds of a window of all fragments, while training takes steps.

    As in a peer, a worker thread computes. Between two fragments' windows, training fills the processor's caches.
    """
    windows_s, blobs = [], [b""] * len(gossip.fragments)
    with ThreadPoolExecutor(1) as worker:
        for window in range(windows):
            windows_s.append(0.0)
            for number, fragment in enumerate(gossip.fragments):
                timed = worker.submit(_window_s, window, fragment, gossip, blobs[number])
                step()
                while not timed.done():
                    step()
                took_s, blobs[number] = timed.result()
                windows_s[-1] += took_s
    return median(windows_s or [0.0])


def _window_s(window: int, one: GossipedFragment, gossip: FragmentGossip, theirs: bytes) -> tuple[float, bytes]:
    """Close a fragment's window, answer a partner, and merge; return this thread's seconds and the window's blob.

    Args:
        window: Number of the window.
        one: The fragment.
        gossip: The programs of its jobs.
        theirs: The blob of another window, as the partner's. Like a peer's answers, it brings an N-th of the slow
            weights.
    """
    began, live = time.thread_time(), one.live
    live.steps, live.tokens = live.steps + 1, live.tokens + 1
    closed = finish(gossip.program(jobs.CloseWindow(one.index, window + 1)))
    assert isinstance(closed, jobs.WindowClosed)
    every = whole_every(1, 1, len(closed.blob), layout_bytes(closed.on_request))
    names = tuple(section.name for section in closed.on_request[window % every :: every])
    slow = finish(gossip.program(jobs.EncodeSections(one.index, closed.seq, names)))
    assert isinstance(slow, jobs.SectionsEncoded)
    layout, blob = (*closed.layout, *slow.layout), (theirs or closed.blob) + slow.blob
    partner = jobs.Contribution(PeerId("B"), closed.tokens, layout, blob)
    merged = finish(gossip.program(jobs.Merge(one.index, closed.seq, (partner,))))
    assert isinstance(merged, jobs.Merged)
    assert not merged.rejected
    return time.thread_time() - began, closed.blob
