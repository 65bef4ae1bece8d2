"""Whole peers in one process: real hosts, real training, real wire format; only the network is in memory."""

import asyncio
import math
from collections.abc import Callable
from statistics import mean

import pytest

from decentral.core import config, jobs
from decentral.core.journal import file as journal
from decentral.core.units import Amount
from decentral.scheduler.placement.move import MoveCause
from decentral.serving import replicas
from tests.journal_lines import audited
from tests.peers.runtime.host_swarm import Swarm

ALGORITHMS = ["pull", "allreduce"]
LEARNED = 20  # steps after which a peer knows more than which bytes there are


async def together(swarm: Swarm, exchanges: int) -> None:
    """A trains; B and C join it; all have exchanged so often and have taken LEARNED steps; all stop."""
    running = [await swarm.start("A")]
    running += [await swarm.start(name, contacts="A") for name in "BC"]
    await swarm.until(lambda: swarm.all_have_exchanged(exchanges))
    await swarm.until(lambda: all(host.node.progress.step >= LEARNED for host in swarm.hosts.values()))
    for host in swarm.hosts.values():
        host.stop("enough")
    assert await asyncio.gather(*running) == ["enough"] * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_peers_train_and_exchange(swarm_of: Callable[[str], Swarm], algorithm: str) -> None:
    swarm = swarm_of(algorithm)
    swarm.play(together(swarm, 4))
    for host in swarm.hosts.values():
        assert host.node.progress.losses.mean is not None
        assert 0 < host.node.progress.losses.mean < math.log(256)
        assert host.node.traffic.received_bytes > 0


