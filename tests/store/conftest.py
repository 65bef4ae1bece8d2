"""A real S3 server on loopback, in a process of its own: moto's."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patient_time import LIMIT_S

BUCKET = "s3://kept"
SECRET = "a-secret-of-the-bucket"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty bucket; credentials and the server's address are in the environment alone."""
    s3fs = pytest.importorskip("s3fs", reason="needs the extra upload: pip install s3fs")
    pytest.importorskip("moto", reason="needs moto's server: pip install 'moto[server]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("home")
    output = (home / "server.txt").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=output, stderr=output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            _await(port, server, home / "server.txt")
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET.removeprefix("s3://"))
            yield BUCKET
        finally:
            server.kill()
            server.wait()
            output.close()


def _await(port: int, server: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert server.poll() is None, output.read_text()
        assert time.monotonic() < deadline, "the server did not begin to listen"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
