"""Flags against the folder that they name: whose it is, and whether its run has the same files and destinations."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from decentral.commands import doctor, identity, local
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import RunId
from decentral.core.own_inputs import OwnInputs
from decentral.peers.startup.flags import StartFlags
from decentral.peers.startup.state import StateFolder

RUN = RunId("gpt-3fa2c1")
ROWS = ("data.kind=huggingface", "data.path=rows.jsonl", "data.tokenizer=mine", "data.column=body", "data.part=1/2")
TEXT = ("data.kind=text", "data.path=texts", "data.glob=a/*.md", "train.upload=copies")
OTHERS = [
    (ROWS, "data.path=other.jsonl", "--data other.jsonl"),
    (ROWS, "data.tokenizer=theirs", "--tokenizer theirs"),
    (ROWS, "data.column=text", "--data-column text"),
    (ROWS, "data.part=2/2", "--data-part 2/2"),
    (TEXT, "data.glob=b/*.md", "--data-glob 'b/*.md'"),
    (TEXT, "train.upload=s3://bucket/runs", "--upload s3://bucket/runs"),
    (("model.from=base",), "model.from=other", "--model-from other"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with two folders of the same model."""
    monkeypatch.chdir(tmp_path)
    fields = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    for name in ("base", "other"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(fields))


def begun(keys: tuple[str, ...], folder: str = "swarm/peer-0") -> Path:
    """The folder of a peer whose run was begun with these keys."""
    Path(folder).mkdir(parents=True)
    run = config.load(None, keys)
    weights = "0" * 32 if run.model.start_from else None  # the first peer puts the digest of its weights in
    sealed = run.model_copy(update={"model": run.model.model_copy(update={"weights": weights})})
    StateFolder(Path(folder)).write_run(RUN, sealed)
    return Path(folder)


def refusal(folder: Path, flags: StartFlags) -> str:
    with pytest.raises(UserError) as error:
        flags.require_consistent(StateFolder(folder).read_run(flags.own), folder)
    return str(error.value)


@pytest.mark.parametrize(("keys", "other", "flag"), OTHERS)
def test_another_file_than_the_folder_s_is_refused_and_the_flag_that_changes_it_is_named(
    keys: tuple[str, ...], other: str, flag: str
) -> None:
    """The peer went on with the folder's file and did not say so."""
    key, _, value = other.partition("=")
    said = refusal(begun(keys), StartFlags(overrides=(*keys, other)))
    assert said.startswith(f"swarm/peer-0 belongs to run {RUN}, where {key} is ")
    change = f"change it by decentral.peer --state-dir swarm/peer-0 {flag}"
    assert said.endswith(f", not {value}; leave {key} out, or {change}")


@pytest.mark.parametrize(("keys", "other", "flag"), OTHERS)
def test_a_local_swarm_is_refused_in_the_same_words(keys: tuple[str, ...], other: str, flag: str) -> None:
    folder = begun(keys)
    before = sorted(Path().rglob("*"))
    said = refusal(folder, StartFlags(overrides=(*keys, other)))
    line = [part for one in (*keys, other) for part in ("--set", one)]
    with pytest.raises(UserError) as error:
        local.check_run(local.parse(line), Path("swarm"))
    assert str(error.value) == said
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("keys", [ROWS, TEXT, ("model.from=base",)])
def test_the_line_that_began_the_run_is_accepted_again(keys: tuple[str, ...]) -> None:
    folder = begun(keys)
    flags = StartFlags(overrides=keys)
    assert flags.require_consistent(StateFolder(folder).read_run(flags.own), folder) == []
    line = [part for one in keys for part in ("--set", one)]
    local.check_run(local.parse(line), Path("swarm"))


def test_the_same_file_by_another_path_is_no_difference(tmp_path: Path) -> None:
    folder = begun(TEXT)
    flags = StartFlags(overrides=(*TEXT, f"data.path={tmp_path}/swarm/../texts/"))
    flags.require_consistent(StateFolder(folder).read_run(flags.own), folder)


