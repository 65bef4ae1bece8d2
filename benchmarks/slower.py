"""One peer becomes five times slower in the middle of a run: how soon, and how well, the swarm follows.

    python -m benchmarks.slower [--victim 0] [--times 5] [--before 60] [--after 100] [--seconds 1.0] [--control]

Six real peers in one process: real hosts, compute threads and protocol. The network is in memory, and computing is
emulated: a micro-batch through the whole model takes --seconds. No peer holds more than half of the model, and routes
overlap, so that devices can be busy. Every ten seconds it prints tokens/s of the micro-batches that came
back, over the flow bound of the best spans for the speeds at that time (a proven optimum:
scheduler/throughput/milp.py). At the end the plans and moves of all journals are printed, and their audit.
"""

import argparse
import asyncio
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline import stage
from decentral.comm.wire.identity import Identity
from decentral.core import config, jobs, memory_needs
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.file import Journal, read
from decentral.core.journal.lines import recorded
from decentral.core.journal.micro_batch_counts import audit
from decentral.data import corpora
from decentral.engine import memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.measure import choose
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import Profile
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.runtime.host import Host
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.scheduler.placement import span_choice
from decentral.scheduler.placement.evaluate import PlanTask, TrainingPeer, work_of
from decentral.scheduler.placement.move import MemoryBudget
from decentral.scheduler.placement.span_choice import Holder
from decentral.scheduler.throughput import max_flow, milp
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.link_limits import TokenLinks
from decentral.scheduler.topology.arrays import Ints
from tests.comm.net.loopback import Loopback, LoopbackDirectory

PEERS, EVERY_S = 6, 10.0
UNDER_WAY = 16  # micro-batches that fit beside half of the model
RUN = RunId("slower-000000")


def run_config(overlap: bool) -> config.Config:
    """A model of 0.07 M parameters in six fragments, so small that computing it takes less time than is emulated."""
    return config.Config(
        model=config.ModelConfig(depth=4, width=32, context=4),
        train=config.TrainConfig(micro_batch=1, warmup_steps=10),
        gossip=config.GossipConfig(fragment_parameters=1000, window_s=2.0, start_window_s=2.0),
        routes=config.RoutesConfig(overlap=overlap),
    )


