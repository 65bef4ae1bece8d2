"""Choose the folders in which compilers cache compiled code, so that a peer's next start need not compile it again."""

import os
from pathlib import Path

FOLDERS = {  # environment variable of a compiler's cache folder -> the folder's new name within STATE_FOLDER/compiled
    "NUMBA_CACHE_DIR": "numba",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUPY_CACHE_DIR": "cupy",
}


def keep_in(folder: Path) -> None:
    """Move compilers' caches to this state folder if the user's home folder cannot be written, as in many containers.

    This sets the environment variables of FOLDERS that are not set yet. Call it before the compilers are loaded.
    """
    home = os.path.expanduser("~")
    if os.access(home, os.W_OK | os.X_OK):
        return
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(folder / "compiled" / name))
