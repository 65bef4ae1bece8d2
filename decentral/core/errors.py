"""The two kinds of error that are not a bug of ours."""


class UserError(Exception):
    """An error that the user can mend: the command prints this one line and exits 2.

    The text says what was expected, what came, and what to do.
    """


class ProtocolError(Exception):
    """A message or a blob that the protocol does not allow. It is data: counted, logged, ignored."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason  # one word, for the journal's counters
        self.detail = detail
