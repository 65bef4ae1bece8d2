"""Chats and completions: only what the assistant says is learned, is counted, and travels."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("datasets", reason="needs the extra hf: pip install 'decentral[hf]'")
pytest.importorskip("transformers", reason="needs the extra hf: pip install 'decentral[hf]'")
import tokenizers
import transformers

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.activations import ActivationFormat, Entering
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.data import conversations, run_inputs, tokenizer
from decentral.data.corpora import Reading
from decentral.data.documents import TextPiece
from decentral.data.stream import TextStream
from decentral.engine import step
from decentral.engine.compute import Compute, ComputeSetup
from decentral.model import decoder
from decentral.model.decoder import MASKED
from tests.engine.test_stage_runner import carried, summed, world_of

MakeSetup = Callable[..., ComputeSetup]
CONTEXT = 12
SPECIAL = ["<end>", "<user>", "<assistant>", "<stop>", "<think>"]
WORDS = [*SPECIAL, "hello", "how", "are", "you", "fine", "thanks", "and", "well", "bye"]
MODEL = config.ModelConfig(depth=3, width=32, context=CONTEXT, vocabulary=len(WORDS))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <stop> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETFUL = (  # it shows what the last assistant thought, and not what earlier ones did
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and loop.last %}<think> {% endif %}"
    "{{ m.content }} <stop> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "how are you"},
    {"role": "user", "content": "fine thanks"},
    {"role": "assistant", "content": "bye"},
]


def tokenizer_in(folder: Path, template: str | None = TEMPLATE) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    conversations.template.cache_clear()
    return folder


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., TextStream]:
    """`stream(rows, format)`: the rows as JSON lines. Nothing is written again that another reader may be reading."""

    def opened(rows: Sequence[object], form: str, template: str | None = TEMPLATE, **keys: object) -> TextStream:
        file, text = tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows))
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        tree = {"kind": "huggingface", "format": form, "path": str(file), **keys}
        tree = {"held_out": 1e-9, "tokenizer": str(tokenizer_in(tmp_path / "tokenizer", template)), **tree}
        return TextStream(config.DataConfig.model_validate(tree), MODEL)

    return opened


def chats(*conversations: object) -> list[dict[str, object]]:
    return [{"messages": one} for one in conversations]


def learned(targets_BT: Tensor) -> list[str]:
    """The words that are learned, a row after another."""
    return [WORDS[token] for token in targets_BT.flatten().tolist() if token != MASKED]


def epoch(stream: TextStream, windows: int) -> tuple[Tensor, Tensor]:
    return stream.micro_batches(Reading(0, PeerId("A")))(0, windows)


# What is learned


def test_only_the_assistants_turns_are_learned(stream: Callable[..., TextStream]) -> None:
    """The chat has 18 tokens, and is longer than a window."""
    _, targets_BT = epoch(stream(chats(CHAT), "chat"), 2)
    assert sorted(learned(targets_BT)) == sorted(["how", "are", "you", "<stop>", "bye", "<stop>"])


def test_of_a_completion_the_end_is_learned_too(stream: Callable[..., TextStream]) -> None:
    rows = [{"prompt": "hello how", "completion": " are you"}]
    inputs_BT, targets_BT = epoch(stream(rows, "completion"), 1)
    assert learned(targets_BT) == ["are", "you", "<end>"]
    assert [WORDS[token] for token in inputs_BT[0, :5].tolist()] == ["hello", "how", "are", "you", "<end>"]
    assert targets_BT[0].tolist()[:4] == [MASKED, *(WORDS.index(word) for word in ("are", "you", "<end>"))]


def test_text_is_learned_all(stream: Callable[..., TextStream]) -> None:
    _, targets_BT = epoch(stream([{"text": "hello how are you " * 20}], "text"), 4)
    assert MASKED not in targets_BT


def test_a_turn_that_the_template_writes_otherwise_later_is_not_learned(stream: Callable[..., TextStream]) -> None:
    _, targets_BT = epoch(stream(chats(CHAT), "chat", FORGETFUL), 1)
    assert learned(targets_BT) == ["<think>", "bye", "<stop>"]


def test_a_document_that_fits_is_in_one_window(stream: Callable[..., TextStream]) -> None:
    """Of 12 targets: two documents of five tokens and an end each; the third one gets a window of its own."""
    rows = [{"prompt": "hello how", "completion": f" are you {word}"} for word in ("fine", "well", "bye")]
    inputs_BT, targets_BT = epoch(stream(rows, "completion"), 2)
    for inputs, targets in zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True):
        starts = [at for at, token in enumerate(inputs) if WORDS[token] == "hello"]
        assert starts[0] == 0
        ends = [at for at, token in enumerate(targets) if token == 0]
        assert len(starts) == len(ends), "no document goes on in another window"
    assert decoder.trained_tokens(targets_BT) == 3 * 4


def test_every_completion_is_learned_once_an_epoch(stream: Callable[..., TextStream]) -> None:
    """Restless lengths, so that windows are filled up in all ways."""
    words = WORDS[5:]
    rows = [
        {"prompt": " ".join(words[: n % 7 + 1]), "completion": " " + " ".join(words[: n * n % 6 + 1])}
        for n in range(60)
    ]
    opened = stream(rows, "completion")
    reader = opened.micro_batches(Reading(0, PeerId("A")))
    found = reader._here or reader._next.result()
    kept = [(piece.text, piece.learned) for piece in opened.documents().held_out()]
    held_out = sum(len(text[learned[0][0] :].split()) + 1 for text, learned in kept if learned)
    expected = sum(n * n % 6 + 2 for n in range(60)) - held_out
    assert int(found.learned_NT[:, 1:].sum()) == expected
    assert bool(found.learned_NT[:, 1:].any(axis=1).all())


def test_rows_with_nothing_to_learn_are_left_out(stream: Callable[..., TextStream]) -> None:
    rows = chats([{"role": "user", "content": "hello"}], CHAT[:2])
    _, targets_BT = epoch(stream(rows, "chat"), 1)
    assert learned(targets_BT) == ["how", "are", "you", "<stop>"]
    with pytest.raises(
        UserError, match="has no text to train on for this peer; none of the 1 chats read has a trainable"
    ):
        epoch(stream(rows[:1], "chat"), 1)


def test_what_is_held_out_is_masked_likewise(stream: Callable[..., TextStream]) -> None:
    rows = [{"prompt": "hello", "completion": f" {first} {second}"} for first in WORDS[5:] for second in WORDS[5:]]
    opened = stream(rows, "completion", held_out=0.3)
    _, targets_BT = opened.evaluation(8)
    assert 0 < decoder.trained_tokens(targets_BT) < targets_BT.numel()
    assert bool((targets_BT != MASKED).any(dim=1).all())
    assert torch.equal(targets_BT, opened.evaluation(8)[1])


def test_one_document_is_too_few_to_hold_one_out(stream: Callable[..., TextStream]) -> None:
    with pytest.raises(
        UserError, match=r"must have at least two documents to train on, since one of them is held out; it has fewer$"
    ):
        stream(chats(CHAT), "chat").evaluation(4)


# Errors of the user


@pytest.mark.parametrize(
    ("rows", "form", "said"),
    [
        ([{"text": "hello"}], "chat", "has no column messages; it has text"),
        ([{"prompt": "hello"}], "completion", "has no column completion; it has prompt"),
        (
            [{"prompt": 3, "completion": "x"}],
            "completion",
            r"line 1 of .*rows.jsonl: prompt is a number \(3\); expected text",
        ),
        ([{"messages": "hello"}], "chat", "the messages of a chat are text; expected a list of"),
        ([{"messages": [{"role": "user", "content": 3}]}], "chat", r"message with role user is a number \(3\)"),
    ],
)
def test_a_row_of_another_kind(stream: Callable[..., TextStream], rows: list[object], form: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        epoch(stream(rows, form), 1)


def test_a_tokenizer_without_the_run_s_template_is_another_than_the_run_s(tmp_path: Path) -> None:
    folder = tokenizer_in(tmp_path / "tokenizer", None)
    data = {"kind": "huggingface", "path": "x", "format": "chat", "tokenizer": str(folder)}
    run = config.validated({"data": data | {"tokenizer_digest": "0" * 32}})
    with pytest.raises(UserError, match="has no chat template, and this run's tokenizer has one; name a copy"):
        run_inputs.check(run, begun=False)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file or folder; name the folder or the file"):
        tokenizer.load(str(tmp_path / "none"))


def test_a_tokenizer_without_a_chat_template(stream: Callable[..., TextStream]) -> None:
    with pytest.raises(UserError, match=r"has no chat template; put chat_template\.jinja into the folder"):
        stream(chats(CHAT), "chat", None)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_of_several_templates_the_default_one_renders(stream: Callable[..., TextStream], place: str) -> None:
    folder = Path(stream(chats(CHAT), "chat").path)
    conversations.template.cache_clear()
    if place == "additional_chat_templates":
        (folder / place).mkdir()
        (folder / place / "tools.jinja").write_text("others")
    else:
        (folder / "chat_template.jinja").unlink()
        several = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "others"}]
        fields = json.loads((folder / place).read_text()) | {"chat_template": several}
        (folder / place).write_text(json.dumps(fields))
    assert conversations.template(str(folder)).chat_template == TEMPLATE


def test_a_chat_s_template_writes_what_begins_it(tmp_path: Path, stream: Callable[..., TextStream]) -> None:
    made = stream(chats(CHAT), "chat")
    begins = dataclasses.replace(made.tokenizer, before=(7,))
    made.tokenizer = begins
    assert made.packer().tokenizer.before == ()
    made.data = made.data.model_copy(update={"format": "completion"})
    assert made.packer().tokenizer.before == (7,)


def test_a_template_that_refuses_a_chat(stream: Callable[..., TextStream]) -> None:
    with pytest.raises(UserError, match=r"the chat template refuses a chat .*no users here"):
        epoch(stream(chats(CHAT), "chat", "{{ raise_exception('no users here') }}"), 1)


def test_chats_of_which_the_template_writes_no_turn_say_so(stream: Callable[..., TextStream]) -> None:
    silent = "{% for m in messages if m.role == 'user' %}<user> {{ m.content }} {% endfor %}"
    opened = stream(chats(CHAT, CHAT[:2]), "chat", silent)
    with pytest.raises(
        UserError, match="none of the 1 chats read has a trainable assistant turn: the chat template must write"
    ):
        opened.evaluation(4)


def test_a_format_needs_rows() -> None:
    with pytest.raises(UserError, match=r"config: data\.format chat needs data\.kind huggingface; data\.kind is text"):
        config.load(None, ["data.kind=text", "data.path=x", "data.format=chat"])


def test_a_chat_is_rendered_only_by_the_part_that_has_it(
    stream: Callable[..., TextStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 chats with two turns of the assistant: four texts each, and none of those that are held out."""
    asked = [[{"role": "user", "content": word} for word in (WORDS[5 + n % 9], WORDS[5 + n // 9])] for n in range(40)]
    opened = stream(chats(*([first, CHAT[1], second, CHAT[3]] for first, second in asked)), "chat")
    rendered: list[str] = []

    def text(*given: Any, **keys: Any) -> str:
        rendered.append(written(*given, **keys))
        return rendered[-1]

    written = conversations._text
    monkeypatch.setattr(conversations, "_text", text)
    source = opened.documents()
    pieces = [piece for part in range(source.parts) for batch in source.read(part) for piece in batch.pieces]
    assert len(pieces) == 39
    assert len(rendered) == 4 * len(pieces)


def test_all_peers_of_a_run_have_one_chat_template(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    run = config.Config(model=MODEL, data=stream(chats(CHAT), "chat").data)
    sealed = run_inputs.sealed(run)
    run_inputs.check(sealed, begun=False)
    tokenizer_in(tmp_path / "tokenizer", FORGETFUL)
    with pytest.raises(UserError, match="or its chat template, differs"):
        run_inputs.check(sealed, begun=False)


# What is counted, and what travels


def test_a_loss_is_of_the_trained_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.Config(model=MODEL)
    forward = step.Chain(decoder.build(MODEL, 0), run=run)
    inputs_BT = torch.randint(len(WORDS), (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    targets_BT = inputs_BT.roll(-1, dims=1)
    masked_BT = targets_BT.clone()
    masked_BT[0, 3:], masked_BT[1, :] = MASKED, MASKED
    whole, some = forward.loss(inputs_BT, targets_BT), forward.loss(inputs_BT, masked_BT)
    assert torch.allclose(some, forward.loss(inputs_BT[:1, :3], targets_BT[:1, :3]))
    assert not torch.allclose(some, whole)
    monkeypatch.setattr(decoder, "LOGITS_AT_ONCE", 8)
    assert torch.allclose(forward.loss(inputs_BT, masked_BT), some)


@pytest.fixture
def masked_setup(setup_of: MakeSetup, stream: Callable[..., TextStream]) -> MakeSetup:
    """`masked_setup(peer, span)`: completions of unequal lengths, on three blocks."""
    words = WORDS[5:]
    rows = [{"prompt": " ".join(words[: n % 7 + 1]), "completion": " " + words[n % 9]} for n in range(50)]

    def build(peer: str, span: tuple[int, int] | None = None, **train: object) -> ComputeSetup:
        setup, opened = setup_of(peer), stream(rows, "completion", held_out=0.2)
        changed = setup.config.train.model_copy(update={"clip_norm": 1e9, "micro_batch": 2, **train})
        routes = config.RoutesConfig(wire="fp32")
        more = {"model": MODEL, "data": opened.data, "train": changed, "routes": routes}
        more["gossip"] = config.GossipConfig(fragment_parameters=1)
        return dataclasses.replace(setup, config=setup.config.model_copy(update=more), corpus=opened, span=span)

    return build


def test_a_step_counts_the_trained_tokens(masked_setup: MakeSetup) -> None:
    compute, again = Compute(masked_setup("A")), masked_setup("A").corpus.micro_batches(Reading(0, PeerId("A")))
    stepped = compute.step()
    assert stepped.tokens == decoder.trained_tokens(again(0, 2)[1]) < 2 * CONTEXT
    evaluated = compute.do(jobs.Evaluate())
    assert isinstance(evaluated, jobs.Evaluated)
    assert 0.5 < evaluated.loss < 2 * torch.tensor(float(len(WORDS))).log()


def test_accumulated_micro_batches_weigh_by_their_trained_tokens(masked_setup: MakeSetup) -> None:
    """As two of them in one."""
    apart = Compute(masked_setup("A", accumulate=2, optimizer="adamw"))
    one = apart.step()
    apart.setup.folder.joinpath("data-position.json").unlink()
    together = Compute(masked_setup("A", micro_batch=4, optimizer="adamw"))
    other = together.step()
    assert one.tokens == other.tokens
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    for ours, theirs in zip(apart.span.inner.lives, together.span.inner.lives, strict=True):
        assert torch.allclose(ours.theta, theirs.theta, atol=1e-4)


def test_gradients_over_spans_are_those_of_the_trained_tokens(masked_setup: MakeSetup) -> None:
    spans = {"A": (0, 3), "B": (1, 4), "C": (2, 5)}
    computes = {name: Compute(masked_setup(name, span)) for name, span in spans.items()}
    carried(world_of(computes, per_step=1 << 30), 8)
    again = masked_setup("A")
    again.folder.joinpath("data-position.json").unlink()
    whole, read = Compute(masked_setup("D")), again.corpus.micro_batches(Reading(0, PeerId("A")))
    whole.span.inner.zero_grad()
    drawn = [read(number, 2) for number in range(8)]
    tokens = sum(decoder.trained_tokens(targets_BT) for _, targets_BT in drawn)
    for inputs_BT, targets_BT in drawn:
        loss = decoder.loss_of(step.Chain(whole.span.layers)(inputs_BT), targets_BT, "sum") / tokens
        loss.backward()  # type: ignore[no-untyped-call]
    found = summed(list(computes.values()))
    for live in whole.span.inner.lives:
        error = torch.linalg.vector_norm(found[live.fragment.index] - live.grad)
        assert error <= 1e-5 * torch.linalg.vector_norm(live.grad)


@pytest.mark.parametrize("vocabulary", [61, (1 << 16) - 1, 1 << 16])
def test_masked_targets_travel(vocabulary: int) -> None:
    model = config.ModelConfig(depth=1, width=32, context=4, vocabulary=vocabulary)
    run = config.Config(model=model, data=config.DataConfig(kind="huggingface", format="completion"))
    formats = ActivationFormat(run, blockwise, decoder.widths(model))
    targets_BT = torch.tensor([[3, MASKED, vocabulary - 1, MASKED]])
    layout, blob = formats.pack(1, Entering(torch.zeros(1, 4, 32), targets_BT))
    job = jobs.Forward(1, 1, 3, 1, layout, blob)
    assert torch.equal(formats.unpack(job).targets_BT, targets_BT)
    layout, blob = formats.pack(1, Entering(torch.zeros(1, 4, 32), torch.full((1, 4), MASKED)))
    with pytest.raises(ProtocolError, match="not all may be masked"):
        formats.unpack(dataclasses.replace(job, layout=layout, blob=blob))


def test_a_run_of_text_takes_no_masked_targets() -> None:
    run = config.Config(model=config.ModelConfig(depth=1, width=32, context=4, vocabulary=61))
    formats = ActivationFormat(run, blockwise, decoder.widths(run.model))
    layout, blob = formats.pack(1, Entering(torch.zeros(1, 4, 32), torch.tensor([[3, MASKED, 2, 1]])))
    with pytest.raises(ProtocolError, match="targets must be token ids"):
        formats.unpack(jobs.Forward(1, 1, 3, 1, layout, blob))


def test_the_offsets_of_a_token_decide_and_not_its_first_character(tmp_path: Path) -> None:
    """A byte-level tokenizer joins a space with the word behind it: the word is learned."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġ": 0, "a": 1, "b": 2, "Ġb": 3, "<end>": 4}, [("Ġ", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a ", "completion": "b"}))
    tree = {"kind": "huggingface", "format": "completion", "path": str(rows), "tokenizer": str(tmp_path)}
    packer = TextStream(config.DataConfig.model_validate({**tree, "held_out": 1e-9}), MODEL).packer()
    piece = TextPiece("a b", 0, True, True, ((2, 4),))
    packer.add([piece])
    tokens, marks = packer.take()
    assert tokens[:3].tolist() == [1, 3, 4]
    assert marks[:3].tolist() == [False, True, True]


class Panic(BaseException):
    """What `tokenizers` raises where its Rust code panics."""


def test_a_panic_over_the_tokens_that_settings_add_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's trial knows tokenizer.json alone; transformers then adds the tokens in tokenizer_config.json."""

    def panics(*_: object, **__: object) -> None:
        raise Panic("no entry found")

    folder = tokenizer_in(tmp_path / "tokenizer")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panics)
    with pytest.raises(UserError, match=r"cannot be loaded \(no entry found\)"):
        conversations.template(str(folder))
