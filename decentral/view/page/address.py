"""Where the page is served: `[HOST:]PORT` as a user types it, and the socket."""

import argparse
import ipaddress
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

from decentral.commands import shared
from decentral.core.errors import UserError

DEFAULT_PORT = 8420
HERE = "127.0.0.1"  # whoever may look at the page sees everything, and nobody is asked for a password
NEEDED = ("starlette", "uvicorn")


@dataclass(frozen=True, slots=True)
class PageAddress:
    """`port` 0: any free one. `strict`: no other port will do."""

    host: str = HERE
    port: int = DEFAULT_PORT
    strict: bool = False

    @classmethod
    def parse(cls, text: str) -> "PageAddress":
        """Reads `8420`, `0.0.0.0:8420` or `[::]:8420`. Raises ArgumentTypeError for anything else."""
        host, port = shared.host_port(text)
        return cls(host, port, strict=True)

    def bind(self) -> socket.socket:
        """The socket, listening. Raises UserError if the address cannot be had, or the page's libraries are missing."""
        if not all(map(find_spec, NEEDED)):
            raise UserError("the page needs two more packages: pip install 'decentral[dashboard]'")
        try:
            return self._listening(self.port)
        except OSError as error:
            if self.strict:
                text = f"the page: {self.host}:{self.port} cannot be used ({error.strerror}); choose another port"
                raise UserError(text) from None
        return self._listening(0)

    def _listening(self, port: int) -> socket.socket:
        found = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)
        return socket.create_server((self.host, port), family=found[0][0])


def reserved(address: PageAddress | None) -> AbstractContextManager[socket.socket | None]:
    """Return the socket of a page that is served later, or None where the user wants no page. Raises UserError.

    So a port that is taken ends a command before it has made or settled anything.
    """
    return address.bind() if address else nullcontext()


def add_dashboard_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--dashboard [[HOST:]PORT]`: a PageAddress, or None where the user wants no page."""
    where = "show a live page in a browser; default 127.0.0.1:8420, or another port if that is taken"
    parser.add_argument(
        "--dashboard", nargs="?", const=PageAddress(), type=PageAddress.parse, metavar="[HOST:]PORT", help=where
    )


def link(listening: socket.socket) -> str:
    """The link to the page: of one that listens everywhere, that on this machine."""
    host, port = listening.getsockname()[:2]
    everywhere = ipaddress.ip_address(host).is_unspecified
    host = "127.0.0.1" if everywhere else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}"
