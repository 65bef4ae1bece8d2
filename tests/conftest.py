"""One torch thread, the same examples every time, tiny runs to train, and a reason where a GPU test is skipped."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from decentral.comm.codecs import blockwise
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.engine.compute import ComputeSetup
from decentral.engine.step import Device
from tests.commands.peer_processes import Peers
from tests.sim.broken import no_baseline

torch.set_num_threads(1)
for ending in (signal.SIGHUP, signal.SIGQUIT):  # `nohup make test &` ignores them, and so would what the tests start
    signal.signal(ending, signal.SIG_DFL)
settings.register_profile("decentral", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("decentral")

TEXT = "the swarm trains one model on unequal devices in different places and nobody waits for anybody"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of tests first that start processes: the last one to begin is a short one then."""
    with_processes = {item.path for item in items if item.get_closest_marker("swarm")}
    items.sort(key=lambda item: item.path not in with_processes)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 kB in 14 words, in an order that does not repeat: easy to learn, hard to learn by heart."""
    known = TEXT.split()
    words = [known[(number * number // 7 + number) % len(known)] for number in range(4400)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """Real peers as processes, which end with the test."""
    started = Peers(tmp_path)
    yield started
    started.end()


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets simulated peers count progress again and again."""
    no_baseline(monkeypatch)


@pytest.fixture
def setup_of(text: Path, tmp_path: Path) -> Callable[..., ComputeSetup]:
    """`setup_of(peer, device, **gossip)`: a model of 26 thousand parameters in three fragments, and its data.

    Peers have a folder each; the same peer gets the same one.
    """

    def build(
        peer: str = "A",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        **gossip: object,
    ) -> ComputeSetup:
        run = config.Config(
            model=config.ModelConfig(depth=1, width=32, context=16),
            data=config.DataConfig(kind="text", path=str(text)),
            train=config.TrainConfig(learning_rate=1e-2, warmup_steps=2, micro_batch=4, compile=compiled),
            gossip=config.GossipConfig.model_validate({"fragment_parameters": 1000, **gossip}),
        )
        folder = tmp_path / peer
        folder.mkdir(exist_ok=True)
        corpus = corpora.load(run.data, run.model)
        return ComputeSetup(run, PeerId(peer), corpus, blockwise, Device(torch.device(device), dtype), folder)

    return build
