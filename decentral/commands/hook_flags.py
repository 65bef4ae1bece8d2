"""The flags `--on-event`, `--webhook` and `--events`, by which commands tell programs and chats what happens."""

import argparse

from decentral.core.errors import UserError
from decentral.view.event_hooks import CommandHook, Hooks
from decentral.view.hook_messages import kinds_of
from decentral.view.webhook import Webhook


def add_hook_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a command's parser."""
    on_event = "run CMD for each event, which it reads from stdin as JSON"
    parser.add_argument("--on-event", metavar="CMD", help=on_event)
    posted = "POST each event to URL as JSON, or as text for Slack and Discord"
    parser.add_argument("--webhook", metavar="URL", help=posted)
    kinds = "kinds of event for these, separated by commas; default: all"
    parser.add_argument("--events", metavar="HOOK_KINDS", help=kinds)


def hooks_of(given: argparse.Namespace) -> Hooks | None:
    """Return the hooks of the given flags; None without such flags. Raise UserError if one is not valid."""
    commands = [CommandHook.parse(given.on_event)] if given.on_event is not None else []
    addresses = [Webhook.parse(given.webhook)] if given.webhook is not None else []
    if given.events is not None and not (commands or addresses):
        raise UserError("--events needs --on-event CMD or --webhook URL")
    return Hooks([*commands, *addresses], kinds_of(given.events)) if commands or addresses else None
