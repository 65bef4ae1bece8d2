"""Parse the address `[HOST:]PORT` of the live page, and open its socket."""

import argparse
import ipaddress
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

from decentral.commands import shared
from decentral.core.errors import UserError

DEFAULT_PORT = 8420
HERE = "127.0.0.1"  # default host; the page has no password, so it serves other machines only if the user names a host
NEEDED = ("starlette", "uvicorn")  # packages of the extra `dashboard` (pip install decentral[dashboard])


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Host and port at which the page is served, and whether to use another port if this port is taken."""

    host: str = HERE
    port: int = DEFAULT_PORT  # 0: any free port
    strict: bool = False  # True: a taken port is an error; False: any free port replaces it

    @classmethod
    def parse(cls, text: str) -> "PageAddress":
        """Return the address in a text such as `8420`, `0.0.0.0:8420` or `[::]:8420`, with `strict` set to True.

        Raises:
            ArgumentTypeError: If the text is not `[HOST:]PORT`.
        """
        host, port = shared.host_port(text)
        return cls(host, port, strict=True)

    def bind(self) -> socket.socket:
        """Return a socket that listens at this address.

        Raises:
            UserError: If the address cannot be used, or the page's packages are not installed.
        """
        if not all(map(find_spec, NEEDED)):
            raise UserError("the page needs two more packages: pip install 'decentral[dashboard]'")
        try:
            return self._listening(self.port)
        except OSError as error:
            if self.strict:
                reason = str(error.strerror).partition(" (while")[0]  # create_server adds the address once more
                text = f"the page: {self.host}:{self.port} cannot be used ({reason}); choose another port"
                raise UserError(text) from None
        return self._listening(0)

    def _listening(self, port: int) -> socket.socket:
        found = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)
        return socket.create_server((self.host, port), family=found[0][0])


def reserved(address: PageAddress | None) -> AbstractContextManager[socket.socket | None]:
    """Return a context manager that gives the listening socket for a page, or None if `address` is None.

    A command calls this before anything else, so that a taken port ends the command before it has changed anything.

    Raises:
        UserError: If the address cannot be used, or the page's packages are not installed.
    """
    return address.bind() if address else nullcontext()


def add_dashboard_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--dashboard [[HOST:]PORT]`, whose value is a PageAddress, or None if the flag is not given."""
    where = "show a live page in a browser; default 127.0.0.1:8420, or another port if that is taken"
    parser.add_argument(
        "--dashboard", nargs="?", const=PageAddress(), type=PageAddress.parse, metavar="[HOST:]PORT", help=where
    )


def link(listening: socket.socket) -> str:
    """Return the page's URL. A socket that listens on all interfaces has the URL of 127.0.0.1."""
    host, port = listening.getsockname()[:2]
    everywhere = ipaddress.ip_address(host).is_unspecified
    host = "127.0.0.1" if everywhere else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}"
