"""Write the model card of an export: README.md with metadata in Hugging Face's form. Start reading at `card_of`.

The card says what was trained, on what, by whom, the losses, the settings, and how to load the model. Names of peers
come from others: they are shown as plain text, without markup, and none of them is a link.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from decentral import __version__
from decentral.core.config import Config
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import Json
from decentral.core.times import duration
from decentral.core.units import readable_number
from decentral.view.loss_curve import LossCurve, sparkline
from decentral.view.run_comparison import BY_JOURNALS, TrainedShare, flat
from decentral.view.run_history import RunHistory

CARD_POINTS = 12  # rows of the table of losses
CARD_BARS = 60
MOST_CARD_PEERS = 100
MARK = "<!-- decentral export writes this file anew while it has this line -->"
MARKUP = str.maketrans({char: f"&#{ord(char)};" for char in "&<>|`*_[]()#\\"})


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts from which a model card is written."""

    run: str
    config: Config
    history: RunHistory | None  # history of the peers whose journals were found; None if no journal was found
    step: int  # learning-rate step of the newest weights
    data: Sequence[str] = ()  # names of the peers' data, as their users gave them
    adapters: bool = False  # whether the export has LoRA adapters instead of a whole model


def card_of(facts: CardFacts) -> str:
    """Return the text of the card."""
    parts = [
        _metadata(facts),
        f"# {_plain(facts.run)}",
        _summary(facts),
        "## Load it",
        _loading(facts),
        "## Model",
        _rows(_model(facts.config)),
        "## Data",
        _rows(_data(facts)),
        "## Who trained it",
        _peers(facts),
        "## Losses",
        _losses(facts),
        "## Settings",
        "Those that differ from the defaults; `decentral config --explain KEY` says what a key means.",
        _settings(facts.config),
    ]
    return "\n\n".join([*parts, MARK]) + "\n"


def _metadata(facts: CardFacts) -> str:
    lines = ["library_name: peft" if facts.adapters else "library_name: transformers", "pipeline_tag: text-generation"]
    lines += ["tags:", "- decentral", *(["- lora"] if facts.adapters else [])]
    on_hub = [name for name in facts.data if facts.config.data.facts.may_be_on_hub and name.count("/") == 1]
    lines += ["datasets:", *(f"- {json.dumps(name)}" for name in on_hub)] if on_hub else []
    return "\n".join(["---", *lines, "---"])


def _summary(facts: CardFacts) -> str:
    model, history = facts.config.model, facts.history
    size = readable_number(sum(model.layer_parameters))
    text = f"A {model.family} language model of {size} parameters, trained with decentral {__version__}"
    if history is None:
        return f"{text}. {_at(facts)}"
    peers = f"{len(history.peers)} peers" if len(history.peers) > 1 else "one peer"
    curve = _curve(history)
    loss = f"; last {curve.kind} loss {curve.loss[-1]:.3f} nats per token" if len(curve.loss) else ""
    trained = f"on {readable_number(history.tokens)} tokens{loss}"
    return f"{text} by {peers} {trained}. {_at(facts)}"


def _at(facts: CardFacts) -> str:
    meaning = "which counts the steps of the swarm, not those of one peer"
    return f"These are its weights at learning-rate step {facts.step:,}, {meaning}."


def _loading(facts: CardFacts) -> str:
    if facts.adapters:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            'base = AutoModelForCausalLM.from_pretrained("BASE")  # the model that the run started from',
            'model = PeftModel.from_pretrained(base, "THIS_FOLDER")',
        ]
        return _code("python", lines)
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    ]
    own = ["decentral generate --model THIS_FOLDER 'Once upon a time'", "decentral peer --model-from THIS_FOLDER ..."]
    return f"{_code('python', lines)}\n\n{_code('sh', own)}"


def _model(run: Config) -> list[tuple[str, str]]:
    model = run.model
    shape = f"{model.depth} blocks, width {model.d_model}, {model.n_heads} heads"
    rows = [
        ("shape", shape),
        ("context", f"{model.context:,} tokens"),
        ("vocabulary", f"{model.vocabulary:,} {'bytes' if run.reads_bytes else 'tokens'}"),
        ("trained by", f"{run.train.optimizer}, gossip {run.gossip.algorithm}"),
    ]
    rows += [("bottleneck", f"{model.bottleneck} channels in training")] if model.bottleneck is not None else []
    rows += [("LoRA", f"rank {model.lora.rank}")] if model.lora is not None else []
    started = "weights sampled by seed" if model.weights is None else f"weights with digest {model.weights}"
    return [*rows, ("started from", started)]


def _data(facts: CardFacts) -> list[tuple[str, str]]:
    data = facts.config.data
    rows = [("kind", f"{data.kind}, {data.format}"), ("held out", f"{data.held_out:.1%} of the tokens")]
    rows += [("names", ", ".join(_plain(name) for name in facts.data))] if facts.data else []
    return [*rows, ("tokenizer", f"digest {data.tokenizer_digest}")] if data.tokenizer_digest else rows


def _peers(facts: CardFacts) -> str:
    if facts.history is None:
        return "No journals were at hand, so this card does not know."
    tokens = facts.history.tokens
    shares = sorted((TrainedShare.of(peer, tokens) for peer in facts.history.peers), key=lambda one: -one.tokens)
    head = ["| peer | device | tokens | share | hours |", "|---|---|---:|---:|---:|"]
    rows = [
        f"| {_plain(one.peer)} | {_plain(one.device)} | {one.tokens:,} | {one.share:.1%} | {one.hours:.2f} |"
        for one in shares[:MOST_CARD_PEERS]
    ]
    more = f"\n\nAnd {len(shares) - MOST_CARD_PEERS} more." if len(shares) > MOST_CARD_PEERS else ""
    return "\n".join([*head, *rows]) + more + f"\n\n{BY_JOURNALS} Others may have trained, too."


def _losses(facts: CardFacts) -> str:
    curve = _curve(facts.history) if facts.history is not None else None
    if curve is None or not len(curve.loss):
        return "No journals with losses were at hand."
    count = len(curve.loss)
    chosen = sorted({round(number * (count - 1) / (CARD_POINTS - 1)) for number in range(CARD_POINTS)})
    head = [f"| tokens | time | {curve.kind} loss |", "|---:|---:|---:|"]
    rows = [f"| {curve.tokens[at]:,.0f} | {duration(curve.seconds[at])} | {curve.loss[at]:.4f} |" for at in chosen]
    return f"`{sparkline(curve.loss.tolist(), CARD_BARS)}`\n\n" + "\n".join([*head, *rows])


def _curve(history: RunHistory) -> LossCurve:
    found = LossCurve.of(history)
    return found if len(found.loss) else LossCurve.of(history, "training")


def _settings(run: Config) -> str:
    usual = dict(flat(json.loads(Config().canonical())))
    own: list[tuple[str, Json]] = flat(json.loads(run.canonical()))
    lines = [f"{key}: {json.dumps(value)}" for key, value in own if value != usual.get(key)]
    return _code("yaml", lines or ["# all are the defaults"])


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _code(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _plain(text: str) -> str:
    return plain_text(text, 400).translate(MARKUP)
