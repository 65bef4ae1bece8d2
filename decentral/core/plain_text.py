"""Text that strangers chose, made fit to be shown: on a terminal, in rich's markup, in a journal."""

SHOWN_CHARS = 128  # of a name; a longer one is cut


def printable(text: str, most: int = SHOWN_CHARS) -> str:
    """At most so many characters, in one line, with `?` for what a terminal would obey or not show.

    These are control characters, escapes, line ends, direction overrides, characters of no width, and half surrogates.
    """
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def printable_lines(text: str) -> str:
    """All of a text, `printable` but for its line ends and tabs: what a model says, which strangers trained."""
    return "".join(char if char in "\n\t" or char.isprintable() else "?" for char in text)


def plain_text(text: str, most: int = SHOWN_CHARS) -> str:
    """`printable` text that means itself in rich's markup too: its square brackets become round ones."""
    return printable(text, most).translate({ord("["): "(", ord("]"): ")"})
