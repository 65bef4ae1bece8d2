"""Post the messages of hooks to an address on the web: `--webhook URL`. Start reading at `Webhook`.

Slack and Discord get a text to show in a chat; any other host gets the message as JSON.
"""

import http.client
import socket
import threading
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from decentral import __version__
from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.view import event_hooks
from decentral.view.hook_messages import HookMessage

POST_TRIES = 3  # a message is posted at most this many times, so that a network outage of seconds loses no message
DISCORD_CHARS = 2000  # Discord refuses a longer text
SLACK_HOST, DISCORD_HOSTS = "hooks.slack.com", ("discord.com", "discordapp.com")


class Webhook:
    """An address on the web that gets each message by POST. It follows no redirect."""

    flag, tries = "--webhook", POST_TRIES

    def __init__(self, url: SplitResult) -> None:
        """Make the hook of an http or https URL."""
        self._url = url
        self._connection: http.client.HTTPConnection | None = None

    @classmethod
    def parse(cls, text: str) -> "Webhook":
        """Return the hook of a URL. Raise UserError if it is no http or https URL."""
        with suppress(ValueError):
            url = urlsplit(text)
            is_plain = text.isascii() and text.isprintable() and " " not in text
            if url.scheme in ("http", "https") and url.hostname and url.port != 0 and is_plain:
                url.hostname.encode("idna")  # a name that no lookup takes, such as `a..b`, raises UnicodeError
                return cls(url)
        raise UserError("--webhook expects a URL such as https://hooks.slack.com/services/...; got no http(s) URL")

    def deliver(self, message: HookMessage) -> None:
        """Send the message. Raise OSError if no answer with a status of 200 to 299 comes within HOOK_S."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=event_hooks.HOOK_S)
        self._connection = connection
        # `timeout` limits each read and write; `limit` limits all of them together.
        limit = threading.Timer(event_hooks.HOOK_S, self.end)
        limit.start()
        headers = {"content-type": "application/json", "user-agent": f"decentral/{__version__}"}
        path = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        try:
            connection.request("POST", path, body_for(self._url.hostname or "", message), headers)
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise OSError(f"no answer ({type(error).__name__})") from None
        finally:
            limit.cancel()
            self._connection = None
            connection.close()
        if not 200 <= status < 300:
            raise OSError(f"answer with status {status}")

    def end(self) -> None:
        """Break the connection, if there is one."""
        if (connection := self._connection) is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def body_for(host: str, message: HookMessage) -> bytes:
    """Return the body that a webhook at this host expects: a text for Slack and Discord, else the message as JSON.

    Other peers choose their own names, so the body prevents a name from notifying somebody in the chat, becoming a
    link, or embedding a page.
    """
    said = message.sentence().replace("://", ": //")  # Slack and Discord turn every URL into a link
    if host == SLACK_HOST:
        text = said.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        # With "parse": "none", Slack does not turn `example.org` into a link either.
        quiet = {"parse": "none", "unfurl_links": False, "unfurl_media": False}
        return strict_json.dumps({"text": text} | quiet).encode()
    if host in DISCORD_HOSTS:
        suppressed_embeds = 4
        content = {"content": said[:DISCORD_CHARS], "allowed_mentions": {"parse": []}, "flags": suppressed_embeds}
        return strict_json.dumps(content).encode()
    return message.packed()
