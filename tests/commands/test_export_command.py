"""python -m decentral.export: transformers reads our model from what it writes, and errors take one line."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from decentral.comm.wire.identity import Identity
from decentral.commands import export, generate
from decentral.core import jobs, strict_json
from decentral.core.config import Config, ModelConfig
from decentral.core.errors import UserError
from decentral.core.ids import RunId
from decentral.engine import checkpoint
from decentral.engine.compute import Compute, ComputeSetup
from decentral.peers.startup.state import StateFolder
from decentral.serving import gather_weights, replicas
from decentral.serving.gather_weights import HolderWeights

RUN = RunId("words-3fa2c1")
ONE = torch.ones(1)


@pytest.fixture
def folders(setup_of: Callable[..., ComputeSetup]) -> list[Path]:
    """The state folders of two peers of one run, whose weights differ."""
    made = []
    for name, change in (("A", 0.25), ("B", -0.05)):
        setup = setup_of(name)
        compute = Compute(setup)
        for mixed in compute.gossip.fragments:
            mixed.live.theta.add_(change)
        compute.do(jobs.Save())
        StateFolder(setup.folder).write_run(RUN, setup.config)
        made.append(setup.folder)
    return made


def refusal(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    assert export.main(list(flags)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_transformers_loads_the_folder_and_gives_the_averages_logits(
    folders: list[Path], setup_of: Callable[..., ComputeSetup], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install transformers")
    out = tmp_path / "out"
    assert export.main(["--state-dir", *map(str, folders), "--out", str(out)]) == 0
    compute = Compute(setup_of("C"))
    for mixed in compute.gossip.fragments:
        mixed.live.theta.add_(0.1)  # the mean of both changes
    tokens_BT = torch.randint(0, 256, (2, 16))
    llama = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = nn.Sequential(*compute.span.layers)(tokens_BT), llama.eval()(tokens_BT).logits
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_peer_counts_once_beside_a_copy_of_its_folder(folders: list[Path], tmp_path: Path) -> None:
    for folder in folders:
        Identity.load_or_create(folder / "identity.key")
    backup = tmp_path / "A-backup"
    shutil.copytree(folders[0], backup)
    _set_step(folders[0], 12)
    found = gather_weights.from_folders([str(backup), *map(str, folders)])
    assert [one.name for one in found.holders] == [str(folder) for folder in folders]
    assert found.left_out == (f"{backup} at learning-rate step 0: a copy of {folders[0]}, which is at 12",)


def test_a_checkpoint_that_lags_far_behind_is_left_out_and_named(
    folders: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _set_step(folders[0], 500)
    _set_step(folders[1], 451)
    near = gather_weights.from_folders([*map(str, folders)])
    assert (len(near.holders), near.left_out) == (2, ())
    _set_step(folders[1], 449)
    assert export.main(["--state-dir", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    said = capfd.readouterr().out
    assert f"weights of {folders[0]} at learning-rate step 500\n" in said
    assert f"left out: {folders[1]} at learning-rate step 449: far behind step 500 of others\n" in said


@pytest.mark.parametrize("lag", [0, 500])
def test_folders_of_runs_with_one_config_are_not_averaged(
    folders: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], lag: int
) -> None:
    run = StateFolder(folders[1]).read_run()
    assert run is not None
    StateFolder(folders[1]).write_run(RunId("words-77aa01"), run[1])
    _set_step(folders[0], lag)
    found = f"expected folders of one run, found {RUN} in {folders[0]}, words-77aa01 in {folders[1]}"
    for given in (folders, [folders[0].parent]):
        assert found in refusal(capfd, "--state-dir", *map(str, given), "--out", str(tmp_path / "out"))
    assert generate.main(["--state-dir", str(folders[0].parent), "a", "--max-tokens", "1"]) == 2
    assert found in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_old_checkpoint_counts_for_layers_that_only_it_has() -> None:
    old, new = HolderWeights("old", {0: ONE, 1: ONE}, {0: 100, 1: 100}), HolderWeights("new", {1: ONE}, {1: 900})
    assert gather_weights.leave_out_laggards([old, new]) == [
        "old at learning-rate step 100: far behind step 900 of others"
    ]
    assert (set(old.weights), set(new.weights)) == ({0}, {1})


def _set_step(folder: Path, lr_step: int) -> None:
    """Give the folder's checkpoint another step of the swarm."""
    found = checkpoint.read(folder)
    assert found is not None
    tensors, facts = found
    checkpoint.write(folder, tensors, {**facts, "lr_step": lr_step})


