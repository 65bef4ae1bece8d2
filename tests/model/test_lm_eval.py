"""lm-eval, Hugging Face's way to evaluate, finds of an export the likelihoods that we compute."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra eval: pip install 'decentral[eval]'")
pytest.importorskip("peft", reason="needs the extra lora: pip install 'decentral[lora]'")
import lm_eval
from lm_eval.tasks import TaskManager

from decentral.commands import export
from decentral.core import config, jobs
from decentral.core.ids import RunId
from decentral.data import run_inputs
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Chain
from decentral.model import decoder, huggingface
from decentral.peers.startup.state import StateFolder

ROWS = [{"prompt": "waits for", "completion": " anybody"}, {"prompt": "the swarm", "completion": " trains"}]
TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{completion}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity}}]
"""


@pytest.mark.parametrize("form", ["peft", "huggingface"])
def test_an_export_has_the_perplexity_that_we_compute(
    setup_of: Callable[..., ComputeSetup], tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    base, out = tmp_path / "base", tmp_path / "out"
    setup = setup_of("A")
    huggingface.write(base, setup.config, decoder.build(setup.config.model, 0))
    settings = base / "tokenizer_config.json"  # lm-eval wants a token that ends a text
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": "!"}))
    keys = [f"model.from={base}", "model.context=16", "model.lora.rank=2", "train.optimizer=adamw"]
    run = run_inputs.sealed(config.load(None, [*keys, "train.learning_rate=0.02"]))
    run = run.model_copy(update={"data": setup.config.data})
    compute = Compute(ComputeSetup(run, setup.peer, setup.corpus, setup.codecs, setup.device, setup.folder))
    for _ in range(30):
        compute.step()
    compute.do(jobs.Save())
    StateFolder(setup.folder).write_run(RunId("words-3fa2c1"), run)
    flags = ["--state-dir", str(setup.folder), "--model-from", str(base)]
    assert export.main([*flags, "--format", form, "--out", str(out)]) == 0
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    model = f"pretrained={base},peft={out}" if form == "peft" else f"pretrained={out}"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"{model},tokenizer={base},dtype=float32",
        tasks=["words"],
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
    )
    said = found["results"]["words"]["perplexity,none"]
    assert said == pytest.approx(perplexity(compute), rel=1e-4)
    assert said < 0.9 * perplexity(Compute(setup_of("B")))


def perplexity(compute: Compute) -> float:
    """The mean over the rows of the sums of the completions' bytes' losses, as a power of e."""
    losses = []
    for row in ROWS:
        tokens_BT = torch.tensor([list((row["prompt"] + row["completion"]).encode())])
        targets_BT = tokens_BT[:, 1:].clone()
        targets_BT[:, : len(row["prompt"]) - 1] = decoder.MASKED
        with torch.no_grad():
            losses.append(float(decoder.loss_of(Chain(compute.span.layers)(tokens_BT[:, :-1]), targets_BT, "sum")))
    return math.exp(sum(losses) / len(losses))
