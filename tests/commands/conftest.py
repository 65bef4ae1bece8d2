import threading
from collections.abc import Iterator

import pytest

from decentral.start_peer import LOADING


@pytest.fixture(autouse=True)
def _loaded() -> Iterator[None]:
    """Waits for what a refused peer still loads and compiles, so that no test runs beside that of another."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(LOADING):
            thread.join()
