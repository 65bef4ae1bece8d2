"""Runs a command in a peer's namespaces: `python -I enter.py ROUTER NETWORK COMMAND...`, in this same process.

ROUTER is the router's process id, NETWORK its descriptor of the peer's network namespace. The PID namespace is the
matter of whoever starts this (namespaces.children_in). A script of its own, without imports of the project: it runs
before each process of the lab.
"""

import ctypes
import os
import sys

NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000


def main() -> None:
    router, network, *command = sys.argv[1:]
    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    for path, kind in ((f"fd/{network}", NEW_NETWORK), ("ns/mnt", NEW_MOUNTS)):
        namespace = os.open(f"/proc/{router}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(namespace, kind) != 0:
            sys.exit(f"cannot enter the namespace {path} of {router}: {os.strerror(ctypes.get_errno())}")
    os.chdir(folder)  # entering a mount namespace leads to its root
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
