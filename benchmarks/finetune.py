"""Adapters over three peers against one process with the same tokens, and what peft makes of what they export.

    python -m benchmarks.finetune_base FOLDER
    python -m benchmarks.finetune FOLDER                three real peers: processes over libp2p on loopback
    python -m benchmarks.finetune FOLDER --virtual      the same peers in virtual time, a step each second

Each peer adapts the folder's base to C++ with 8 sequences a step. The one process takes as many steps, each with as
many sequences as all three peers together, so that its gradients are exact, and it sees the same tokens. Losses are
held-out, of the mean of the replicas.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.finetune_base import CPU
from benchmarks.trained_swarm import keeping_models, say
from decentral.comm.codecs import blockwise
from decentral.commands import export
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Chain
from decentral.peers.startup.state import StateFolder
from decentral.serving import replicas
from decentral.serving.replicas import Weights
from decentral.sim.host import Pace
from decentral.sim.real_training import real_gradients
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

PEERS, SEQUENCES, CONTEXT = 3, 8, 64
EVALUATED = 256
CLOSE = 1e-4  # of logits in fp32


def settings_of(args: argparse.Namespace) -> list[str]:
    """What all of them have alike."""
    model = [f"model.from={args.folder / 'base'}", f"model.context={CONTEXT}", f"model.lora.rank={args.rank}"]
    tokens = ["data.kind=tokens", f"data.path={args.folder / 'all.bin'}"]
    train = ["train.optimizer=adamw", f"train.learning_rate={args.rate}", "train.warmup_steps=20"]
    steps = [f"train.total_steps={args.steps}", "train.eval_every_s=3600", f"seed={args.seed}"]
    return [*model, *tokens, *train, *steps, *args.set]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--steps", type=int, default=300, help="of each peer")
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = in_virtual_time(args) if args.virtual else as_processes(args)
    one = alone(args, max(1, round(found["tokens"] / (PEERS * SEQUENCES * CONTEXT))))
    line = {"virtual": args.virtual, "seed": args.seed, "rate": args.rate, **found, "one_process": one}
    say(line | {"behind": round(found["loss"] / one["loss"] - 1, 4)}, args.json)


def as_processes(args: argparse.Namespace) -> dict[str, Any]:
    """Three peers by `decentral.local`, and their export in peft."""
    with tempfile.TemporaryDirectory() as place:
        swarm, summary = Path(place) / "swarm", Path(place) / "summary.json"
        command = [sys.executable, "-m", "decentral.local", "--peers", str(PEERS), "--stop-after", f"{args.steps}steps"]
        command += ["--state-dir", str(swarm), "--summary", str(summary)]
        settings = [*settings_of(args), f"train.micro_batch={SEQUENCES}"]
        subprocess.run([*command, *(part for one in settings for part in ("--set", one))], check=True)
        result = json.loads(summary.read_text())
        adapter = Path(place) / "adapter"
        assert export.main(["--state-dir", str(swarm), "--out", str(adapter)]) == 0
        peers = result["peers"]
        return {
            "loss": result["swarm"]["heldout_loss"],
            "tokens": result["swarm"]["tokens"],
            "seconds": round(result["swarm"]["seconds"], 1),
            "exchanges": [peer["exchanges"]["done"] for peer in peers],
            "received_bytes": [peer["received_bytes"] for peer in peers],
            "peft": in_peft(swarm, adapter, args.folder / "base"),
        }


def in_peft(swarm: Path, adapter: Path, base: Path) -> dict[str, float]:
    """The largest difference between our logits and those of peft over transformers, and its held-out loss."""
    import peft
    import transformers

    known = StateFolder(swarm / "peer-0").read_run()
    assert known is not None
    settings = known[1]
    weights = [found for folder in sorted(swarm.glob("peer-*/")) if (found := replicas.read(folder)) is not None]
    inputs_BT, targets_BT = corpora.load(settings.data, settings.model).evaluation(64)
    ours = Chain(replicas.layers_with(settings, replicas.average(weights)), run=settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        plain = model(inputs_BT).logits
        theirs = peft.PeftModel.from_pretrained(model, adapter).eval()(inputs_BT).logits
        apart = float((ours(inputs_BT) - theirs).abs().max())
        losses = [torch.nn.functional.cross_entropy(one.flatten(0, 1), targets_BT.flatten()) for one in (plain, theirs)]
    assert apart < CLOSE, f"peft's logits differ by {apart}"
    return {"logits_apart": apart, "base_loss": round(float(losses[0]), 4), "loss": round(float(losses[1]), 4)}


def in_virtual_time(args: argparse.Namespace) -> dict[str, Any]:
    settings = config.load(None, [*settings_of(args), f"train.micro_batch={SEQUENCES}"])
    pace = Pace(1.0, 0.05, report_s=10.0)
    swarm = SwarmSettings.of(settings, pace, (1.0,), SEQUENCES * CONTEXT)
    with tempfile.TemporaryDirectory() as place:
        shape, trained = keeping_models(real_gradients(swarm, Path(place)))
        report = run(Scenario(shape, PEERS, float(args.steps), args.seed, audited=False))
    weights = [weights_of(one) for one in trained.values()]
    tokens = sum(one.counters.tokens for one in trained.values())
    received = report.throughput.received_bytes
    return {"loss": round(loss_of(settings, weights), 4), "tokens": tokens, "received_bytes": received}


def alone(args: argparse.Namespace, steps: int) -> dict[str, Any]:
    """One process with the micro-batches of all three peers in each step."""
    settings = config.load(None, [*settings_of(args), f"train.micro_batch={PEERS * SEQUENCES}"])
    with tempfile.TemporaryDirectory() as place:
        corpus = corpora.load(settings.data, settings.model)
        compute = Compute(ComputeSetup(settings, PeerId("one"), corpus, blockwise, CPU, Path(place)))
        before = loss_of(settings, [weights_of(compute)])
        for _ in range(steps):
            compute.step()
        loss = loss_of(settings, [weights_of(compute)])
    return {"loss": round(loss, 4), "before": round(before, 4), "tokens": compute.counters.tokens}


def weights_of(compute: Compute) -> Weights:
    return {one.live.fragment.index: one.live.theta.clone() for one in compute.gossip.fragments}


def loss_of(settings: config.Config, weights: Sequence[Weights]) -> float:
    """Of the mean of these replicas."""
    return replicas.held_out_loss(settings, replicas.average(weights))


if __name__ == "__main__":
    main()
