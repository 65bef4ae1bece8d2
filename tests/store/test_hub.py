"""Uploads to a Hugging Face repository: one commit, so that a reader sees all of it or nothing, and resumed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.hub import Hub, hub_running
from tests.store.local_uploads import at_step, model_folder, state_folder

pytest.importorskip("huggingface_hub", reason="needs the extra hf: pip install huggingface_hub")

FETCH = """
import sys
from decentral.store.fetching import fetched
print(fetched(sys.argv[1], sys.argv[2], "--model-from", lambda _: None))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_running() as found:
        yield found


def run(hub: Hub, home: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with the stand-in as the Hub, which huggingface_hub reads when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_a_secret_of_the_hub", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "XDG_CACHE_HOME": str(home / "cache")}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


def test_a_model_is_one_commit_at_the_root_and_is_read_as_it_was(hub: Hub, tmp_path: Path) -> None:
    folder, place = model_folder(tmp_path / "model", bytes(range(256)) * 100), "hf://me/my-model"
    pushed = run(hub, tmp_path, "-m", "decentral.push", str(folder), place, "--rate", "1Gb/s")
    assert pushed.returncode == 0, pushed.stdout + pushed.stderr
    files = hub.repositories["me/my-model"]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "manifest.json"}
    found = run(hub, tmp_path, "-c", FETCH, place, "model")
    assert found.returncode == 0, found.stderr
    fetched = Path(found.stdout.strip())
    assert (fetched / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_an_interrupted_upload_shows_nothing_and_then_sends_only_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    folder, place = state_folder(tmp_path / "peer"), "hf://me/runs"
    hub.breaks_after = 2
    pushed = run(hub, tmp_path, "-m", "decentral.push", str(folder), place)
    assert pushed.returncode == 2
    (line,) = pushed.stderr.splitlines()[-1:]
    assert line.startswith("error: hf://me/runs: ")
    assert "hf_a_secret" not in pushed.stdout + pushed.stderr
    assert hub.repositories["me/runs"] == {}
    hub.breaks_after = None
    pushed = run(hub, tmp_path, "-m", "decentral.push", str(folder), place, "--json")
    assert pushed.returncode == 0, pushed.stderr
    assert len(hub.received) == len(set(hub.received)) == 4
    at_step(folder, 8)
    pushed = run(hub, tmp_path, "-m", "decentral.push", str(folder), place, "--keep", "1", "--json")
    assert json.loads(pushed.stdout.splitlines()[-1])["step"] == 8, pushed.stderr
    assert {name.partition("-step-")[2][:12] for name in hub.repositories["me/runs"]} == {"000000000008"}
    found = run(hub, tmp_path, "-c", FETCH, place, "checkpoint")
    assert (Path(found.stdout.strip()) / "checkpoint.safetensors").exists(), found.stderr
