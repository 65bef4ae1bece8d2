"""The templates under deploy/, each read by the real tool; one that is not installed here is named as the reason."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from decentral.comm.wire.identity import Identity
from decentral.commands import identity, peer
from decentral.peers.runtime.host import FAREWELL_S, FINISH_S

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
OVERLAYS = ("base", "private", "cuda")
LEAVES_IN_S = FAREWELL_S + FINISH_S
FIRST = "/dns4/decentral-first/tcp/4001/p2p/QmbWKSU3CqtsYCbWKXMuJ81GeLRTxwYzfxj3UDSqzcK9U6"


def tool(name: str) -> str:
    """The tool's path; skips the test where it is not installed. The dev extra brings those that are light."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def run(name: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([tool(name), *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the manifests, with the key and the address that the user makes first."""
    folder = tmp_path_factory.mktemp("deploy") / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder, ignore=shutil.ignore_patterns("first"))
    own = Identity.load_or_create(folder / "base" / "first" / "identity.key")
    (folder / "base" / "first" / "address.env").write_text(f"FIRST=/dns4/decentral-first/tcp/4001/p2p/{own.peer}\n")
    return folder


def manifests(kubernetes: Path, overlay: str) -> list[dict[str, Any]]:
    return documents(run("kubectl", "kustomize", kubernetes / overlay))


def parsed(container: dict[str, Any]) -> Any:
    """What the peer makes of a container's arguments, in which Kubernetes replaces $(FIRST)."""
    first, *flags = (flag.replace("$(FIRST)", FIRST) for flag in container["args"])
    assert first == "peer"
    return peer.parse(flags)


def test_the_image_passes_hadolint() -> None:
    run("hadolint", DEPLOY / "Containerfile")


@pytest.mark.parametrize("script", ["deploy/slurm/peers.sbatch", "benchmarks/gpu/offline.sh"])
def test_a_script_passes_shellcheck(script: str) -> None:
    run("shellcheck", ROOT / script)


def test_the_shell_in_templates_passes_shellcheck(tmp_path: Path) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "peer.yaml").read_text())
    names = " ".join([*task["envs"], *task["secrets"]])
    script = tmp_path / "run.sh"
    script.write_text(f'#!/usr/bin/env bash\n: "${{{names.replace(" ", "}${")}}}"\n{task["setup"]}\n{task["run"]}')
    run("shellcheck", "--exclude=SC2154", script)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_fit_the_schemas_of_kubernetes(kubernetes: Path, tmp_path: Path, overlay: str) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(run("kubectl", "kustomize", kubernetes / overlay))
    run("kubernetes-validate", "--strict", rendered)


def test_the_indexed_job_fits_the_schema_of_kubernetes() -> None:
    run("kubernetes-validate", "--strict", DEPLOY / "kubernetes" / "indexed-job" / "job.yaml")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_an_identity_of_its_own_and_time_to_leave(kubernetes: Path, overlay: str) -> None:
    sets = [one for one in manifests(kubernetes, overlay) if one["kind"] == "StatefulSet"]
    assert {one["metadata"]["name"] for one in sets} == {"decentral-first", "decentral-peers"}
    for one in sets:
        pod = one["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > LEAVES_IN_S
        (container,) = pod["containers"]
        assert parsed(container).state_dir == "/state"
        (claim,) = one["spec"]["volumeClaimTemplates"]
        assert {"name": claim["metadata"]["name"], "mountPath": "/state"} in container["volumeMounts"]


def test_only_the_first_pod_gets_the_first_key_and_the_others_join_it(kubernetes: Path) -> None:
    found = {one["metadata"]["name"]: one for one in manifests(kubernetes, "base") if one["kind"] == "StatefulSet"}
    pods = {name: one["spec"]["template"]["spec"] for name, one in found.items()}
    assert found["decentral-first"]["spec"]["replicas"] == 1
    assert [volume["secret"]["secretName"].rsplit("-", 1)[0] for volume in pods["decentral-first"]["volumes"]] == [
        "decentral-first"
    ]
    assert "volumes" not in pods["decentral-peers"]
    assert parsed(pods["decentral-peers"]["containers"][0]).join == (FIRST,)
    assert parsed(pods["decentral-first"]["containers"][0]).join == ()


def test_in_the_private_swarm_the_invitation_is_a_secret(kubernetes: Path) -> None:
    found = {one["metadata"]["name"]: one for one in manifests(kubernetes, "private") if one["kind"] == "StatefulSet"}
    first, others = (found[f"decentral-{role}"]["spec"]["template"]["spec"] for role in ("first", "peers"))
    assert parsed(first["containers"][0]).private
    assert parsed(others["containers"][0]).invite == "/invite/invite"
    assert [volume["secret"]["secretName"] for volume in others["volumes"]] == ["decentral-invite"]


def test_compose_reads_its_file_and_gives_each_peer_a_volume() -> None:
    project = yaml.safe_load(run("docker-compose", "--file", DEPLOY / "compose.yaml", "config"))
    peers = {name: one for name, one in project["services"].items() if name != "address"}
    volumes = [mount["source"] for one in peers.values() for mount in one["volumes"] if mount["target"] == "/state"]
    assert sorted(volumes) == ["first", "second", "third"]
    assert all(int(one["stop_grace_period"].replace("m", "").replace("s", "")) for one in peers.values())


def test_the_unit_passes_systemd_and_signals_the_peer_alone(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "decentral-peer@.service").read_text()
    unit = tmp_path / "decentral-peer@.service"
    unit.write_text(text.replace("/opt/decentral/bin/decentral", sys.executable))
    run("systemd-analyze", "verify", "--man=no", unit)
    assert "KillMode=mixed" in text


def test_skypilot_reads_its_task() -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed here")
    task = sky.Task.from_yaml(str(DEPLOY / "skypilot" / "peer.yaml"))
    assert all(one.use_spot for one in task.resources)


def test_a_peer_s_address_is_known_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--state-dir", str(tmp_path), "--address", "/dns4/first/tcp/4001"]
    assert identity.main(flags) == identity.main(flags) == 0
    own = Identity.load_or_create(tmp_path / "identity.key")
    assert capsys.readouterr().out == 2 * f"/dns4/first/tcp/4001/p2p/{own.peer}\n"
