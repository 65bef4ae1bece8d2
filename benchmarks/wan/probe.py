"""Measures a link from inside: `python -I -S probe.py serve` in one namespace, `round-trip` or `push` in another.

    serve PORT                          answers UDP packets, and counts what comes over TCP
    round-trip ADDRESS PORT COUNT       prints the least round trip of so many, in seconds
    push ADDRESS PORT STREAMS SECONDS   prints the payload that arrived, in bytes/s

`push` sends over several connections at once, as a single one cannot fill a long fat link with the buffers that a
machine has. The rate is that of the best WINDOW_S: a slow start is not in it, nor the time that TCP takes to come back
from the losses at its end, and no link carries more in any window than it can. A script of its own, without imports of
the project, so that it starts in a moment.
"""

import socket
import struct
import sys
import threading
import time

TIMEOUT_S = 30.0
WINDOW_S, SAMPLE_S = 2.0, 0.1
PACE_S = 0.02  # between two packets of `round-trip`
BLOCK = bytes(1 << 16)
RESULT = struct.Struct("!d")


def serve(port: int) -> None:
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("0.0.0.0", port))
    server = socket.create_server(("0.0.0.0", port), backlog=64)
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    print("serving", flush=True)
    while True:
        control = server.accept()[0]
        threading.Thread(target=_count, args=(server, control), daemon=True).start()
        _taken.acquire()  # one measurement at a time takes connections


_taken = threading.Semaphore(0)


def _echo(echo: socket.socket) -> None:
    while True:
        echo.sendto(*echo.recvfrom(2048))


def _count(server: socket.socket, control: socket.socket) -> None:
    """One `push`: how much of its streams arrives."""
    try:
        streams, seconds = struct.unpack("!id", control.recv(12, socket.MSG_WAITALL))
        inputs = [server.accept()[0] for _ in range(streams)]
    finally:
        _taken.release()
    received = [0] * streams
    for number, one in enumerate(inputs):
        threading.Thread(target=_drain, args=(one, received, number), daemon=True).start()
    marks = [(time.monotonic(), 0)]
    while marks[-1][0] < marks[0][0] + seconds:
        time.sleep(SAMPLE_S)
        marks.append((time.monotonic(), sum(received)))
    control.sendall(RESULT.pack(best_rate(marks)))
    control.close()


def best_rate(marks: list[tuple[float, int]]) -> float:
    """Of (time, bytes so far): the most bytes/s over any stretch of at least WINDOW_S, or over all of a shorter time."""
    best, first = 0.0, 0
    for now, count in marks:
        while first + 1 < len(marks) and marks[first + 1][0] <= now - WINDOW_S:
            first += 1
        began, before = marks[first]
        if now - began >= WINDOW_S:
            best = max(best, (count - before) / (now - began))
    return best or marks[-1][1] / (marks[-1][0] - marks[0][0])


def _drain(one: socket.socket, received: list[int], number: int) -> None:
    buffer = bytearray(1 << 18)
    with one:
        while size := one.recv_into(buffer):
            received[number] += size


def round_trip(address: str, port: int, count: int) -> float:
    """Seconds, the least of several: what the path itself takes, without what the machine adds now and then."""
    least = float("inf")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(TIMEOUT_S)
        for number in range(count):
            began = time.monotonic()
            probe.sendto(struct.pack("!i", number), (address, port))
            while struct.unpack("!i", probe.recv(64))[0] != number:
                pass
            least = min(least, time.monotonic() - began)
            time.sleep(PACE_S)
    return least


def push(address: str, port: int, streams: int, seconds: float) -> float:
    with socket.create_connection((address, port), TIMEOUT_S) as control:
        control.sendall(struct.pack("!id", streams, seconds))
        outputs = [socket.create_connection((address, port), TIMEOUT_S) for _ in range(streams)]
        for one in outputs:
            threading.Thread(target=_fill, args=(one,), daemon=True).start()
        control.settimeout(TIMEOUT_S + seconds)
        rate: float = RESULT.unpack(control.recv(RESULT.size, socket.MSG_WAITALL))[0]
        return rate


def _fill(one: socket.socket) -> None:
    try:
        while True:
            one.sendall(BLOCK)
    except OSError:  # the measurement is over, or the stream could not carry anything for TIMEOUT_S
        pass


def main() -> None:
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["round-trip", address, port, count]:
            print(round_trip(address, int(port), int(count)))
        case ["push", address, port, streams, seconds]:
            print(push(address, int(port), int(streams), float(seconds)))
        case other:
            sys.exit(f"unknown arguments {other}; the head of this file has the forms")


if __name__ == "__main__":
    main()
