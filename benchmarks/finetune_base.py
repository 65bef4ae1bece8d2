"""A small Hugging Face folder made of what is installed: a Llama that knows Python, and C++ that it does not know yet.

    python -m benchmarks.finetune_base FOLDER

    FOLDER/base          config.json, model.safetensors, tokenizer.json: trained on the standard library's modules
    FOLDER/peer-K.bin    tokens of C++ headers that torch brings, other ones for each of three peers
    FOLDER/all.bin       all of these

Everything is deterministic but for the versions of Python and torch. It takes about a minute on one core.
"""

import argparse
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from decentral.commands import tokenize
from decentral.core import config, rng
from decentral.data import corpora
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.inner import Inner
from decentral.engine.step import Chain, Device, held_out_loss, train_step
from decentral.model import decoder as gpt
from decentral.model import huggingface

PEER_HEADERS = ("ATen", "torch/csrc", "c10")  # below torch's folder `include`: what each peer has
TEXT_BYTES = 600_000  # of each peer, and three times as much to train the base
VOCABULARY = 512
SEED = 17
CPU = Device(torch.device("cpu"), torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000, help="of the base's training")
    args = parser.parse_args()
    make(args.folder, args.steps)


def make(folder: Path, steps: int) -> None:
    """Writes the folder's files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder)
    texts = [folder / f"{name}.txt" for name in ("python", "peer-0", "peer-1", "peer-2")]
    tokenize.main([*map(str, texts), "--train", str(VOCABULARY), "--out", str(folder / "python.bin")])
    (folder / "python.tokenizer").rename(folder / "tokenizer")
    for name, inputs in {"python": texts[:1], "all": texts[1:], **{one.stem: [one] for one in texts[1:]}}.items():
        flags = ["--tokenizer", str(folder / "tokenizer"), "--out", str(folder / f"{name}.bin")]
        tokenize.main([*map(str, inputs), *flags])
    train_base(folder, steps)


def write_texts(folder: Path) -> None:
    """Python of the standard library, and C++ of torch's headers, as text files of TEXT_BYTES."""
    library = Path(torch.__file__).parent / "include"
    parts: dict[str, tuple[Iterable[Path], int]] = {"python": (corpora._stdlib_files(), 3 * TEXT_BYTES)}
    for number, below in enumerate(PEER_HEADERS):
        parts[f"peer-{number}"] = sorted((library / below).rglob("*.h")), TEXT_BYTES
    for name, (files, most) in parts.items():
        text = "\n".join(one.read_text(errors="replace") for one in files)
        (folder / f"{name}.txt").write_text(text[:most])


def base_run(folder: Path) -> config.Config:
    """The run that trains the base."""
    model = ["model.depth=3", "model.width=96", "model.heads=3", f"model.vocabulary={VOCABULARY}", "model.context=64"]
    tokens = ["data.kind=tokens", f"data.path={folder / 'python.bin'}"]
    return config.load(None, [*model, *tokens, f"seed={SEED}", "train.micro_batch=16"])


def train_base(folder: Path, steps: int) -> None:
    """One process, with the run's own optimizer and a rate that falls to a tenth."""
    run = base_run(folder)
    run = run.model_copy(update={"train": run.train.model_copy(update={"total_steps": steps})})
    layers, corpus = gpt.build(run.model, run.seed), corpora.corpus(run.data, run.model)
    inner = Inner([Live(cut, layers, CPU.device, run.train) for cut in fragments_of(run)], run.train)
    forward, draw, began = Chain(layers, run=run), rng.arrays(SEED, "base"), time.monotonic()
    for step in range(steps):
        train_step(forward, [corpus.micro_batch(draw, 16)], inner, step, run.train, CPU)
    loss = held_out_loss(forward, corpus.evaluation(64), CPU, 16)
    huggingface.write(folder / "base", run, layers, folder / "tokenizer")
    shutil.rmtree(folder / "tokenizer")
    print(f"base: {sum(gpt.parameters(run.model)):,} parameters, held-out loss {loss:.3f} on Python", end=" ")
    print(f"after {steps} steps in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
