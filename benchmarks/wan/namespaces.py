"""Namespaces and TUN devices, by system calls alone: nothing has a name, so nothing stays when its processes are gone.

A network namespace lives as long as a process in it or an open descriptor of it, a TUN device as long as its
descriptor, and the processes of a PID namespace as long as its first one: the kernel kills them with it.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from decentral.core.errors import UserError

NEW_MOUNTS, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x20000000, 0x40000000
DEVICE = "wan0"
TUN_PATH = "/dev/net/tun"
QUEUE_PACKETS = 4000  # in a device, for the router to fetch: a tenth of a second at 500 Mb/s
PRIVATE_PREFIX, LAB_PREFIX = 24, 16
# The defaults of Linux for a machine of 4 GB or more, up to 6.15: kernels raise them, and a lab has to be comparable.
SYSCTLS = {
    "ipv4/tcp_rmem": "4096 131072 6291456",
    "ipv4/tcp_wmem": "4096 16384 4194304",
    "ipv4/ip_local_port_range": "32768 60999",
    "ipv6/conf/all/disable_ipv6": "1",
}
CONGESTION_CONTROL = "cubic"
_SETTINGS = Path("/proc/sys/net")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")

_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN, _SIOCADDRT = 0x8922, 0x8943, 0x890B
_UP_AND_RUNNING = 0x41
_MS_REC_PRIVATE, _MNT_DETACH = 0x4000 | 0x40000, 2
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_libc = ctypes.CDLL(None, use_errno=True)


def require_root() -> None:
    """Raises UserError where the lab cannot run."""
    if sys.platform != "linux":
        raise UserError(f"the lab needs Linux (network namespaces, TUN devices); this is {sys.platform}")
    if os.geteuid() != 0:
        raise UserError("the lab needs root, for network namespaces; run it with sudo, or in a container with root")
    if not os.access(TUN_PATH, os.R_OK | os.W_OK):
        raise UserError(f"the lab needs {TUN_PATH}; load the module tun, or give the container that device")


def missing() -> str:
    """Why the lab cannot run here; "": it can. One namespace is made, to see."""
    try:
        require_root()
        with children_in(None):
            return ""
    except UserError as error:
        return str(error)


def _call(name: str, *arguments: object) -> None:
    """Raises UserError if the kernel refuses."""
    if getattr(_libc, name)(*arguments) != 0:
        error = os.strerror(ctypes.get_errno())
        raise UserError(f"the lab needs the system call {name}, and the kernel refuses it here: {error}")


def unshare(kind: int) -> None:
    _call("unshare", kind)


def enter(descriptor: int, kind: int) -> None:
    _call("setns", descriptor, kind)


@contextmanager
def children_in(pids: int | None) -> Iterator[None]:
    """Processes that this thread starts meanwhile are in that PID namespace; None: in a new one, the first of them."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if pids is None:
            unshare(NEW_PIDS)
        else:
            enter(pids, NEW_PIDS)
        yield
    finally:
        enter(own, NEW_PIDS)
        os.close(own)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wake_exactly() -> None:
    """Sleeps end within a microsecond of their time, and not within 50."""
    _call("prctl", _PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def own_mounts() -> None:
    """Gives this thread a mount namespace: what it mounts later, only it and processes that it starts will see."""
    unshare(NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)


def own_proc() -> None:
    """Gives this process a /proc of its PID namespace, for it and for those that enter its mount namespace."""
    own_mounts()
    _call("mount", b"proc", b"/proc", b"proc", 0, None)


def mount_memory(folder: Path, size_bytes: int) -> None:
    """Makes the folder a disk of this size, in memory."""
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size_bytes}".encode())


def unmount(folder: Path) -> None:
    """Files that are still open there keep it, unseen, until they are closed."""
    _call("umount2", os.fsencode(folder), _MNT_DETACH)


@contextmanager
def congestion_control_allowed() -> Iterator[None]:
    """New network namespaces may use CONGESTION_CONTROL meanwhile.

    They may only use what the machine allows everybody, which is CONGESTION_CONTROL nearly everywhere. Where it is not,
    it is allowed for this moment; in a container without that right they keep what they have.
    """
    allowed = _ALLOWED.read_text() if _ALLOWED.exists() else CONGESTION_CONTROL
    if CONGESTION_CONTROL in allowed.split() or not os.access(_ALLOWED, os.W_OK):
        yield
        return
    with _ALLOWED.open("r+") as file:  # this file stays that of the machine, whatever namespace we enter
        file.write(f"{allowed.strip()} {CONGESTION_CONTROL}")
        file.flush()
        try:
            yield
        finally:
            file.seek(0)
            file.write(allowed)


def congestion_control() -> str:
    """What new connections of this thread's network namespace use."""
    return (_SETTINGS / "ipv4/tcp_congestion_control").read_text().strip()


def open_network() -> tuple[int, int]:
    """A new network namespace with a TUN device in it: descriptors of both. This thread is in it afterwards."""
    unshare(NEW_NETWORK)
    for key, value in SYSCTLS.items():
        if (_SETTINGS / key).exists():  # a kernel without IPv6
            (_SETTINGS / key).write_text(value)
    with suppress(PermissionError):
        (_SETTINGS / "ipv4/tcp_congestion_control").write_text(CONGESTION_CONTROL)
    device = os.open(TUN_PATH, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _TUN | _NO_HEADER))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC), device


def set_up(address: int, mtu: int, private: bool) -> None:
    """Brings up loopback and the device of this thread's network namespace, with this address.

    A peer with a private address reaches the lab's network through its device, as through a router. There is no
    default route: what is not in the lab cannot be reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _configure(control, b"lo", _SIOCSIFFLAGS, struct.pack("H14x", _UP_AND_RUNNING))
        _configure(control, DEVICE.encode(), _SIOCSIFMTU, struct.pack("i12x", mtu))
        _configure(control, DEVICE.encode(), _SIOCSIFTXQLEN, struct.pack("i12x", QUEUE_PACKETS))
        set_address(control, address, PRIVATE_PREFIX if private else LAB_PREFIX)
        _configure(control, DEVICE.encode(), _SIOCSIFFLAGS, struct.pack("H14x", _UP_AND_RUNNING))
        if private:
            _add_route(control)


def set_address(control: socket.socket, address: int, prefix: int) -> None:
    mask = (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF
    _configure(control, DEVICE.encode(), _SIOCSIFADDR, _socket_address(address))
    _configure(control, DEVICE.encode(), _SIOCSIFNETMASK, _socket_address(mask))


def _add_route(control: socket.socket) -> None:
    """To 11.0.0.0/16, through the device (`struct rtentry`)."""
    name = ctypes.create_string_buffer(DEVICE.encode())
    mask = (0xFFFFFFFF << (32 - LAB_PREFIX)) & 0xFFFFFFFF
    where = _socket_address(11 << 24) + _socket_address(0) + _socket_address(mask)
    entry = struct.pack("@L48sHh4xLPh6xPLLH6x", 0, where, 1, 0, 0, 0, 0, ctypes.addressof(name), 0, 0, 0)
    fcntl.ioctl(control, _SIOCADDRT, entry)


def _configure(control: socket.socket, device: bytes, request: int, argument: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", device, argument))


def _socket_address(address: int) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, address.to_bytes(4, "big"))
