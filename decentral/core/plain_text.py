"""Make text from other peers safe to show on a terminal, in rich's markup and in a journal."""

SHOWN_CHARS = 128  # people are shown at most this many characters of a name


def error_text(error: BaseException, most: int | None = 200) -> str:
    """Return the first `most` characters of an error's text in one line; all characters if `most` is None."""
    return " ".join(str(error).split())[:most]


def printable(text: str, most: int = SHOWN_CHARS) -> str:
    """Return the first `most` characters, with `?` for each character that a terminal cannot print.

    Such characters are controls, escapes, line ends, direction overrides, zero-width characters and lone surrogates.
    """
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def printable_lines(text: str) -> str:
    """Return the whole text, with "?" for each character that is not printable; line ends and tabs are kept."""
    return "".join(char if char in "\n\t" or char.isprintable() else "?" for char in text)


def plain_text(text: str, most: int = SHOWN_CHARS) -> str:
    """Return `printable` text with round brackets in place of square brackets, so that rich finds no markup in it."""
    return printable(text, most).translate({ord("["): "(", ord("]"): ")"})
