"""Cut long documents at ends of lines that their own text chooses, so that peers whose files differ cut alike.

A line ends a piece if its CRC-32 is below a threshold proportional to its length. No piece starts with an indented
line, since tokenizers merge a line break with the indentation. Lines of `usual_chars` or more are cut between words.
"""

import io
import re
import zlib
from collections.abc import Iterator, Sequence

_LONGEST = 4  # times the usual length of a piece
_SHORTEST = 1 / 4
UNCUT = 16  # times that length: documents up to this one are not cut
_WORDS = re.compile(r"\s*\S+|\s+")
_HASHES = 1 << 32


def cut(text: str, usual_chars: int) -> list[str]:
    """Return the pieces of a document; joined they are the document.

    Args:
        text: The document.
        usual_chars: Usual length of a piece; a document of at most `UNCUT` times that is one piece.
    """
    if len(text) <= UNCUT * usual_chars:
        return [text]
    pieces, rest = cut_lines(io.StringIO(text).readlines(), usual_chars)
    return [*pieces, *(["".join(rest)] if rest else [])]


def cut_lines(lines: Sequence[str], usual_chars: int) -> tuple[list[str], list[str]]:
    """Return the pieces of lines that begin a piece, and those lines at the end whose piece may go on."""
    pieces: list[str] = []
    begin = size = safe = size_to_safe = 0  # safe: the last line that is not indented, where a piece may be cut
    may_end = False
    shortest, longest, most_hash = int(_SHORTEST * usual_chars), _LONGEST * usual_chars, _HASHES // usual_chars
    for at, line in enumerate(lines):
        length = len(line)
        if not line[0].isspace() or length >= usual_chars:
            safe, size_to_safe = at, size
        ends = length >= usual_chars or (may_end and safe == at)
        if size and (ends or size + length > longest):
            end, size = (safe, size - size_to_safe) if safe > begin else (at, 0)
            pieces.append("".join(lines[begin:end]))
            begin, size_to_safe = end, 0
        if length >= usual_chars:
            pieces += _of_long_line(line, usual_chars)
            begin, size, may_end = at + 1, 0, False
            continue
        size += length
        may_end = size >= shortest and zlib.crc32(line.encode(errors="replace")) < length * most_hash
    return pieces, list(lines[begin:])


def _of_long_line(line: str, usual_chars: int) -> Iterator[str]:
    """Yield a long line as pieces that end at word ends; a word longer than a piece is cut."""
    longest, most_hash = _LONGEST * usual_chars, _HASHES // usual_chars
    begin = end = 0
    for found in _WORDS.finditer(line):
        word = found.group()
        while found.end() - begin > longest:
            end = end if end > begin else begin + longest
            yield line[begin:end]
            begin = end
        end = found.end()
        context = line[max(0, end - 64) : end]
        if (
            end - begin >= _SHORTEST * usual_chars
            and zlib.crc32(context.encode(errors="replace")) < len(word) * most_hash
        ):
            yield line[begin:end]
            begin = end
    if begin < len(line):
        yield line[begin:]
