"""A peer that is refused, in this process: what it says before it exits 2."""

import io
from contextlib import redirect_stderr
from pathlib import Path

from decentral.commands import peer

LOOPBACK = ["--listen", "/ip4/127.0.0.1/tcp/0"]
SOMEBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"  # a peer id that nobody has here
JOIN = f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"
ERROR = "error: "


def refusal(folder: Path, *flags: str) -> str:
    """What the peer with this folder and these flags says, which is one line."""
    said = io.StringIO()
    with redirect_stderr(said):
        assert peer.main([*LOOPBACK, "--plain", "--state-dir", str(folder), *flags]) == 2
    lines = said.getvalue().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(ERROR)
    return lines[0].removeprefix(ERROR)
