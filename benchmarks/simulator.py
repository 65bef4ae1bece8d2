"""How long simulating a swarm takes, by its size: `python -m benchmarks.simulator [--peers 100,1000,10000]`.

Each size simulates 600 virtual seconds of a swarm such as volunteers make: every peer has its own links and steps of
half a second, and pulls one snapshot every two minutes from two partners. Newcomers come one after the other in the
first 200 s, fetch the model, and probe their links. Each size runs in a process of its own, whose memory is measured.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from math import log
from typing import Any

SETTINGS = [
    "gossip.window_s=120",
    "gossip.start_window_s=120",
    "gossip.partners=2",
    "gossip.fragment_parameters=1000000",
    "swarm.checkpoint_every_s=300",
    "train.eval_every_s=300",
]
SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=lambda text: [int(one) for one in text.split(",")], default=[100, 1000, 10000])
    print("  peers  seconds  ms/peer  us/(n log n)    GiB     events  exchanges done")
    for peers in parser.parse_args().peers:
        seconds, gib, report = run(peers)
        print(
            f"{peers:7d} {seconds:8.1f} {1e3 * seconds / peers:8.1f} {1e6 * seconds / (peers * log(peers)):13.0f}"
            f" {gib:6.2f} {report['events']:10,} {report['exchanges'].get('done', 0):15,}",
            flush=True,
        )


def run(peers: int) -> tuple[float, float, dict[str, Any]]:
    """Wall seconds with the start of Python, the largest memory of any child so far in GiB, and the report."""
    overrides = [part for one in SETTINGS for part in ("--set", one)]
    command = [sys.executable, "-m", "decentral.simulate", "--json", "--peers", str(peers), "--seconds", str(SECONDS)]
    began = time.perf_counter()
    done = subprocess.run([*command, *overrides], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2, json.loads(done.stdout)


if __name__ == "__main__":
    main()
