"""Cut long documents into pieces. The cuts depend only on the text, so all peers cut the same text at the same lines.

A line ends a piece if the CRC-32 of the line is below a threshold that is proportional to the line's length. A piece
never begins with an indented line, because tokenizers merge a line break with the indentation after it. Lines of
`usual_chars` or more characters are cut between words. Start reading at `cut`.
"""

import io
import re
import zlib
from collections.abc import Iterator, Sequence

_LONGEST = 4  # a piece has at most this many times the usual length
_SHORTEST = 1 / 4  # the hash of a line ends a piece only if the piece has at least this share of the usual length
UNCUT = 16  # a document of at most this many times the usual length of a piece stays whole
_WORDS = re.compile(r"\s*\S+|\s+")
_HASHES = 1 << 32


def cut(text: str, usual_chars: int) -> list[str]:
    """Cut a document into pieces and return them; their concatenation is the document.

    Args:
        text: The document.
        usual_chars: Usual length of a piece in characters. A document of at most `UNCUT` * `usual_chars` is one piece.
    """
    if len(text) <= UNCUT * usual_chars:
        return [text]
    pieces, rest = cut_lines(io.StringIO(text).readlines(), usual_chars)
    return [*pieces, *(["".join(rest)] if rest else [])]


def cut_lines(lines: Sequence[str], usual_chars: int) -> tuple[list[str], list[str]]:
    """Return the complete pieces of these lines, and the lines after the last complete piece.

    Args:
        lines: Lines with their line ends; the first line begins a piece.
        usual_chars: Usual length of a piece in characters.
    """
    pieces: list[str] = []
    begin = size = safe = size_to_safe = 0  # `safe`: the last line without indentation, before which text may be cut
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
    """Cut a long line and yield the pieces. The cuts are between words, except in a word longer than a piece."""
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