def test_the_line_that_began_the_run_is_accepted_in_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service repeats a line that was first typed at home, but in the folder /."""
    Path("texts").mkdir()
    folder = begun(TEXT).absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    flags = StartFlags(overrides=TEXT)
    flags.require_consistent(StateFolder(folder).read_run(flags.own), folder)
    Path("texts").mkdir()
    assert "not texts; leave data.path out" in refusal(folder, flags)


def test_a_flag_replaces_the_folder_s_file_and_the_config_s() -> None:
    folder = begun(TEXT)
    flags = StartFlags(overrides=(*TEXT, "data.path=more"), own=OwnInputs(data="most"))
    kept = StateFolder(folder).read_run(flags.own)
    flags.require_consistent(kept, folder)
    assert kept is not None
    assert kept[1].data.path == "most"


@pytest.mark.parametrize(
    "changed", [OwnInputs(upload="off"), OwnInputs(data="most"), OwnInputs(upload="off", data="b")]
)
def test_the_line_that_began_the_run_is_accepted_after_flags_have_changed_what_it_names(changed: OwnInputs) -> None:
    """A supervisor repeats its line after a reboot, though somebody has once started the peer with --upload off."""
    folder, repeated = begun(TEXT), StartFlags(overrides=TEXT)
    for flags in (StartFlags(own=changed), repeated):
        kept = StateFolder(folder).read_run(flags.own)
        flags.require_consistent(kept, folder)
        assert kept is not None
        StateFolder(folder).write_run(*kept)
        assert kept[1].own_inputs.upload == (changed.upload or str(Path("copies").absolute()))
    warned = repeated.require_consistent(kept, folder)
    assert len(warned) == bool(changed.upload) + bool(changed.data)
    assert all(" is not used: a later start has set it to " in one and str(folder) in one for one in warned)
    said = refusal(folder, StartFlags(overrides=(*TEXT, "train.upload=elsewhere")))
    assert "not elsewhere; leave train.upload out" in said


def test_a_destination_that_the_run_lacks_is_refused_too() -> None:
    said = refusal(begun(TEXT[:2]), StartFlags(overrides=TEXT[:2] + ("train.upload=copies",)))
    assert "where train.upload is not set, not copies; leave train.upload out, or" in said


# One peer's folder, and a swarm's


def said_by(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize("left", ["run.json", "identity.key"])
def test_no_swarm_begins_in_the_folder_of_one_peer(capsys: pytest.CaptureFixture[str], left: str) -> None:
    begun((), "swarm/peer-1")
    Path("swarm/peer-0").mkdir()
    Path("swarm/peer-0", left).touch()
    meant = "for its whole swarm give --state-dir swarm; for this peer alone: decentral.peer --state-dir swarm/peer-0"
    said = said_by(capsys, local.main(["--state-dir", "swarm/peer-0"]))
    assert said == f"--state-dir swarm/peer-0 is the folder of one peer; {meant}"
    assert [one.name for one in Path("swarm/peer-0").iterdir()] == [left]


@pytest.mark.parametrize("command", [identity, doctor])
def test_no_peer_s_key_is_made_or_sought_in_the_folder_of_a_swarm(
    capsys: pytest.CaptureFixture[str], command: ModuleType
) -> None:
    begun(())
    said = said_by(capsys, command.main(["--state-dir", "swarm"]))
    assert said == "--state-dir expects the folder of one peer; swarm holds folders of peers: name one: peer-0"
    assert [one.name for one in Path("swarm").iterdir()] == ["peer-0"]


@pytest.mark.parametrize("first", [None, RunId("other-1f2e3d")])
def test_peers_of_several_runs_are_no_local_swarm(first: RunId | None) -> None:
    """`decentral.peer` names its folders swarm/peer-1 and so on; a new run began beside these."""
    begun((), "swarm/peer-1")
    if first:
        Path("swarm/peer-0").mkdir()
        StateFolder(Path("swarm/peer-0")).write_run(first, config.Config())
    other = f"peer-0 to run {first}" if first else "peer-0 to none"
    with pytest.raises(UserError) as error:
        local.check_run(local.parse([]), Path("swarm"))
    assert str(error.value) == f"swarm/peer-1 belongs to run {RUN}, but {other}; use another --state-dir"
