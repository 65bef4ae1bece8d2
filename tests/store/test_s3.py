"""Uploads to a real S3 server: killed in the middle they are absent, then resumed, and a new swarm begins from them."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from decentral.commands import export, push
from decentral.core import jobs, strict_json
from decentral.core.ids import RunId
from decentral.engine.compute import Compute, ComputeSetup
from decentral.model import start_weights
from decentral.peers.startup.state import StateFolder
from decentral.serving import replicas
from decentral.store.fetching import fetched, newest
from decentral.store.places import SEND_BYTES, store_of
from tests.commands.peer_processes import TINY, Peers
from tests.patient_time import LIMIT_S
from tests.store.conftest import SECRET
from tests.store.local_uploads import at_step, model_folder, state_folder

SLOW = "20Mb/s"  # a part of 5 MiB takes 2 s


def stored(place: str) -> dict[str, dict[str, int]]:
    store = store_of(place)
    return {name: store.files(name) for name in store.folders()}


def told(capfd: pytest.CaptureFixture[str]) -> dict[str, object]:
    found = strict_json.loads(capfd.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_an_upload_that_is_killed_in_the_middle_is_absent_and_goes_on_later(
    bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, folder = f"{bucket}/killed", state_folder(tmp_path / "peer", parts=4)
    command = [sys.executable, "-m", "decentral.push", str(folder), place, "--rate", SLOW]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + LIMIT_S
    while not any("checkpoint.safetensors-00000" in files for files in stored(place).values()):
        assert child.poll() is None, "it has ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.kill()
    child.wait()
    there = sum(size for files in stored(place).values() for size in files.values())
    assert newest(store_of(place), "checkpoint") is None
    at_step(folder, 8, parts=1)  # the peer trains on meanwhile
    assert push.main([str(folder), place, "--json"]) == 0
    steps = [
        found.manifest.step for name in stored(place) if (found := newest(store_of(f"{place}/{name}"), "checkpoint"))
    ]
    assert sorted(steps) == [7, 8]
    whole = sum(size for files in stored(place).values() for size in files.values())
    assert there > 0
    assert whole > there
    assert told(capfd)["step"] == 8


def test_a_resumed_upload_sends_only_what_is_missing(
    bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, folder = f"{bucket}/resumed", state_folder(tmp_path / "peer", parts=3)
    assert push.main([str(folder), place, "--json"]) == 0
    first, store = told(capfd), store_of(place)
    store._files.rm_file(store._path(f"{first['name']}/manifest.json"))  # type: ignore[attr-defined]
    store._files.rm_file(store._path(f"{first['name']}/checkpoint.safetensors-00001"))  # type: ignore[attr-defined]
    assert push.main([str(folder), place, "--json"]) == 0
    assert told(capfd)["sent"] == 5 * 1024 * 1024
    assert fetched(place, "checkpoint", "--resume-from", print).exists()


def test_a_part_with_other_content_is_told_by_its_digest(
    bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, folder = f"{bucket}/spoilt", state_folder(tmp_path / "peer")
    assert push.main([str(folder), place, "--json"]) == 0
    first, store = told(capfd), store_of(place)
    store._files.rm_file(store._path(f"{first['name']}/manifest.json"))  # type: ignore[attr-defined]
    spoilt = store._path(f"{first['name']}/checkpoint.safetensors-00001")  # type: ignore[attr-defined]
    store._files.pipe_file(spoilt, bytes(5 * 1024 * 1024))  # type: ignore[attr-defined]
    assert push.main([str(folder), place, "--json"]) == 0
    assert told(capfd)["sent"] == 5 * 1024 * 1024


def test_older_checkpoints_are_removed(bucket: str, tmp_path: Path) -> None:
    place, folder = f"{bucket}/pruned", state_folder(tmp_path / "peer", parts=1)
    for step in (8, 9, 10):
        assert push.main([str(at_step(folder, step, parts=1)), place, "--keep", "2"]) == 0
    assert len(stored(place)) == 2


def trained(setup: ComputeSetup, folder: Path) -> float:
    """Make the folder that of a peer of this run that has trained; return its held-out loss."""
    compute = Compute(setup)
    for mixed in compute.gossip.fragments:
        mixed.live.theta.mul_(0.9)
    compute.do(jobs.Save())
    StateFolder(folder).write_run(RunId("words-3fa2c1"), setup.config)
    return loss_of(setup, folder)


def loss_of(setup: ComputeSetup, folder: Path) -> float:
    weights = replicas.read(folder)
    assert weights is not None
    return replicas.held_out_loss(setup.config, weights)


def test_a_new_peer_begins_from_an_uploaded_checkpoint_with_the_loss_that_it_had(
    bucket: str, tmp_path: Path, setup_of: Callable[..., ComputeSetup]
) -> None:
    setup, other = setup_of("A"), setup_of("B")
    before = trained(setup, setup.folder)
    assert push.main([str(setup.folder), f"{bucket}/loss"]) == 0
    shutil.rmtree(setup.folder)
    StateFolder(other.folder).restore(fetched(f"{bucket}/loss", "checkpoint", "--resume-from", print))
    assert Compute(other).resume()
    assert loss_of(other, other.folder) == before


def test_a_new_run_begins_from_an_uploaded_export_with_the_loss_that_it_had(
    bucket: str, tmp_path: Path, setup_of: Callable[..., ComputeSetup]
) -> None:
    setup, out = setup_of("A"), tmp_path / "model"
    before = trained(setup, setup.folder)
    assert export.main(["--state-dir", str(setup.folder), "--out", str(out)]) == 0
    assert push.main([str(out), f"{bucket}/models"]) == 0
    folder = fetched(f"{bucket}/models", "model", "--model-from", print)
    model = setup.config.model.model_copy(update={"start_from": str(folder)})
    run = setup.config.model_copy(update={"model": model.model_copy(update={"weights": start_weights.digest(model)})})
    begun = Compute(ComputeSetup(run, setup.peer, setup.corpus, setup.codecs, setup.device, tmp_path / "B"))
    weights = {mixed.live.fragment.index: mixed.live.theta for mixed in begun.gossip.fragments}
    assert replicas.held_out_loss(run, weights) == pytest.approx(before, abs=1e-6)


def test_a_large_file_of_a_model_is_one_object_that_other_programs_read(bucket: str, tmp_path: Path) -> None:
    place, weights = f"{bucket}/large", bytes(range(256)) * (2 * SEND_BYTES // 256) + b"end"
    folder = model_folder(tmp_path / "model", weights)
    for _ in range(2):
        assert push.main([str(folder), place]) == 0
    ((name, files),) = stored(place).items()
    assert files["model.safetensors"] == len(weights)
    fetched_folder = fetched(f"{place}/{name}", "model", "--model-from", print)
    assert (fetched_folder / "model.safetensors").read_bytes() == weights


def test_an_export_is_made_from_an_uploaded_checkpoint(
    bucket: str, tmp_path: Path, setup_of: Callable[..., ComputeSetup]
) -> None:
    setup = setup_of("A")
    trained(setup, setup.folder)
    assert push.main([str(setup.folder), f"{bucket}/exported"]) == 0
    assert export.main(["--state-dir", f"{bucket}/exported", "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_store_that_refuses_is_one_line(bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = state_folder(tmp_path / "peer", parts=1)
    assert push.main([str(folder), "s3://no-such-bucket/x"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: s3://no-such-bucket/x: ")
    assert SECRET not in line
    assert push.main([str(folder), "s3://no-such-bucket/x"]) == 2  # the first try has made no bucket


@pytest.mark.swarm
@pytest.mark.night
def test_a_whole_new_swarm_goes_on_from_what_a_lost_one_has_uploaded(bucket: str, peers: Peers, tmp_path: Path) -> None:
    place = f"{bucket}/swarm"
    often = ["--set", "train.eval_every_s=1", "--set", "swarm.checkpoint_every_s=1"]
    peers.start("A", "default", *TINY, *often, "--upload", place, "--stop-after", "150steps")
    assert peers.processes["A"].wait(LIMIT_S) == 0
    (last,) = peers.lines("A", "upload")[-1:]
    assert last["outcome"] == "done"
    written = b"".join(path.read_bytes() for path in (tmp_path / "A").glob("*.json*"))
    assert SECRET.encode() not in written
    kept, weights = StateFolder(tmp_path / "A").look_at_run(), replicas.read(tmp_path / "A")
    assert kept is not None
    assert weights is not None
    before = replicas.held_out_loss(kept[1].built_in(), weights)
    shutil.rmtree(tmp_path / "A")
    peers.start("B", "--resume-from", place)
    peers.until("B evaluates", lambda: bool(peers.lines("B", "eval")))
    first = peers.lines("B", "eval")[0]["loss"]
    assert peers.lines("B", "started")[0]["run"] == last["name"].partition("-step-")[0].rpartition("-")[0]
    assert first < before + 0.1 < 3.5  # a model that has learned nothing has 5.2
    peers.start("C", "--join", peers.lines("B", "started")[0]["addresses"][0])
    peers.until("C joins", lambda: bool(peers.lines("C", "joined")))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET
