"""A swarm on a Ray cluster: one peer for each task, on whatever nodes Ray places them.

    ray job submit --working-dir . -- python deploy/ray/swarm.py --peers 3 --stop-after 600s
    ray job submit --working-dir . -- python deploy/ray/swarm.py --peers 3 --gpus 1 -- small --set train.micro_batch=8

What stands behind `--` goes to the first peer, which begins the swarm. decentral is installed on the nodes, and STATE
(default: decentral-swarm in the node's home) is a folder that a peer finds again when Ray starts its task again: give a
file system that all nodes see. When the job is stopped, each peer saves and says goodbye.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray

LEAVE_S = 150.0  # a peer takes 120 s at most for its last checkpoint
POLL_S = 0.5


@ray.remote(max_retries=-1)
def run_peer(folder: str, flags: list[str]) -> int:
    """Runs a peer until it ends; where Ray ends this task first, the peer saves and leaves. Returns its exit code."""
    command = [sys.executable, "-m", "decentral.peer", "--plain", "--state-dir", folder, *flags]
    peer = subprocess.Popen(command, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while peer.poll() is None:
            time.sleep(POLL_S)
    finally:
        if peer.poll() is None:
            peer.send_signal(signal.SIGTERM)
            peer.wait(LEAVE_S)
    return peer.returncode


@ray.remote
def address(folder: str) -> str:
    """The address of the peer that will run on this node with this folder."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    place = f"/ip4/{ray.util.get_node_ip_address()}/tcp/{port}"
    command = [sys.executable, "-m", "decentral.identity", "--state-dir", folder, "--address", place]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    flags = parse()
    ray.init()
    state = Path(flags.state)
    first = ray.get(address.remote(str(state / "0")))
    print(f"others join with: python -m decentral.peer --join {first}", flush=True)
    place, _, _ = first.partition("/p2p/")
    host = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    more = ["--stop-after", flags.stop_after] if flags.stop_after else []
    more += ["--join", first]
    task = run_peer.options(num_cpus=flags.cpus, num_gpus=flags.gpus)
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    there = host(nodes[place.split("/")[2]], soft=False)
    begins = task.options(scheduling_strategy=there).remote(
        str(state / "0"), ["--listen", place.replace(place.split("/")[2], "0.0.0.0"), *more, *flags.first]
    )
    joins = [task.remote(str(state / str(number)), more) for number in range(1, flags.peers)]
    codes = ray.get([begins, *joins])
    print(f"exit codes: {codes}")
    return max(codes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A swarm on a Ray cluster.")
    parser.add_argument("--peers", type=int, default=3, metavar="N")
    parser.add_argument("--cpus", type=float, default=1, help="of a peer")
    parser.add_argument("--gpus", type=float, default=0, help="of a peer")
    parser.add_argument("--stop-after", metavar="AMOUNT", help="500steps, 90s or 2e6tokens of each peer")
    parser.add_argument("--state", default=os.path.expanduser("~/decentral-swarm"), help="folder of the peers' folders")
    parser.add_argument("first", nargs="*", help="flags of the first peer, behind --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
