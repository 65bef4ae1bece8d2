import threading
from collections.abc import Iterator

import pytest

from decentral.peer import LOADING


@pytest.fixture(autouse=True)
def _loaded() -> Iterator[None]:
    """Waits for what a refused peer still loads: torch's compiler restores the stderr that it found when it began."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(LOADING):
            thread.join()
