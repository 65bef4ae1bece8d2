"""Pushing to a store: whole or absent, resumed, pruned, at a limited pace, and never with what must stay at home."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.units import MiB
from decentral.store.fetching import newest
from decentral.store.manifest import step_of
from decentral.store.places import SEND_BYTES, store_of
from decentral.store.sending import PartReader, SendPace, link_of, push
from tests.store.local_uploads import CutOffStore, Interrupted, at_step, model_folder, opened, pushed, state_folder


def test_a_checkpoint_is_found_again_with_its_run_and_step(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    result = pushed(folder, place)
    found = newest(store_of(str(place)), "checkpoint")
    assert found is not None
    assert (found.folder, found.manifest.step, found.manifest.run) == (result.name, 7, "words-3fa2c1")
    assert result.sent == result.size == found.manifest.size


def test_a_part_differs_from_no_byte_of_the_file(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    stored = place / pushed(folder, place).name
    parts = sorted(stored.glob("checkpoint.safetensors-*"))
    assert len(parts) == 3
    assert b"".join(part.read_bytes() for part in parts) == (folder / "checkpoint.safetensors").read_bytes()


@pytest.mark.parametrize("sends", [0, 1, 2, 3, 4])
def test_what_is_cut_off_does_not_count_and_goes_on_with_what_is_missing(tmp_path: Path, sends: int) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    with opened(folder, place) as upload, pytest.raises(Interrupted):
        push(upload, CutOffStore(place, sends), None, SendPace(None), lambda _: None)
    assert newest(store_of(str(place)), "checkpoint") is None
    there = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    result = pushed(folder, place)
    assert result.sent == result.size - there
    assert newest(store_of(str(place)), "checkpoint") is not None


def test_an_interrupted_upload_goes_on_though_the_peer_has_a_newer_checkpoint(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    with opened(folder, place) as upload, pytest.raises(Interrupted):
        push(upload, CutOffStore(place, 2), None, SendPace(None), lambda _: None)
    at_step(folder, 8)
    assert [pushed(folder, place).step, pushed(folder, place).step] == [7, 8]
    assert not link_of(folder, str(place)).exists()


def test_a_part_of_the_right_size_but_other_content_is_sent_again(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    with opened(folder, place) as upload:
        spoilt = place / upload.manifest.name / "checkpoint.safetensors-00001"
        spoilt.parent.mkdir(parents=True)
        spoilt.write_bytes(bytes(SEND_BYTES))
    result = pushed(folder, place)
    assert result.sent == result.size


def test_what_is_whole_is_not_sent_again(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    pushed(folder, place)
    assert pushed(folder, place).sent == 0


def test_a_push_says_that_it_goes_on_also_while_it_finds_parts_that_are_there(tmp_path: Path) -> None:
    """A peer ends an upload that says nothing for minutes."""
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    with opened(folder, place) as upload, pytest.raises(Interrupted):
        push(upload, CutOffStore(place, 4), None, SendPace(None), lambda _: None)
    told: list[int] = []
    with opened(folder, place) as upload:
        push(upload, store_of(str(place)), None, SendPace(None), told.append)
    assert len(told) >= 4
    assert sum(told) == 0


def test_a_push_says_that_it_goes_on_while_it_computes_digests(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), tmp_path / "place"
    told: list[int] = []
    with opened(folder, place, hashed=told.append) as upload:
        assert sum(told) == upload.manifest.size
    assert max(told) <= MiB


def test_a_push_says_that_it_goes_on_with_each_old_file_that_it_removes(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer", 1, parts=3), tmp_path / "place"
    old = len(list((place / pushed(folder, place).name).iterdir()))
    counts = []
    for step, keep in ((2, None), (3, 1)):
        told: list[int] = []
        with opened(at_step(folder, step), place) as upload:
            push(upload, store_of(str(place)), keep, SendPace(None), told.append)
        link_of(folder, str(place)).unlink()
        counts.append(told.count(0))
    assert counts[1] == counts[0] + 2 * old


def test_neither_the_key_nor_paths_nor_flags_leave_the_folder(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer", parts=1), tmp_path / "place"
    for name in ("identity.key", "flags.json", "invitation.json", "founder.json"):
        (folder / name).write_text("a secret")
    run = (folder / "run.json").read_text()
    (folder / "run.json").write_text(run.replace('"data": null', '"data": "/home/ann/a secret"', 1))
    assert "a secret" in (folder / "run.json").read_text()
    pushed(folder, place)
    assert not [path for path in place.rglob("*") if path.is_file() and b"a secret" in path.read_bytes()]


def test_only_a_peer_s_newest_checkpoints_stay_and_those_of_others(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer", 1, parts=1), tmp_path / "place"
    others = state_folder(tmp_path / "other", 1, parts=1)
    with opened(others, place, PeerId("QmBob-ijklmnop")) as upload:
        push(upload, store_of(str(place)), 1, SendPace(None), lambda _: None)
    for step in (2, 3, 4, 5):
        pushed(at_step(folder, step, parts=1), place, keep=2)
    steps = sorted(step_of(path.name) for path in place.glob("*-abcdefgh-*"))
    assert steps == [4, 5]
    assert len(list(place.glob("*-ijklmnop-*"))) == 1


def test_an_older_upload_that_is_not_whole_is_pruned_and_counts_for_none(tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer", 1, parts=1), tmp_path / "place"
    broken = place / pushed(folder, place).name
    (broken / "manifest.json").unlink()
    pushed(at_step(folder, 2, parts=1), place, keep=2)
    result = pushed(at_step(folder, 3, parts=1), place, keep=2)
    assert not broken.exists()
    assert [step_of(path.name) for path in sorted(place.iterdir())] == [2, 3]
    assert result.removed == []


def test_a_model_is_pushed_as_the_files_that_programs_load(tmp_path: Path) -> None:
    folder, place = model_folder(tmp_path / "model"), tmp_path / "place"
    result = pushed(folder, place)
    names = {path.name for path in (place / result.name).iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md", "manifest.json"}


def test_a_file_that_changes_meanwhile_makes_no_upload(tmp_path: Path) -> None:
    folder, place = model_folder(tmp_path / "model"), tmp_path / "place"
    with opened(folder, place) as upload:
        (folder / "model.safetensors").write_bytes(b"other")
        with pytest.raises(UserError, match=r"model\.safetensors was changed while it was sent"):
            push(upload, store_of(str(place)), None, SendPace(None), lambda _: None)
    assert newest(store_of(str(place)), "model") is None


def of_a_run_elsewhere(folder: Path) -> None:
    state_folder(folder, parts=1)
    run = (folder / "run.json").read_text()
    (folder / "run.json").write_text(run.replace("words-3fa2c1", "../../elsewhere"))


def with_pipe(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    os.mkfifo(folder / "a.json")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: (folder / "x.txt").write_text("x"), "neither a peer's state folder nor a model"),
        (lambda folder: state_folder(folder / "peer-1"), "holds folders of peers; name one: peer-1"),
        (
            lambda folder: [(folder / name).write_text("{}") for name in ("config.json", "m.bin")],
            "has the pickle m.bin",
        ),
        (lambda folder: (folder / "run.json").write_text("{}"), "has no checkpoint yet"),
        (
            lambda folder: [(folder / name).write_text("{}") for name in ("run.json", "checkpoint.safetensors")],
            "damaged run.json or checkpoint",
        ),
        (with_pipe, "cannot be read"),
        (of_a_run_elsewhere, "the id of its run cannot be the name of a folder"),
    ],
)
def test_a_folder_that_cannot_be_uploaded_is_refused_in_one_line(tmp_path: Path, make: object, said: str) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(UserError, match=said), opened(tmp_path, tmp_path / "place"):
        pass


def test_a_limit_of_bandwidth_holds_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + sum(slept))
    pace = SendPace(1000.0)
    for _ in range(20):
        pace.wait(250)
    assert sum(slept) == pytest.approx(5.0)


def test_a_reader_reads_its_part_alone_and_counts_only_what_is_sent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    counted: list[int] = []
    with (tmp_path / "file").open("rb") as file:
        part = PartReader(file, 2, 5, SendPace(None), counted.append)
        assert part.hexdigest("md5") == hashlib.md5(b"23456").hexdigest()
        assert part.equals([b"23", b"456"])
        assert not part.equals([b"23", b"45"])
        assert not part.equals([b"23", b"4567"])
        assert sum(counted) == 0
        assert b"".join(part.pieces()) == b"23456"
        assert sum(counted) == 5
        whole = part.reader()
        assert whole.read() == b"23456"
        assert sum(counted) == 5
        whole.seek(-2, os.SEEK_END)
        assert whole.read() == b"56"
        assert sum(counted) == 7
