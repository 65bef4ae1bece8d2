"""What a real host does when its machine fails it: training and gossip go on, or the peer says why it ends."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.core import jobs
from decentral.engine import checkpoint, tensor_file
from decentral.engine.compute import MEMORY_REMEDY, Compute
from decentral.peers.runtime.host import NOTHING_TO_SAVE
from decentral.peers.runtime.route_planner import UNHELD_S
from tests.comm.net.loopback import LoopbackDirectory, LoopbackTransport
from tests.peers.runtime.host_swarm import Swarm

SwarmOf = Callable[[str], Swarm]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def folder_of(swarm: Swarm, name: str) -> Path:
    """The folder that a peer will have, before it is there."""
    folder: Path = swarm.setup_of(swarm.identities[name].peer).folder
    return folder


def thetas(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.read(folder)
    assert found is not None
    return {name: tensor for name, tensor in found[0].items() if name.endswith(".theta")}


def test_a_peer_whose_journal_is_on_a_full_disk_trains_and_exchanges_with_all_fragments(swarm_of: SwarmOf) -> None:
    swarm = swarm_of("pull")
    (folder_of(swarm, "B") / "journal.jsonl").symlink_to("/dev/full")

    async def exchanged() -> None:
        await swarm.start("A")
        await swarm.start("B", contacts="A")
        node = swarm.hosts["B"].node
        before = {fragment: exchange.seq for fragment, exchange in node.gossip.running.items()}
        await swarm.until(lambda: node.gossip.counts.outcomes["done"] >= 12)
        await swarm.until(lambda: all(node.gossip.running[one].seq > seq for one, seq in before.items()))

    swarm.play(exchanged())
    assert "No space left on device" in "".join(swarm.hosts["B"].troubles())


def test_layers_that_no_peer_holds_are_a_trouble_that_the_view_shows(swarm_of: SwarmOf) -> None:
    host = swarm_of("pull").add("A", span=(0, 2))
    planner = host.node.route_planner
    assert planner is not None
    planner.refresh(0.0)
    assert host.troubles() == []
    planner.refresh(UNHELD_S)
    assert host.troubles() == [planner.unheld]
    assert planner.unheld.startswith("no peer that trains holds layers 2 to ")


def test_two_machines_that_run_one_identity_both_say_so(swarm_of: SwarmOf, tmp_path: Path) -> None:
    """Their state folders are copies, and both start at once, so that neither finds the other at its start."""
    swarm = swarm_of("pull")
    swarm.identities = {**swarm.identities, "copy of B": swarm.identities["B"]}

    def said(name: str) -> bool:
        trouble = " ".join(swarm.hosts[name].troubles())
        return "uses a copy of this peer's identity" in trouble and bool(swarm.journal(name, "error"))

    async def story() -> None:
        await swarm.start("B")
        setup_of = swarm.setup_of
        swarm.setup_of = lambda *peer, **gossip: replace(setup_of(*peer, **gossip), folder=tmp_path / "copy")
        (tmp_path / "copy").mkdir()
        await swarm.start("copy of B")
        await swarm.until(lambda: said("B") and said("copy of B"))

    swarm.play(story())


def test_addresses_that_a_full_disk_refuses_stop_nobody(swarm_of: SwarmOf, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = swarm_of("pull")
    monkeypatch.setattr(Path, "write_text", full)

    async def exchanged() -> None:
        await swarm.start("A")
        await swarm.start("B", contacts="A")
        await swarm.until(lambda: swarm.all_have_exchanged(3))

    swarm.play(exchanged())
    assert len(swarm.hosts["A"].book.known) == 1


def test_a_last_checkpoint_that_fails_is_said_and_the_one_before_stays(
    swarm_of: SwarmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = swarm_of("pull")

    async def stopped() -> None:
        running = await swarm.start("A")
        host = swarm.hosts["A"]
        host.compute.submit(jobs.Save())
        await swarm.until(lambda: (swarm.folder("A") / checkpoint.FILE).exists())
        monkeypatch.setattr(tensor_file.TensorFile, "finish", full)
        host.stop("interrupted")
        assert await running == "interrupted"
        assert "No space left on device" in host.unsaved

    swarm.play(stopped())
    assert thetas(swarm.folder("A"))
    assert "No space left on device" in swarm.journal("A", "error")[-1]["reason"]
    assert "No space left on device" in swarm.journal("A", "stopped")[-1]["unsaved"]


def test_a_peer_that_has_saved_says_nothing_of_unsaved_work(swarm_of: SwarmOf) -> None:
    swarm = swarm_of("pull")

    async def stopped() -> None:
        running = await swarm.start("A")
        swarm.hosts["A"].stop("interrupted")
        await running

    swarm.play(stopped())
    assert swarm.hosts["A"].unsaved == ""
    assert "unsaved" not in swarm.journal("A", "stopped")[-1]


def test_a_newcomer_that_has_no_weights_yet_leaves_no_checkpoint(swarm_of: SwarmOf) -> None:
    """With initial weights in a checkpoint its next start would train alone, beside the swarm that it had joined."""
    swarm = swarm_of("pull")

    async def stopped() -> None:
        await swarm.start("A")
        host = swarm.add("B", "A")
        host.stop("interrupted")
        assert await host.run() == "interrupted"

    swarm.play(stopped())
    assert not (swarm.folder("B") / checkpoint.FILE).exists()
    assert swarm.journal("B", "stopped")[-1]["unsaved"] == NOTHING_TO_SAVE


def test_a_peer_that_saves_its_last_checkpoint_is_in_no_trouble(
    swarm_of: SwarmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, said, submitted = swarm_of("pull"), list[str](), list[jobs.Job]()

    async def stopped() -> None:
        running = await swarm.start("A")
        host, submit = swarm.hosts["A"], swarm.computes["A"].submit

        def watched(job: jobs.Job) -> None:
            submit(job)
            submitted.append(job)
            said.extend(host.troubles())

        monkeypatch.setattr(swarm.computes["A"], "submit", watched)
        host.stop("interrupted")
        await running

    swarm.play(stopped())
    assert any(isinstance(job, jobs.Save) for job in submitted)
    assert said == []


def test_a_peer_that_is_told_to_stop_before_it_runs_saves_and_leaves(swarm_of: SwarmOf) -> None:
    swarm = swarm_of("pull")

    async def stopped() -> None:
        host = swarm.add("A")
        host.stop("interrupted")
        assert await host.run() == "interrupted"
        assert host.unsaved == ""

    swarm.play(stopped())


def test_a_diverged_replica_never_replaces_a_good_checkpoint(swarm_of: SwarmOf) -> None:
    swarm = swarm_of("pull")

    async def diverged() -> None:
        running = await swarm.start("A")
        compute, host = swarm.computes["A"], swarm.hosts["A"]
        host.compute.submit(jobs.Save())
        await swarm.until(lambda: (swarm.folder("A") / checkpoint.FILE).exists())
        for live in compute.span.inner.lives:
            live.theta.fill_(float("nan"))
        host.stop("interrupted")
        await running
        assert "diverged" in host.unsaved

    swarm.play(diverged())
    assert all(bool(torch.isfinite(theta).all()) for theta in thetas(swarm.folder("A")).values())


def test_a_step_without_memory_ends_the_peer_after_it_has_saved(
    swarm_of: SwarmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = swarm_of("pull")

    async def short() -> None:
        running = await swarm.start("A")
        steps = swarm.hosts["A"].node.progress.step

        def step(compute: Compute) -> list[jobs.Stepped]:
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(Compute, "step_ahead", step)
        assert await running == f"error: RuntimeError: CUDA out of memory; {MEMORY_REMEDY}"
        found = checkpoint.read(swarm.folder("A"))
        assert found is not None
        assert found[1]["own_steps"] >= steps

    swarm.play(short())
    assert swarm.hosts["A"].unsaved == ""


def test_an_error_of_our_own_in_the_event_loop_ends_the_peer_with_its_reason(
    swarm_of: SwarmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence would be worse: some machines would go on, and the one with the error never again."""
    swarm = swarm_of("pull")

    async def broken() -> None:
        running = await swarm.start("A")
        node = swarm.hosts["A"].node
        node.handlers._by_name[jobs.Stepped] = lambda event, now: [] * (1 // 0)
        reason = await running
        assert reason.startswith("error: ZeroDivisionError: integer division or modulo by zero")

    swarm.play(broken())
    assert (swarm.folder("A") / checkpoint.FILE).exists()


def test_a_transport_or_a_directory_that_raises_stops_nobody(
    swarm_of: SwarmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = swarm_of("pull")
    left = {"ask": 2, "fetch": 2, "store": 2}

    def sometimes(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: object) -> object:
            left[name] -= 1
            if left[name] >= 0:
                raise KeyError(name)
            return await whole(*arguments)

        return call

    monkeypatch.setattr(LoopbackTransport, "ask", sometimes("ask", LoopbackTransport.ask))
    monkeypatch.setattr(LoopbackDirectory, "fetch", sometimes("fetch", LoopbackDirectory.fetch))
    monkeypatch.setattr(LoopbackDirectory, "store", sometimes("store", LoopbackDirectory.store))

    async def exchanged() -> None:
        await swarm.start("A")
        await swarm.start("B", contacts="A")
        await swarm.until(lambda: swarm.all_have_exchanged(3))

    swarm.play(exchanged())
    assert max(left.values()) < 0
    assert any("KeyError" in line["reason"] for line in swarm.journal("A", "error"))
