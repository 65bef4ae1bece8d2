"""Which layers peers claim: the whole model if it fits, else what is missing, and never all the same ones."""

import asyncio
import time
from pathlib import Path

import pytest

from decentral import claim_span, command
from decentral.comm.wire.identity import Identity
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import RunId
from decentral.train import memory
from tests.comm.net.loopback import Loopback, LoopbackDirectory

RUN = RunId("gpt-3fa2c1")
CONFIG = config.Config(model=config.ModelConfig(depth=4, width=128))
NEEDS = memory.needs(CONFIG)
HALF = max(NEEDS.span_bytes(0, 2), NEEDS.span_bytes(1, 3), NEEDS.span_bytes(2, 4))


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return [Identity.load_or_create(folder / str(number)) for number in range(4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_span, "CLAIM_S", 0.01)


async def claimed(network: Loopback, own: Identity, memory_bytes: int) -> claim_span.ClaimedSpan:
    return await chosen(own, LoopbackDirectory(network), memory_bytes, None)


async def chosen(
    own: Identity, directory: LoopbackDirectory, memory_bytes: int, kept: tuple[int, int] | None
) -> claim_span.ClaimedSpan:
    request = claim_span.SpanRequest(CONFIG, RUN, own, (), memory_bytes, kept)
    return await claim_span.claim(request, NEEDS, directory, claim_span.RealClock(time.time))


def test_a_model_that_fits_is_held_whole_and_nobody_is_asked(identities: list[Identity]) -> None:
    network = Loopback()
    assert asyncio.run(claimed(network, identities[0], NEEDS.span_bytes(0, 4))).span is None
    assert not network.records


def test_peers_that_come_one_after_another_cover_the_model(identities: list[Identity]) -> None:
    network = Loopback()
    spans = [asyncio.run(claimed(network, own, HALF)).span for own in identities[:2]]
    assert spans == [(0, 3), (3, 6)]


def test_peers_that_come_at_once_do_not_all_take_the_same(identities: list[Identity]) -> None:
    network = Loopback()

    async def together() -> list[claim_span.ClaimedSpan]:
        return list(await asyncio.gather(*(claimed(network, own, HALF) for own in identities)))

    spans = [one.span for one in asyncio.run(together())]
    covered = {layer for span in spans if span for layer in range(*span)}
    assert covered == set(range(6))
    assert max(spans.count(span) for span in spans) < 4


def test_a_peer_that_comes_back_keeps_its_layers(identities: list[Identity]) -> None:
    own, directory = identities[0], LoopbackDirectory(Loopback())
    kept = asyncio.run(chosen(own, directory, HALF, (2, 4)))
    assert kept.span == (2, 4)


def test_a_checkpoint_that_does_not_fit_any_more_is_the_users_to_mend(identities: list[Identity]) -> None:
    own, directory = identities[0], LoopbackDirectory(Loopback())
    with pytest.raises(UserError, match="holds layers 0 to 5, which take"):
        asyncio.run(chosen(own, directory, HALF, (0, 6)))


def test_claims_of_others_that_are_no_records_are_left_out(identities: list[Identity]) -> None:
    network = Loopback()
    network.records[f"{RUN}/peers", "QmNobody"] = (b"garbage", 4e9)
    assert asyncio.run(claimed(network, identities[0], HALF)).span == (0, 3)


@pytest.mark.parametrize(
    ("text", "size"),
    [("800", 800), ("1.5e9", 1_500_000_000), ("800MB", 800_000_000), ("2g", 2_000_000_000), ("1kB", 1000)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert command.size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "1e30", "nan", "MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        command.size(text)


def test_a_flag_that_is_no_size(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from decentral import local, peer

    assert peer.main(["--memory", "much", "--state-dir", str(tmp_path / "peer")]) == 2
    assert "--memory" in capfd.readouterr().err
    assert local.main(["--peers", "3", "--memory", "1GB,2GB"]) == 2
    assert capfd.readouterr().err == "error: --memory expects one size or 3, such as 800MB,16GB; got '1GB,2GB'\n"
