"""Real peers over libp2p on loopback, two of them on one GPU, or one on the GPU and one on the CPU."""

import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.training import whole_claim
from benchmarks.sizes import rate, training
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.core.journal.file import read

SILENT = ("gossip.window_s=3600", "gossip.start_window_s=3600")
CPU_THREADS = "8"


class DeviceSwarm(LocalSwarm):
    """A local swarm whose peers have a device each."""

    def __init__(self, settings: Sequence[str], devices: Sequence[str], folder: Path) -> None:
        flags = ["--peers", str(len(devices)), "--stop-after", "1e6s"]
        super().__init__(parse_local([*flags, *(part for one in settings for part in ("--set", one))]), folder)
        self.devices = devices

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start the peer on its own device. One on the CPU beside a GPU has several threads."""
        if self.devices[number] != self.devices[0]:
            options["env"] = {**options["env"], "OMP_NUM_THREADS": CPU_THREADS}
        return super().spawn(number, [*arguments, "--device", self.devices[number]], **options)


def measure(scale: Scale, notes: Notes, kind: str, size: str) -> None:
    """Note the speed and the exchanges of two peers.

    Args:
        scale: Sizes and durations.
        notes: Where the figures go.
        kind: `pair`: both on the device; `silent`: the same without gossip; `mixed`: the second one on the CPU.
        size: Of the model.
    """
    settings = [*scale.settings(size), *(SILENT if kind == "silent" else ())]
    devices = [scale.device, "cpu" if kind == "mixed" else scale.device]
    notes.put("claimed bytes of a peer", whole_claim(scale.run(size)))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        peers = DeviceSwarm(settings, devices, Path(folder))
        with training(peers, scale.start_s):
            began = time.time()
            time.sleep(scale.swarm_s)
            journals = [list(read(one / "journal.jsonl")) for one in peers.folders()]
            notes.put("bytes in use on the GPU", used_bytes() if scale.on_gpu else None)
    notes.put("kernels", [next(one["kernels"] for one in lines if one["event"] == "started") for lines in journals])
    within = [[line for line in lines if line["t"] >= began] for lines in journals]
    notes.put("tokens_per_s", [rate([line for line in lines if line["event"] == "step"]) for lines in within])
    lines = [line for own in within for line in own]
    notes.put("exchanges", Counter(line["outcome"] for line in lines if line["event"] == "exchange"))
    notes.put("errors", [line["reason"] for line in lines if line["event"] == "error"])


def used_bytes() -> int:
    """Return the bytes of the GPU's memory that all processes use, contexts and caches included."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0]) << 20