def test_transformers_loads_a_tokenizer_whose_tokens_are_the_bytes(folders: list[Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install transformers")
    out = tmp_path / "out"
    assert export.main(["--state-dir", str(folders[0].parent), "--out", str(out)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "def f(x):\n\treturn 'naïve  été — ☃'  # \x00 two  spaces , here\r\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_fragments_that_different_peers_hold_are_put_together() -> None:
    one, other = {0: torch.tensor([1.0]), 1: torch.tensor([2.0])}, {1: torch.tensor([4.0]), 2: torch.tensor([8.0])}
    assert {index: float(mean) for index, mean in replicas.average([one, other]).items()} == {0: 1.0, 1: 3.0, 2: 8.0}


def test_a_layer_that_nobody_holds_is_named(folders: list[Path], capfd: pytest.CaptureFixture[str]) -> None:
    run = StateFolder(folders[0]).read_run()
    assert run is not None
    weights = replicas.read(folders[0])
    assert weights is not None
    del weights[1]
    with pytest.raises(UserError, match="no peer holds layers 1 to 1 of the model"):
        replicas.layers_with(run[1], weights)


def test_a_folder_whose_model_is_code_is_refused_before_the_code_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere.py").write_text("raise SystemExit('this code ran')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "peer"
    folder.mkdir()
    StateFolder(folder).write_run(RUN, Config(model=ModelConfig(layers="elsewhere:layers")))
    said = refusal(capfd, "--state-dir", str(folder), "--out", str(tmp_path / "out"))
    assert "this run's model is Python code (elsewhere:layers)" in said


def test_a_file_that_the_folder_names_is_not_published(folders: list[Path], tmp_path: Path) -> None:
    """Somebody else may have written the folder, and the export is made to be published."""
    secret, out = tmp_path / "id_ed25519", tmp_path / "out"
    secret.write_text("a private key")
    run = strict_json.loads((folders[0] / "run.json").read_text())
    run["own"]["tokenizer"] = str(secret)
    (folders[0] / "run.json").write_text(strict_json.dumps(run))
    assert export.main(["--state-dir", str(folders[0]), "--out", str(out)]) == 0
    assert not [file for file in out.iterdir() if b"a private key" in file.read_bytes()]


def test_a_model_card_says_what_it_is_and_is_left_alone_once_its_user_has_changed_it(
    folders: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--state-dir", *map(str, folders), "--out", str(tmp_path / "out")]
    card = tmp_path / "out" / "README.md"
    for _ in range(2):
        assert export.main(flags) == 0
        assert card.read_text().startswith("---\nlibrary_name: transformers\n")
        assert "README.md names peers and data: read it before you publish" in capfd.readouterr().out
    assert str(tmp_path) not in card.read_text()
    card.write_text("# My own words\n")
    assert export.main(flags) == 0
    assert card.read_text() == "# My own words\n"


# Errors


def test_neither_peers_nor_folders(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refusal(capfd, "--out", str(tmp_path / "out"))
    assert said == "expected either --join ADDR of a running peer, or --state-dir DIR... of stopped ones"


def test_a_folder_that_is_no_peers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refusal(capfd, "--state-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert said == f"--state-dir {tmp_path} has no peer's state; give a state folder, or a folder of state folders"


def test_a_folder_without_a_checkpoint(capfd: pytest.CaptureFixture[str], folders: list[Path], tmp_path: Path) -> None:
    (folders[0] / "checkpoint.safetensors").unlink()
    assert "has no checkpoint" in refusal(capfd, "--state-dir", str(folders[0]), "--out", str(tmp_path / "out"))


def test_an_out_folder_that_cannot_be(capfd: pytest.CaptureFixture[str], folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--out" in refusal(capfd, "--state-dir", str(folders[0]), "--out", str(tmp_path / "file" / "out"))


def test_a_join_address_that_is_none(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--join expects an address" in refusal(capfd, "--join", "nowhere", "--out", str(tmp_path / "out"))


def test_files_that_no_export_wrote_are_not_overwritten(
    folders: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "notes").mkdir()
    (out / "config.json").write_text("mine")
    said = refusal(capfd, "--state-dir", str(folders[0]), "--out", str(out))
    assert "this folder has other files; give a new folder, or one of an earlier export" in said
    assert (out / "config.json").read_text() == "mine"
