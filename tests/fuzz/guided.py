"""python -m tests.fuzz.guided: looks for inputs that crash a decoder, by coverage (atheris, libFuzzer).

    make fuzz SECONDS=600                                    all decoders in turn, so many seconds together
    python -m tests.fuzz.guided --decoder header --seconds 60

A crash is printed with its input, and kept in the corpus of its decoder: from then on tests/fuzz/test_corpus.py fails
until it is mended. So are a few inputs that reach code which no other input does, up to MOST_INPUTS of a decoder.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_INPUTS = 40  # of a decoder, in the repository
MOST_KEPT_BYTES = 1024  # of an input that is no crash
LONGEST_S = 1200  # for one input: so long that a machine that sleeps for some minutes is no finding


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided")
    parser.add_argument("--decoder")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a decoder that this process searches itself
    flags, rest = parser.parse_known_args()
    if flags.one:
        _search(flags.one, rest)
        return 0
    from tests.fuzz.decoders import DECODERS

    names = [flags.decoder] if flags.decoder else list(DECODERS)
    crashed = [name for name in names if _searched(name, max(1, round(flags.seconds / len(names))))]
    print(f"{len(names)} decoders, {len(crashed)} with a crash: {', '.join(crashed) or 'none'}")
    return 1 if crashed else 0


def _searched(name: str, seconds: int) -> bool:
    """Searches one decoder in a process of its own, and keeps what it has found. Whether it has crashed."""
    from tests.fuzz import seeds
    from tests.fuzz.decoders import DECODERS

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        inputs, found = Path(folder) / "inputs", Path(folder) / "found"
        inputs.mkdir()
        found.mkdir()
        known = seeds.corpus(name)
        for number, data in enumerate(known):
            (inputs / str(number)).write_bytes(data)
        options = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", f"-timeout={LONGEST_S}"]
        options += [f"-max_len={DECODERS[name].most_bytes}", "-print_final_stats=1", "-rss_limit_mb=4096"]
        command = [sys.executable, "-m", "tests.fuzz.guided", "--one", name, *options, str(found), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        crashes = [path.read_bytes() for path in Path(folder).glob("*-*") if path.is_file()]
        small = sorted(
            (path for path in found.iterdir() if path.stat().st_size <= MOST_KEPT_BYTES), key=os.path.getsize
        )
        kept = [path.read_bytes() for path in small[:: max(1, len(small) // 16)]]
        seeds.add(name, crashes + kept[: max(0, MOST_INPUTS - len(known))])
    executed = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
    print(f"{name}: {executed[0] if executed else '?'} inputs in {seconds} s, {len(crashes)} crashes", flush=True)
    if done.returncode:
        print(done.stderr[-3000:])
    return bool(crashes) or done.returncode != 0


def _search(name: str, options: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["decentral", "msgpack", "yaml"]):
        from tests.fuzz.decoders import DECODERS, refused

    run = DECODERS[name].run

    def one(data: bytes) -> None:
        refused(run, data)

    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    raise SystemExit(main())
