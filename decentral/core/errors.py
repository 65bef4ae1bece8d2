"""The two ways in which something can be wrong that is not our own fault."""


class UserError(Exception):
    """What a user can mend: the command prints this one line and exits 2.

    The text says what was expected, what came, and what to do.
    """


class ProtocolError(Exception):
    """What came from another peer is not what the protocol allows. It is data: counted, logged, ignored."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason  # one word, for the journal's counters
