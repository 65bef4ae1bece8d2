"""Where compilers keep what they have compiled, so that a peer's next start need not compile it again."""

import os
from pathlib import Path

FOLDERS = {  # of each compiler: the variable that names its folder, and the name below the peer's own
    "NUMBA_CACHE_DIR": "numba",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUPY_CACHE_DIR": "cupy",
}


def keep_in(folder: Path) -> None:
    """Make compilers use this state folder where the user has no home that can be written, as in many containers.

    It has to be called before they are loaded. What the user has set stays.
    """
    home = os.path.expanduser("~")  # stays as it is for a user id that the system knows nothing of
    if os.access(home, os.W_OK | os.X_OK):
        return
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(folder / "compiled" / name))
