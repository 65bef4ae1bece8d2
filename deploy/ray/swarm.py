"""A swarm on a Ray cluster: a peer for each task, on whatever nodes Ray places them.

    ray job submit -- python deploy/ray/swarm.py --peers 3 --stop-after 600s
    ray job submit -- python deploy/ray/swarm.py --peers 3 --gpus 1 -- small --set train.micro_batch=8

What stands behind the second `--` goes to the first peer, which begins the swarm. decentral is installed on the nodes.
--state has the peers' folders; a peer whose task Ray starts again goes on from its own, so give a file system that all
nodes see. When the job is stopped each peer saves and says goodbye, if Ray waits for it: it gives a job 3 s, or what
RAY_JOB_STOP_WAIT_TIME_S says, such as `--runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "160"}}'`.
"""

import argparse
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LEAVE_S = 150.0  # a peer takes 120 s at most for its last checkpoint
POLL_S = 0.5
JOIN_WAIT = ["--join-wait", "600"]


@ray.remote(num_cpus=0)
def first_address(folder: str) -> tuple[str, str]:
    """Return this node's id, and the address of the peer that will run here with this folder."""
    with socket.socket() as free:
        free.bind(("", 0))
        place = f"/ip4/{ray.util.get_node_ip_address()}/tcp/{free.getsockname()[1]}"
    command = [sys.executable, "-m", "decentral.identity", "--state-dir", folder, "--address", place]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return ray.get_runtime_context().get_node_id(), said.strip()


@ray.remote(max_retries=-1)
def run_peer(folder: str, flags: list[str]) -> int:
    """Run a peer and return its exit code. If Ray ends this task first, the peer saves and leaves."""
    command = [sys.executable, "-m", "decentral.peer", "--plain", "--state-dir", folder, *flags]
    peer = subprocess.Popen(command, start_new_session=True)
    try:
        while peer.poll() is None:
            time.sleep(POLL_S)
    finally:
        if peer.poll() is None:
            peer.send_signal(signal.SIGTERM)
            peer.wait(LEAVE_S)
    return peer.returncode


def main() -> int:
    """Start the swarm's peers as Ray tasks, wait for them, and return their largest exit code."""
    flags = parse()
    ray.init()
    folders = [str(Path(flags.state).absolute() / str(number)) for number in range(flags.peers)]
    node, first = ray.get(first_address.remote(folders[0]))
    print(f"others join with: python -m decentral.peer --join {first}", flush=True)
    both = ["--stop-after", flags.stop_after] if flags.stop_after else []
    port = first.split("/")[4]
    size = {"num_cpus": flags.cpus, "num_gpus": flags.gpus}
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    begins = ["--listen", f"/ip4/0.0.0.0/tcp/{port}", "--join", first, *both, *flags.first]
    tasks = [run_peer.options(**size, scheduling_strategy=there).remote(folders[0], begins)]
    tasks += [run_peer.options(**size).remote(one, ["--join", first, *JOIN_WAIT, *both]) for one in folders[1:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        codes = ray.get(tasks)
    finally:
        leave(tasks)
    print(f"exit codes: {codes}")
    return max(codes)


def leave(tasks: list[ray.ObjectRef]) -> None:
    """End the tasks that still run, and wait until their peers have saved."""
    for task in tasks:
        ray.cancel(task)
    ray.wait(tasks, num_returns=len(tasks), timeout=LEAVE_S)


def parse() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(description="A swarm on a Ray cluster.")
    parser.add_argument("--peers", type=int, default=3, metavar="N")
    parser.add_argument("--cpus", type=float, default=1, help="of a peer")
    parser.add_argument("--gpus", type=float, default=0, help="of a peer")
    parser.add_argument("--stop-after", metavar="AMOUNT", help="500steps, 90s or 2e6tokens of each peer")
    parser.add_argument("--state", default=str(Path.home() / "decentral-swarm"), help="folder of the peers' folders")
    parser.add_argument("first", nargs="*", help="CONFIG and flags of the first peer, behind --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
