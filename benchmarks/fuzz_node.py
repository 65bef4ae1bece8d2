"""python -m benchmarks.fuzz_node: a million messages of liars, over all handlers of real nodes in virtual time.

    python -m benchmarks.fuzz_node --messages 1000000 --json fuzz.json

tests/fuzz/ has the node, the liars and the rules. Each kind of node gets an equal part of the messages: one long life,
but for newcomers and members of private swarms, which have many. After each hundred thousand messages the process's
memory and the largest container of the node are written down: neither may grow with the number of messages. A crash
ends the run, and says the kind of node, the seed, and the message's number.
"""

import argparse
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decentral.core.units import readable_bytes
from tests.fuzz.fuzzed_node import KINDS, QUIET_S, Figures, FuzzedNode, Kind
from tests.peers.runtime.test_flood import containers

SHORT_LIVES = {"newcomer": 2000, "private": 2000}  # messages: it has joined, or never will; its invitation is over
LOOK_EVERY = 100_000  # messages
LEAST_ACCEPTED = 0.1  # of each kind of message that is a question, or an answer to one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_node")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json")
    flags = parser.parse_args()
    began, figures, memory = time.monotonic(), Figures(), list[dict[str, Any]]()
    kinds = [kind for kind in KINDS if kind in flags.kinds.split(",")]
    for number, kind in enumerate(kinds):
        for node in _lives(kind, flags.seed, flags.messages * (number + 1) // len(kinds), figures):
            if figures.messages >= LOOK_EVERY * (len(memory) + 1):
                memory.append(_look(figures.messages, node))
                print(_said(memory[-1]), flush=True)
    _show(figures, time.monotonic() - began)
    if flags.json:
        report = {"seconds": time.monotonic() - began, "memory": memory, **_counts(figures)}
        Path(flags.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _lives(kind: Kind, seed: int, until: int, figures: Figures) -> Iterator[FuzzedNode]:
    """Nodes of this kind, until so many messages were said; yields the present one after each step."""
    life = 0
    while figures.messages < until:
        began, node = figures.messages, FuzzedNode(kind, seed + life, figures=figures)
        try:
            most = min(until, began + SHORT_LIVES.get(kind, until))
            while figures.messages < most and not node.stops:  # one that is revoked wants to be stopped
                node.step()
                yield node
            if not node.stops:
                node.pass_time(QUIET_S)
            node.leave()
        except Exception:
            print(f"a crash: {kind}, seed {seed + life}, after {figures.messages - began} messages")
            raise
        life += 1


def _look(messages: int, node: FuzzedNode) -> dict[str, Any]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    name, largest = max(containers(node.node), key=lambda one: len(one[1]))
    return {
        "messages": messages,
        "node": node.kind,
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "container": name,
        "entries": len(largest),
    }


def _said(look: dict[str, Any]) -> str:
    size = readable_bytes(look["rss_bytes"])
    return f"{look['messages']:>9,} messages: {size} resident; {look['node']}: {look['entries']} in {look['container']}"


def _counts(figures: Figures) -> dict[str, Any]:
    refused = dict(figures.refused.most_common())
    return {"said": dict(figures.said), "accepted": dict(figures.accepted), "refused": refused}


def _show(figures: Figures, seconds: float) -> None:
    reasons: dict[str, Counter[str]] = {}
    for why, count in figures.refused.items():
        kind, _, reason = why.partition(": ")
        reasons.setdefault(kind, Counter())[reason] += count
    for kind, said in sorted(figures.said.items()):
        share = figures.accepted[kind] / said
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.get(kind, Counter()).most_common(4))
        print(f"{kind:32} {said:8,} said, {share:6.1%} accepted{' (few)' * (share < LEAST_ACCEPTED)}; {why}")
    total = figures.accepted.total() / max(1, figures.messages)
    print(f"{figures.messages:,} messages in {seconds:.0f} s, {total:.1%} accepted, no crash, no violation")


if __name__ == "__main__":
    raise SystemExit(main())