def test_a_newcomer_starts_from_its_donors_weights(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def joined_late() -> None:
        await swarm.start("A")
        await swarm.until(lambda: swarm.hosts["A"].node.progress.step >= 60)
        await swarm.start("B", contacts="A")
        await swarm.until(lambda: bool(swarm.journal("B", "eval")))

    swarm.play(joined_late())
    assert swarm.journal("B", "joined")[0]["donors"] == [swarm.identities["A"].peer]
    assert swarm.hosts["B"].node.progress.lr_step >= 60
    assert swarm.journal("B", "eval")[0]["loss"] < swarm.journal("A", "eval")[0]["loss"] - 0.5


def test_a_peer_that_is_unplugged_does_not_stop_the_others(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def unplugged() -> None:
        await swarm.start("A")
        for name in "BC":
            await swarm.start(name, contacts="A")
        await swarm.until(lambda: swarm.all_have_exchanged(1))
        gone, left = swarm.identities["C"].peer, [swarm.hosts[name].node for name in "AB"]
        swarm.network.unplug(gone)
        await swarm.until(lambda: not any(gone in node.roster.live for node in left))
        before = [(node.gossip.counts.outcomes["done"], node.progress.step) for node in left]
        await swarm.until(
            lambda: all(
                node.gossip.counts.outcomes["done"] > done and node.progress.step > step + 20
                for node, (done, step) in zip(left, before, strict=True)
            )
        )

    swarm.play(unplugged())
    for name in "AB":
        assert [line["reason"] for line in swarm.journal(name, "peer_left")] == ["silent"]


def test_a_peer_stops_after_its_steps(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")
    host = swarm.add("A", stop_after=Amount(5, "steps"))

    async def stops() -> None:
        assert await host.run() == "--stop-after 5steps"

    swarm.play(stops())
    assert host.node.progress.step >= 5


def test_stopping_saves_and_tells_the_others(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def stopped() -> None:
        running = await swarm.start("A")
        swarm.hosts["A"].stop("interrupted")
        assert await running == "interrupted"

    swarm.play(stopped())
    assert replicas.read(swarm.folder("A")) is not None
    assert swarm.journal("A", "stopped")[-1]["reason"] == "interrupted"
    ((record, _),) = swarm.network.records.values()
    assert b"leaving" in record


def test_a_peer_whose_training_has_diverged_leaves_the_checkpoint_as_it_was(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def diverged() -> None:
        running = await swarm.start("A")
        host, now = swarm.hosts["A"], swarm.hosts["A"].now()
        for _ in range(50):
            host.node.progress.divergence.judge_step(True, None, now)
        host.stop("interrupted")
        await running

    swarm.play(diverged())
    assert replicas.read(swarm.folder("A")) is None
    assert swarm.journal("A", "stopped")[-1]["unsaved"].startswith("training has diverged")


def test_a_compute_thread_that_breaks_stops_the_peer_with_the_reason(swarm_of: Callable[[str], Swarm]) -> None:
    class Broken:
        def submit(self, job: jobs.Job) -> None:
            """Nobody is there to do it."""

        def training_s(self) -> float:
            return 0.0

        def run(self, report: object) -> None:
            raise RuntimeError("the device is gone")

    swarm = swarm_of("pull")
    host = swarm.add("A")
    host.compute = Broken()

    async def broken() -> None:
        assert await host.run() == "error: RuntimeError: the device is gone"

    swarm.play(broken())


# Peers that hold a part of the model each


async def in_parts(swarm: Swarm, micro_batches: int) -> list["asyncio.Task[str]"]:
    """A has the embedding and the block, B the block and the head, C the head; all have taken steps."""
    running = [await swarm.join("A", "", (0, 2))]
    running += [await swarm.join("B", "A", (1, 3)), await swarm.join("C", "A", (2, 3))]
    await swarm.until(lambda: all(host.node.progress.step > 0 for host in swarm.hosts.values()))
    await swarm.until(lambda: completed(swarm) >= micro_batches)
    return running


def begun(swarm: Swarm, name: str) -> int:
    """Micro-batches that this peer has begun and that came back."""
    routes = swarm.hosts[name].node.routes
    return routes.completed if routes else 0


def completed(swarm: Swarm) -> int:
    return begun(swarm, "A")


def test_three_peers_train_a_model_that_none_of_them_holds(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def trained() -> None:
        running = await in_parts(swarm, 150)
        for host in swarm.hosts.values():
            host.stop("enough")
        assert await asyncio.gather(*running) == ["enough"] * 3

    swarm.play(trained())
    losses = [line["loss"] for line in swarm.journal("A", "step")]
    untrained = math.log(config.ModelConfig().vocabulary)  # the run may take only a second, and then there is one line
    assert mean(losses[-20:]) < untrained - 0.5
    journals = [journal.read(swarm.folder(name) / "journal.jsonl") for name in "ABC"]
    found = audited(journals, 3)
    assert found.sound
    assert found.everywhere >= 100
    held = [replicas.read(swarm.folder(name)) for name in "ABC"]
    assert [sorted(one) for one in held if one is not None] == [[0, 1], [1, 2], [2]]


def test_a_layer_that_two_hold_is_averaged_between_them(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def exchanged() -> None:
        await in_parts(swarm, 20)
        await swarm.until(lambda: all(done(name) for name in "ABC"))

    def done(name: str) -> list[int]:
        return [line["fragment"] for line in swarm.journal(name, "exchange") if line["outcome"] == "done"]

    swarm.play(exchanged())
    assert set(done("A")) == {1}
    assert set(done("C")) == {2}
    assert set(done("B")) <= {1, 2}


def test_a_newcomer_with_a_part_gets_its_layers_from_whoever_holds_them(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def joined() -> None:
        await swarm.join("A", "", (0, 2))
        await swarm.join("B", "A", (1, 3))
        await swarm.until(lambda: completed(swarm) >= 50)
        await swarm.join("C", "AB", (2, 3))

    swarm.play(joined())
    assert swarm.journal("C", "joined")[0]["donors"] == [swarm.identities["B"].peer]


def test_the_others_go_on_without_a_holder_that_is_gone(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def gone() -> None:
        await in_parts(swarm, 30)
        swarm.network.unplug(swarm.identities["C"].peer)
        before = completed(swarm)
        await swarm.until(lambda: completed(swarm) > before + 60)

    swarm.play(gone())
    assert not [line for name in "AB" for line in swarm.journal(name, "error")]


def move(swarm: Swarm, name: str, target: range) -> None:
    host = swarm.hosts[name]
    spans = host.node.span_manager
    assert spans is not None
    effects = spans.span_move.begin(target, MoveCause.RECOVERY, host.now())
    now = host.now()
    host._carry_all([*spans._carry_out(effects, now), *spans.settle(now)])


def moved(swarm: Swarm, name: str) -> list[str]:
    return [line["outcome"] for line in swarm.journal(name, "move")]


def test_a_peer_changes_its_layers_while_all_train_and_no_micro_batch_is_lost(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def changed() -> None:
        running = await in_parts(swarm, 30)
        move(swarm, "C", range(0, 2))
        await swarm.until(lambda: begun(swarm, "C") >= 60)  # what is under way at the end counts nowhere
        await swarm.until(lambda: last_exchanged() in (0, 1))
        for host in swarm.hosts.values():
            host.stop("enough")
        await asyncio.gather(*running)

    def last_exchanged() -> int:
        return next((int(line["fragment"]) for line in reversed(swarm.journal("C", "exchange"))), -1)

    swarm.play(changed())
    assert moved(swarm, "C") == ["done"]
    found = audited([journal.read(swarm.folder(name) / "journal.jsonl") for name in "ABC"], 3)
    assert found.sound
    assert found.everywhere >= 55
    assert not [line for name in "ABC" for line in swarm.journal(name, "abandoned") + swarm.journal(name, "error")]
    held = replicas.read(swarm.folder("C"))
    assert held is not None
    assert sorted(held) == [0, 1]


def test_the_last_holder_of_a_layer_stays_and_trains_on(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def refused() -> None:
        await in_parts(swarm, 20)
        move(swarm, "A", range(1, 3))
        await swarm.until(lambda: bool(moved(swarm, "A")))
        before = completed(swarm)
        await swarm.until(lambda: completed(swarm) > before + 20)

    swarm.play(refused())
    assert [line["reason"] for line in swarm.journal("A", "move")] == ["needed"]


def test_a_layer_whose_last_holder_is_gone_is_taken_from_the_peer_that_retains_it(
    swarm_of: Callable[[str], Swarm],
) -> None:
    swarm = swarm_of("pull")

    async def lost() -> None:
        await swarm.join("A", "", (0, 2))
        await swarm.join("B", "A", (1, 3))
        await swarm.join("C", "AB", (1, 3))
        await swarm.until(lambda: completed(swarm) >= 20)
        move(swarm, "C", range(0, 2))
        await swarm.until(lambda: moved(swarm, "C") == ["done"])
        before = completed(swarm)
        await swarm.until(lambda: completed(swarm) > before + 20)
        swarm.network.unplug(swarm.identities["B"].peer)
        await swarm.until(lambda: bool(taken()))
        before = begun(swarm, "A") + begun(swarm, "C")
        await swarm.until(lambda: begun(swarm, "A") + begun(swarm, "C") > before + 20)

    def taken() -> list[dict[str, object]]:
        return [line for name in "AC" for line in swarm.journal(name, "move") if line["last"] == 3]

    swarm.play(lost())
    assert [(line["why"], line["first"]) for line in taken() if line["outcome"] == "done"] == [("lost", 1)]
    found = audited([journal.read(swarm.folder(name) / "journal.jsonl") for name in "ABC"], 3)
    assert found.sound


def test_a_whole_model_peer_carries_for_those_that_hold_a_part_and_trains_on(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def mixed() -> None:
        await swarm.start("B")
        await swarm.join("A", "B", (0, 2))
        await swarm.until(lambda: completed(swarm) >= 30)

    swarm.play(mixed())
    assert swarm.hosts["B"].node.progress.tokens > 0
