"""python -m decentral.push: what it says, and that wrong uses take one line."""

from pathlib import Path

import pytest

from decentral.comm.wire.identity import Identity
from decentral.commands import peer, push
from decentral.core import config, strict_json
from decentral.core.ids import RunId, suffix
from decentral.core.own_inputs import NO_UPLOAD, OwnInputs
from decentral.peers.startup.state import PeerFlags, StateFolder
from tests.commands.refusals import refusal
from tests.store.local_uploads import model_folder, state_folder


def refused(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    assert push.main(list(flags)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_it_says_what_was_sent_and_how_to_begin_from_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = state_folder(tmp_path / "peer", parts=1)
    own = Identity.load_or_create(folder / "identity.key").peer
    assert push.main([str(folder), str(tmp_path / "place")]) == 0
    (upload,) = (tmp_path / "place").iterdir()
    assert upload.name.startswith(f"words-3fa2c1-{suffix(own)}-step-000000000007-")
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith(f"{upload}: whole, ")
    assert second == f"begin from it with: python -m decentral.peer --resume-from {upload}"


def test_json_has_the_name_and_the_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = state_folder(tmp_path / "peer", parts=1)
    assert push.main([str(folder), str(tmp_path / "place"), "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = strict_json.loads(line)
    assert {"name", "kind", "step", "size", "sent", "removed"} == set(found)


def test_it_says_how_far_it_is_while_it_hashes_and_while_it_sends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "TOLD_EVERY_S", 0.0)
    folder = state_folder(tmp_path / "peer", parts=2)
    assert push.main([str(folder), str(tmp_path / "place"), "--json"]) == 0
    *told, result = map(strict_json.loads, capfd.readouterr().out.splitlines())
    assert [max(one.get(done, 0) for one in told) for done in ("hashed", "sent")] == [result["size"], result["size"]]
    assert "hashed" in told[0]


def test_a_model_without_a_card_is_said_to_have_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path / "model")
    assert push.main([str(folder), str(tmp_path / "place")]) == 0
    assert "model card" not in capfd.readouterr().out
    (folder / "README.md").unlink()
    assert push.main([str(folder), str(tmp_path / "place")]) == 0
    assert "it has no model card (README.md), which decentral export writes" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--keep", "0"), "expected a number of checkpoints, at least 1; got '0'"),
        (("--rate", "fast"), "expected a rate in Mb/s"),
        (("--kep", "1"), "did you mean --keep?"),
    ],
)
def test_a_wrong_flag(tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str) -> None:
    assert said in refused(capfd, str(tmp_path), str(tmp_path / "place"), *flags)


def test_a_folder_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "is no folder; give a peer's state folder" in refused(capfd, str(tmp_path / "x"), str(tmp_path / "place"))


def test_a_place_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capfd, str(state_folder(tmp_path / "peer", parts=1)), str(tmp_path / "file" / "place"))
    assert said.startswith(str(tmp_path / "file" / "place"))


# The flags of a peer


def test_a_peer_keeps_how_it_uploads(tmp_path: Path) -> None:
    flags = peer.parse(
        ["--state-dir", str(tmp_path), "--upload", "s3://b/x", "--upload-rate", "16", "--upload-keep", "5"]
    )
    assert (flags.own.upload, flags.peer.upload_rate, flags.peer.upload_keep) == ("s3://b/x", 2e6, 5)
    assert peer.parse([]).peer == PeerFlags()


def test_a_peer_whose_place_is_none_does_not_start(tmp_path: Path) -> None:
    assert "without user, key or options" in refusal(tmp_path / "peer", "--upload", "s3://me:key@b/x")
    assert not (tmp_path / "peer").exists()


def test_a_peer_does_not_begin_from_what_is_not_there(tmp_path: Path) -> None:
    said = refusal(tmp_path / "peer", "--resume-from", str(tmp_path / "none"))
    assert "has no whole upload of a checkpoint" in said
    assert not (tmp_path / "peer").exists()


def test_a_folder_s_place_is_kept_as_an_absolute_path_and_off_ends_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = StateFolder(tmp_path)
    for place, kept in (("backup", str(tmp_path / "backup")), ("s3://b/x", "s3://b/x"), (NO_UPLOAD, NO_UPLOAD)):
        folder.write_run(RunId("words-3fa2c1"), config.load(None, own=OwnInputs(upload=place)))
        (_, settings) = folder.read_run() or (None, config.Config())
        assert settings.train.upload == kept
