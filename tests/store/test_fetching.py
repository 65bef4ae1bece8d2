"""Fetching from a store that anybody may have written: the newest whole upload, checked by size and digest."""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.peers.startup.state import StateFolder
from decentral.store import fetching
from decentral.store.fetching import CHECKPOINT_KEPT_S, cache_folder, fetched
from tests.store.local_uploads import RUN, at_step, model_folder, pushed, state_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A place with checkpoints of steps 7 and 8."""
    folder = state_folder(tmp_path / "peer", 7)
    pushed(folder, tmp_path / "place")
    pushed(at_step(folder, 8), tmp_path / "place")
    return tmp_path / "place"


def get(place: Path, kind: str = "checkpoint") -> Path:
    assert kind in ("checkpoint", "model")
    return fetched(str(place), "model" if kind == "model" else "checkpoint", "--resume-from", lambda _: None)


def refusal(place: Path, kind: str = "checkpoint") -> str:
    with pytest.raises(UserError) as caught:
        get(place, kind)
    assert str(caught.value).isprintable()
    return str(caught.value)


def newest_of(place: Path) -> Path:
    return sorted(place.iterdir())[-1]


def test_the_newest_checkpoint_comes_as_it_was(place: Path, tmp_path: Path) -> None:
    folder = get(place)
    assert {path.name for path in folder.iterdir()} == {"run.json", "checkpoint.safetensors"}
    here, there = (one / "checkpoint.safetensors" for one in (folder, tmp_path / "peer"))
    assert here.read_bytes() == there.read_bytes()


def test_an_upload_can_be_named(place: Path) -> None:
    older, newer = sorted(place.iterdir())
    assert get(older) != get(newer) == get(place)


def test_an_upload_without_its_manifest_does_not_exist(place: Path) -> None:
    older, newer = sorted(place.iterdir())
    (newer / "manifest.json").unlink()
    assert get(place) == get(older)
    (older / "manifest.json").unlink()
    assert "has no whole upload of a checkpoint; decentral push DIR" in refusal(place)


def test_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    pushed(model_folder(tmp_path / "model"), tmp_path / "place")
    remedy = f"it has a model: decentral peer --model-from {tmp_path}/place begins from it"
    assert refusal(tmp_path / "place").endswith(remedy)
    folder = get(tmp_path / "place", "model")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}


def test_a_checkpoint_is_no_model(place: Path) -> None:
    assert refusal(place, "model").endswith(f"it has a checkpoint: decentral peer --resume-from {place} begins from it")


def test_a_folder_with_uploads_is_told_from_a_model(place: Path, tmp_path: Path) -> None:
    pushed(model_folder(tmp_path / "model"), tmp_path / "models")
    (upload,) = (tmp_path / "models").iterdir()
    holds = [fetching.holds_uploads(str(one)) for one in (place, newest_of(place), upload.parent, "hf://me/it")]
    assert all(holds)
    assert not any(fetching.holds_uploads(str(one)) for one in (upload, tmp_path / "model", tmp_path / "gone"))


def test_of_several_models_one_must_be_named(tmp_path: Path) -> None:
    for number in (1, 2):
        pushed(model_folder(tmp_path / f"model-{number}", bytes([number])), tmp_path / "place")
    assert "the place has 2 models; name one, such as .../model-" in refusal(tmp_path / "place", "model")


def test_what_was_downloaded_is_not_downloaded_again(place: Path) -> None:
    folder = get(place)
    for part in newest_of(place).glob("checkpoint*"):
        part.unlink()
    assert get(place) == folder


def test_a_download_removes_checkpoints_of_long_ago_and_interrupted_downloads_and_no_model(
    place: Path, tmp_path: Path
) -> None:
    pushed(model_folder(tmp_path / "model"), tmp_path / "models")
    older, _ = sorted(place.iterdir())
    model, old, young = get(tmp_path / "models", "model"), get(older), get(place)
    interrupted, in_progress = cache_folder() / "abc.part", cache_folder() / "def.part"
    for one in (interrupted, in_progress):
        one.mkdir()
    for one in (model, old, interrupted, in_progress):
        os.utime(one, (0, time.time() - CHECKPOINT_KEPT_S - 60))
    pushed(at_step(tmp_path / "peer", 9), place)
    with (cache_folder() / "def.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = get(place)
    stay = {path for path in cache_folder().iterdir() if path.is_dir()}
    assert stay == {model, young, newest, in_progress}


def test_a_checkpoint_that_is_fetched_again_is_young_again(place: Path, tmp_path: Path) -> None:
    older, _ = sorted(place.iterdir())
    old = get(older)
    os.utime(old, (0, 0))
    assert get(older) == old
    get(place)
    assert old.exists()


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone"])
def test_a_part_that_differs_from_the_manifest_is_refused_and_nothing_of_it_is_kept(place: Path, change: str) -> None:
    part = newest_of(place) / "checkpoint.safetensors-00001"
    data = part.read_bytes()
    changed = {"longer": data + b"x", "shorter": data[:-1], "other": b"x" + data[1:]}
    if change == "gone":
        part.unlink()
    else:
        part.write_bytes(changed[change])
    said = refusal(place)
    assert "differs from its manifest" in said or change == "gone"
    assert not [path for path in cache_folder().iterdir() if path.is_dir() and path.suffix != ".part"]
    part.write_bytes(data)
    assert get(place).exists()


def test_a_pipe_in_a_folder_is_refused_and_never_waited_for(place: Path) -> None:
    part = newest_of(place) / "checkpoint.safetensors-00001"
    part.unlink()
    os.mkfifo(part)
    assert "expected a file; it is a pipe" in refusal(place)


def rewritten(place: Path, **fields: object) -> None:
    path = newest_of(place) / "manifest.json"
    found: JsonObject = strict_json.loads(path.read_text())
    path.write_text(strict_json.dumps({**found, **fields}))


def test_an_upload_that_does_not_fit_the_disk_is_refused_before_it_comes(place: Path) -> None:
    parts = strict_json.loads((newest_of(place) / "manifest.json").read_text())["parts"]
    parts[1]["bytes"] = 1 << 45
    rewritten(place, parts=parts)
    assert "make room, or set XDG_CACHE_HOME" in refusal(place)


def test_a_cut_manifest_counts_only_where_there_is_no_whole_upload(place: Path) -> None:
    older, newer = sorted(place.iterdir())
    for path in (newer, older):
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:-20])
        if path == newer:
            assert (get(place) / "run.json").exists()
    assert "is no manifest that this release reads" in refusal(place)


def test_a_manifest_that_is_too_large_is_refused_unread(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_MANIFEST_BYTES", 100)
    assert "has more than 100 bytes" in refusal(place)


def test_a_file_that_no_checkpoint_has_is_refused(place: Path) -> None:
    parts = strict_json.loads((newest_of(place) / "manifest.json").read_text())["parts"]
    rewritten(place, parts=[{**parts[0], "of": "identity.key"}])
    assert "names the file identity.key, which a checkpoint does not have" in refusal(newest_of(place))


def test_a_run_that_names_files_of_this_machine_is_refused(place: Path, tmp_path: Path) -> None:
    """Nothing in an upload may make a peer read a file or run code that its user has not named."""
    folder = state_folder(tmp_path / "liar", 9, parts=1)
    run = strict_json.loads((folder / "run.json").read_text())
    settings = strict_json.loads(run["config"])
    settings["train"]["upload"] = "s3://elsewhere/x"
    (folder / "run.json").write_text(strict_json.dumps({**run, "config": strict_json.dumps(settings)}))
    pushed(folder, place)
    (tmp_path / "new").mkdir()
    with pytest.raises(UserError, match=r"sets train\.upload, which only a peer's user may set"):
        StateFolder(tmp_path / "new").restore(get(place))


@pytest.mark.parametrize("links", [True, False])
def test_several_state_folders_begin_with_the_run_and_the_checkpoint(
    place: Path, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them was killed before it had the run, and so begins again."""
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    for name in ("new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.safetensors").write_bytes(b"of a start that was killed")
        StateFolder(tmp_path / name).restore(get(place))
        kept = StateFolder(tmp_path / name).look_at_run()
        assert kept is not None
        assert kept[0] == RUN
        same = (tmp_path / name / "checkpoint.safetensors").read_bytes()
        assert same == (tmp_path / "peer" / "checkpoint.safetensors").read_bytes()


def no_link(*_: Path) -> None:
    raise OSError("no hard links here")


def test_a_folder_of_another_run_is_left_as_it_is(place: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "peer", tmp_path / "new")
    run = strict_json.loads((tmp_path / "new" / "run.json").read_text())
    (tmp_path / "new" / "run.json").write_text(strict_json.dumps({**run, "run": "other-123456"}))
    with pytest.raises(UserError, match="belongs to run other-123456; use another --state-dir"):
        StateFolder(tmp_path / "new").restore(get(place))
