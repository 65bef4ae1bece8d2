"""Measures a link from inside: `python -I -S probe.py serve` in one namespace, `round-trip` or `push` in another.

    serve PORT                          answers UDP packets, and counts what comes over TCP
    round-trip ADDRESS PORT COUNT       prints the least round trip of so many, in seconds
    push ADDRESS PORT STREAMS WARM_UP_S SECONDS    prints two rates at the receiver, in bytes/s

`push` sends over several TCP connections at once, as a single one cannot fill a long fat link with the buffers that a
machine has, and the receiver takes rates over the last SECONDS, past the slow start. The first rate is that of IP
packets which arrived, by the counter of the receiver's device; the second is that of the payload. A script of its own,
without imports of the project, so that it starts in a moment.
"""

import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_S = 30.0
PACE_S = 0.02  # between two packets of `round-trip`
BLOCK = bytes(1 << 16)
DEVICE = "wan0"
ASKED, RESULT = struct.Struct("!idd"), struct.Struct("!dd")


def serve(port: int) -> None:
    """Answers until it is killed; one `push` at a time."""
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("0.0.0.0", port))
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    with socket.create_server(("0.0.0.0", port), backlog=64) as server:
        print("serving", flush=True)
        while True:
            with server.accept()[0] as control:
                _count(server, control)


def _echo(echo: socket.socket) -> None:
    while True:
        echo.sendto(*echo.recvfrom(2048))


def _count(server: socket.socket, control: socket.socket) -> None:
    streams, warm_up_s, seconds = ASKED.unpack(control.recv(ASKED.size, socket.MSG_WAITALL))
    inputs = [server.accept()[0] for _ in range(streams)]
    payload = [0] * streams
    for number, one in enumerate(inputs):
        threading.Thread(target=_drain, args=(one, payload, number), daemon=True).start()
    time.sleep(warm_up_s)
    began, before = time.monotonic(), (arrived_bytes(), sum(payload))
    time.sleep(seconds)
    now, after = time.monotonic(), (arrived_bytes(), sum(payload))
    control.sendall(RESULT.pack(*((end - begin) / (now - began) for begin, end in zip(before, after, strict=True))))


def arrived_bytes() -> int:
    """What the device of this network namespace has received."""
    with open("/proc/net/dev") as file:
        (figures,) = (line.partition(":")[2].split() for line in file if line.strip().startswith(DEVICE))
    return int(figures[0])


def _drain(one: socket.socket, payload: list[int], number: int) -> None:
    buffer = bytearray(1 << 18)
    with one:
        while size := one.recv_into(buffer):
            payload[number] += size


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


def push(address: str, port: int, streams: int, warm_up_s: float, seconds: float) -> tuple[float, float]:
    """The rates of packets and of payload, as the receiver counts them."""
    with socket.create_connection((address, port), TIMEOUT_S) as control, ThreadPoolExecutor(streams) as pool:
        control.sendall(ASKED.pack(streams, warm_up_s, seconds))
        outputs = list(pool.map(lambda _: socket.create_connection((address, port), TIMEOUT_S), range(streams)))
        sending = [pool.submit(_fill, one) for one in outputs]
        control.settimeout(TIMEOUT_S + warm_up_s + seconds)
        packets, payload = RESULT.unpack(control.recv(RESULT.size, socket.MSG_WAITALL))
        for one in outputs:
            one.shutdown(socket.SHUT_RDWR)
        for ending in sending:
            ending.result()
        return packets, payload


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
        case ["push", address, port, streams, warm_up_s, seconds]:
            print(*push(address, int(port), int(streams), float(warm_up_s), float(seconds)))
        case other:
            sys.exit(f"unknown arguments {other}; the head of this file has the forms")


if __name__ == "__main__":
    main()
