"""Exchange proofs of membership before a question: `ask_member` of comm/net/streams.py, but with callbacks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from decentral.comm.wire.invitations import MAX_REVOCATIONS_BYTES
from decentral.comm.wire.messages import Refused
from decentral.comm.wire.private_swarm import NOT_COUNTED, PrivateSwarm
from decentral.comm.wire.transport import Answer, Ask, AskError
from decentral.core.errors import ProtocolError

Done = Callable[[Answer | AskError], None]
SendAsk = Callable[[Ask, Done], None]


@dataclass(frozen=True, slots=True)
class ProvenAsk:
    """A question in a private swarm. If necessary, both peers first prove their membership to each other."""

    private: PrivateSwarm
    send: SendAsk
    ask: Ask
    done: Done

    def begin(self) -> None:
        """Send the question; if the target has not proved its membership yet, exchange proofs first."""
        if self.private.admits(self.ask.to):
            self.send(self.ask, self._answered)
        else:
            self._prove()

    def _answered(self, outcome: Answer | AskError) -> None:
        """Pass the outcome to `done`. If the target lacks the sender's proof, first send the proof and ask again."""
        if _refusal(outcome) in NOT_COUNTED:
            self._prove()
        else:
            self.done(outcome)

    def _prove(self) -> None:
        question = replace(self.ask, envelope=self.private.question(), max_blob_bytes=MAX_REVOCATIONS_BYTES)
        self.send(question, self._proved)

    def _proved(self, outcome: Answer | AskError) -> None:
        if isinstance(outcome, AskError):
            self.done(outcome)
            return
        try:
            self.private.heard(self.ask.to, outcome.envelope)
        except ProtocolError as error:
            self.done(AskError(error.reason, error.detail))
            return
        self.send(self.ask, self.done)


def _refusal(outcome: Answer | AskError) -> str:
    message = outcome.envelope.message if isinstance(outcome, Answer) else None
    return message.reason if isinstance(message, Refused) else ""