class Swarm:
    """The peers of this process. `half` is the memory of each, in bytes, for three of the six fragments."""

    def __init__(self, folder: Path, seconds: float, overlap: bool) -> None:
        self.run, self.folder, self.seconds = run_config(overlap), folder, seconds
        self.needs = dataclasses.replace(memory.needs(self.run), whole_in_flight=UNDER_WAY)  # so that a part is cheaper
        count = len(self.needs.fragments)
        starts = range(count - count // 2 + 1)
        self.half = max(self.needs.span_bytes(begin, begin + count // 2, UNDER_WAY) for begin in starts)
        self.corpus = corpora.load(self.run.data, self.run.model)
        self.network = Loopback()
        self.hosts: list[Host] = []
        self.computes: list[Compute] = []
        self.tokens = self.run.model.context
        self.slowed: dict[int, float] = {}
        self.slowed_at = 0.0  # unix time

    def start_at_the_best(self) -> list["asyncio.Task[str]"]:
        """Starts peers that hold the best spans for the present speeds from the beginning."""
        for begin, end in self.best_spans():
            self.add(self.needs.span(int(begin), int(end)))
        return [asyncio.create_task(host.run()) for host in self.hosts]

    def start(self) -> list["asyncio.Task[str]"]:
        held: list[Holder] = []
        for _ in range(PEERS):
            reach = memory_needs.widest_span(self.needs, self.half)
            choice = span_choice.choose(self.needs.fragments, held, 1.0, reach)
            held.append(choice)
            self.add(self.needs.span(choice.begin, choice.end))
        return [asyncio.create_task(host.run()) for host in self.hosts]

    def add(self, span: tuple[int, int]) -> None:
        number = len(self.hosts)
        folder = self.folder / f"peer-{number}"
        folder.mkdir()
        own = Identity.load_or_create(folder / "identity.key")
        device = choose("cpu", 1.0, self.seconds)
        compute = Compute(ComputeSetup(self.run, own.peer, self.corpus, blockwise, device, folder, span))
        capacity = self.needs.capacity(0, 3, self.half)
        place = stage.StageConfig(
            RUN, own.peer, *span, compute.span.cuts, 1, capacity, 1, compute.span.forms, self.needs.activations,
            self.run.routes.slots,
            self.run.routes.overlap,
        )  # fmt: skip
        setup = NodeSetup(
            config=self.run,
            run=RUN,
            own=own,
            fragments=compute.fragments,
            state_layouts=compute.gossip.state_layouts(),
            layers=compute.span.model_layers,
            profile=Profile("emulated", self.half, 1e9, self.tokens / self.seconds),
            addresses=(),
            routes=place,
            memory_budget=MemoryBudget(self.needs, self.half, compute.span.all_state_layouts()),
        )
        now = SwarmClock()
        journal, book = Journal(folder / "journal.jsonl", now), AddressBook(folder / "peers.json")
        directory = LoopbackDirectory(self.network)
        self.computes.append(compute)
        self.hosts.append(Host(Node(setup), self.network.transport(own.peer), directory, compute, journal, book, now))

    def slow_down(self, number: int, times: float) -> None:
        compute = self.computes[number]
        device = dataclasses.replace(compute.setup.device, emulated_s=self.seconds * times)
        compute.setup = dataclasses.replace(compute.setup, device=device)
        compute.span.stages.device = device
        self.slowed[number], self.slowed_at = times, time.time()

    def completed(self) -> int:
        return sum(host.node.routes.completed for host in self.hosts if host.node.routes)

    def best(self) -> float:
        """Tokens/s of the best spans for the present speeds."""
        return max_flow.maximum(self.costs(), self.best_spans()).tokens_per_s

    def best_spans(self) -> Ints:
        spans = milp.best_spans(self.costs())
        assert spans is not None
        return spans

    def costs(self) -> LayerCosts:
        """The costs of the fragments at the present speeds."""
        fast = self.tokens / self.seconds
        members = {
            PeerId(str(number)): TrainingPeer(range(0, 1), self.half, fast / self.slowed.get(number, 1.0))
            for number in range(PEERS)
        }
        return work_of(PlanTask(self.needs, tuple(members.items()), TokenLinks(64.0, 0.8), 1))

    def lines(self, event: str) -> list[tuple[int, dict[str, Any]]]:
        folders = sorted(self.folder.glob("peer-*"))
        found = [
            (number, dict(line))
            for number, folder in enumerate(folders)
            for line in read(folder / "journal.jsonl")
            if line["event"] == event
        ]
        return sorted(found, key=lambda one: float(one[1]["t"]))


async def play(swarm: Swarm, args: argparse.Namespace) -> list[dict[str, float]]:
    if args.control:
        swarm.slowed[args.victim] = args.times
    running = swarm.start_at_the_best() if args.control else swarm.start()
    if args.control:
        swarm.slow_down(args.victim, args.times)
    rows, began, slowed_at = [], time.monotonic(), 0.0
    before, best = 0, swarm.best()
    try:
        while time.monotonic() < began + args.before + args.after:
            at = time.monotonic() - began
            if not slowed_at and at >= args.before and not args.control:
                swarm.slow_down(args.victim, args.times)
                slowed_at, best = at, swarm.best()
                print(f"peer {args.victim} is {args.times:g} times slower from now on", flush=True)
            await asyncio.sleep(EVERY_S)
            took, done = time.monotonic() - began - at, swarm.completed()
            rate, before = (done - before) * swarm.tokens / took, done
            rows.append(
                {
                    "second": round(at + took - slowed_at, 1),
                    "tokens_per_s": round(rate, 1),
                    "of_best": round(rate / best, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    finally:
        for host in swarm.hosts:
            host.stop("enough")
        await asyncio.gather(*running)
        for host in swarm.hosts:
            host.compute.submit(jobs.Finish())
    return rows


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="slower-") as folder:
        swarm = Swarm(Path(folder), args.seconds, not args.lean)
        rows = asyncio.run(play(swarm, args))
        for event in ("plan", "move", "abandoned"):
            for number, line in swarm.lines(event):
                line["t"] = round(float(line["t"]) - swarm.slowed_at, 1)
                print(number, json.dumps({name: value for name, value in line.items() if name != "donors"}))
        journals = sorted(Path(folder).glob("peer-*/journal.jsonl"))
        found = audit((recorded(read(one)) for one in journals), 6)
        print(f"{found.everywhere} counted once in all layers, {found.in_part} in a part, {len(found.twice)} twice")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", type=int, default=0)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--before", type=float, default=60.0)
    parser.add_argument("--after", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a micro-batch through the whole model")
    parser.add_argument("--control", action="store_true", help="slow, and with the best spans for it, from the start")
    parser.add_argument("--lean", action="store_true", help="without overlap")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
