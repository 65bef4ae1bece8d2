"""python -m decentral.estimate: predict what a swarm that does not exist yet can train, how fast, and at what price.

python -m decentral.estimate --peers "4x4090 homes:50/500, 8xA100 oregon"      models of several sizes, in a table
python -m decentral.estimate --model 1.3B --peers "4x4090 homes:50/500, 8xA100 oregon" --tokens 10B
python -m decentral.estimate my-config.yaml --peers "4xcpu" --json

A device is one of NVIDIA's cards, with its published peak speed, or `cpu`: this machine's processor, which is timed.
The peers of a place share the place's link to other places; with the place `homes` each peer has a home of its own.
Each estimate has a range; a run may still be outside of the range (docs/results/estimates.md).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decentral.commands import shared
from decentral.commands.estimates import cards, places, sizes
from decentral.commands.estimates.figures import Figure
from decentral.commands.estimates.places import PeerGroup
from decentral.core import config, quantities, strict_json
from decentral.core.choices import ALGORITHMS, names_with
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.near_names import did_you_mean
from decentral.core.own_inputs import OwnInputs
from decentral.core.strict_json import JsonObject
from decentral.core.units import readable_bytes, readable_number

DAY_S = 86400.0
# Overrides for --model-from without a config: a valid section `data`. An estimate never reads the file that it names.
FOLDER_DATA = ("data.kind=tokens", "data.path=tokens.bin")
# Compute-optimal number of tokens per parameter (Hoffmann et al., arXiv 2203.15556, table 3).
TOKENS_A_PARAMETER = 20
RECOVERED = "gossip recovers 0.93 of the gain of ideal synchronous training with 4 peers, 0.67 with 16"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    run = run_of(flags)
    groups, prices = places.groups_of(flags.peers), _prices(flags.price)
    _check_prices(prices, groups)
    shaped = flags.config or flags.model or flags.model_from or run.model.model_fields_set & {"depth", "width"}
    lasts = f"up to {flags.seconds:g} s" if shaped else "up to a minute"
    print(f"playing plans, {lasts} on a quiet machine", file=sys.stderr, flush=True)
    with shared.loading():
        from decentral.commands.estimates import estimating, size_table
    if shaped:
        found = estimating.estimated(run, groups, flags.seconds)
        found |= _of_tokens(found, flags.tokens, groups, prices) | {"token": _token(run)}
    else:
        rows = size_table.by_size(run, groups, flags.seconds)
        for row in rows:
            row |= _of_tokens(row, flags.tokens or TOKENS_A_PARAMETER * row["parameters"], groups, prices)
        found = {
            "tokens": flags.tokens,
            "token": _token(run),
            "sizes": rows,
            "notes": [
                *estimating.note_on_table(rows, flags.seconds),
                *estimating.notes_on_steps(run),
                *places.notes_on_places(groups),
                *estimating.notes_on_cards(groups),
            ],
        }
    show = _show if shaped else _show_sizes
    print(strict_json.dumps(found)) if flags.json else show(found, shared.result_console())


def run_of(flags: argparse.Namespace) -> Config:
    """Return the config that CONFIG, --model, --model-from and --set describe.

    Raises:
        UserError: If the config is not valid, its model is user code, or estimates know no such gossip.
    """
    size = flags.model if flags.model and sizes.is_size(flags.model) else None
    if flags.model and size is None and flags.config:
        raise UserError(f"give CONFIG or --model {flags.model}, not both; a size such as --model 125M goes with CONFIG")
    path = flags.config if size or not flags.model else flags.model
    if path is not None and path == flags.model and path[:1].isdigit() and not Path(path).exists():
        hint = quantities.comma_hint(path)
        raise UserError(f"--model expects a size such as 125M or 1B, or a config; got {path!r}{hint}")
    overrides = [*(FOLDER_DATA if flags.model_from and path is None else ()), *flags.set]
    run = config.load(path, overrides, OwnInputs(model_folder=flags.model_from))
    if size:
        run = sizes.with_shape(run, size, frozenset(run.model.model_fields_set))
    if run.model.layers is not None:
        raise UserError("user code (model.layers) cannot be estimated; estimate with model.depth and model.width")
    if not ALGORITHMS[run.gossip.algorithm].is_estimated:
        known = names_with(ALGORITHMS, lambda one: one.is_estimated)
        raise UserError(f"only swarms with gossip.algorithm {known} can be estimated; it is {run.gossip.algorithm}")
    return run


def _of_tokens(
    found: JsonObject, tokens: float | None, groups: Sequence[PeerGroup], prices: Mapping[str, float]
) -> JsonObject:
    """Return JSON fields: if `tokens` are given, the days that they take; if `prices` has any, the prices.

    Prices are per hour and, if `tokens` are given, for all days. Without tokens/s in `found`, the result is empty.
    """
    if (speed := found.get("tokens_per_s")) is None:
        return {}
    days = Figure(speed["mid"], speed["low"], speed["high"]).times(DAY_S).duration(tokens) if tokens else None
    hourly = sum(group.count * prices.get(cards.key(group.device), prices.get("", 0.0)) for group in groups)
    counted: JsonObject = {"tokens": tokens, "days": days.to_json()} if days else {}
    if prices:
        counted["price_per_hour"] = round(hourly, 4)
        counted |= {"price": days.times(24 * hourly).to_json()} if days else {}
    return counted


def _token(run: Config) -> str:
    """Return what one token is, as text for people that follows `tokens`."""
    if run.data.facts.is_bytes and run.model.vocabulary == config.BYTES:
        return f"of one byte each (a tokenizer's, of about four: --set model.vocabulary={sizes.TOKENIZER_VOCABULARY})"
    return f"of a vocabulary of {run.model.vocabulary}"


def _prices(text: str | None) -> dict[str, float]:
    """Return the price of an hour by device key, from a text such as `0.4` or `4090=0.35,A100=1.2`.

    A price without a device stands alone, for every device; its key is "".
    """
    found: dict[str, float] = {}
    parts = text.split(",") if text is not None else []
    for part in parts:
        device, equals, price = part.rpartition("=")
        key = cards.key(device)
        try:
            if bool(equals) != bool(key) or not (equals or len(parts) == 1):
                raise argparse.ArgumentTypeError("a price without a device, or a decimal comma")
            if key in found:
                raise UserError(f"--price has two prices for {device}; got {text!r}")
            found[key] = shared.finite(price)
        except argparse.ArgumentTypeError:
            form = "expects 0.4, or 4090=0.35,A100=1.2, for an hour of a device"
            raise UserError(f"--price {form}; got {text!r}{quantities.comma_hint(text or '')}") from None
    if any(price < 0 for price in found.values()):
        raise UserError(f"--price expects prices of at least 0; got {text!r}")
    return found


def _check_prices(prices: Mapping[str, float], groups: Sequence[PeerGroup]) -> None:
    """Raise UserError if a price is for a device that no peer has, or a device has no price."""
    named = {cards.key(group.device): group.device for group in groups}
    for device in prices:
        if device and device not in named:
            raise UserError(f"--price: no peer has a {device}{did_you_mean(device, named)}")
    missing = [device for key, device in named.items() if prices and key not in prices and "" not in prices]
    if missing:
        raise UserError(f"--price has no price for {missing[0]}; add {missing[0]}=PRICE, the price of an hour")


def _show(found: JsonObject, console: Console) -> None:
    console.print(f"model: {found['model']}")
    for kind in found["peers"]:
        console.print(f"{kind['peers']}: each holds {_held(kind)}", soft_wrap=True)
        gossip = f"; gossip each {kind['window_s']:.3g} s" if kind["window_s"] else ""
        why = f" (bound by {kind['bound']})" if kind["bound"] else ""
        alone = f"a device alone, with the whole model: {kind['tokens_per_s']:,.0f} tokens/s"
        console.print(f"    {alone}{gossip}{why}", soft_wrap=True)
        sent, leaving = kind["sent_bytes_per_hour"], kind["leaving_bytes_per_hour"]
        part = _bytes(leaving) if leaving["mid"] else "none"
        away = f", {part} of it to other places" if leaving != sent else ""
        console.print(f"    sends {_bytes(sent)} an hour each{away}", soft_wrap=True)
        console.print(f"    receives {_bytes(kind['received_bytes_per_hour'])}")
    total = found["tokens_per_s"]
    rates = f"all together: {total['mid']:,.0f} tokens/s ({total['low']:,.0f} to {total['high']:,.0f})"
    console.print(f"{rates}; limit: {found['limit']}", soft_wrap=True)
    for link in found["links"]:
        each = "each of " if link["homes"] > 1 else ""
        console.print(
            f"link of {each}{link['place']}, {link['is']}: {_bytes(link['up'])} up an hour, {_bytes(link['down'])} down"
        )
    if "days" in found:
        amount = f"{readable_number(found['tokens'])} tokens {found['token']}"
        console.print(f"{amount}: {_range(found['days'])} days", soft_wrap=True)
    if "price_per_hour" in found:
        in_all = f"; in all {_range(found['price'])}" if "price" in found else ""
        console.print(f"price: {found['price_per_hour']:.2f} an hour{in_all}, in the currency of --price")
    for note in [*found["notes"], RECOVERED]:
        console.print(f"note: {note}", style="dim", soft_wrap=True)


def _held(kind: JsonObject) -> str:
    """Return as text for people what a peer of this kind holds, beside its memory."""
    needs, has = readable_bytes(kind["whole_model_bytes"]), readable_bytes(kind["memory_bytes"])
    if kind["holds"] != sizes.WHOLE_MODEL:
        return f"{kind['holds']} (the whole model needs {needs}; each has {has})"
    if kind["whole_model_bytes"] > kind["memory_bytes"]:  # the plan counts a little less than a peer claims
        return f"the {sizes.WHOLE_MODEL} (which takes all of its {has})"
    return f"the {sizes.WHOLE_MODEL} ({needs} of its {has})"


def _show_sizes(found: JsonObject, console: Console) -> None:
    given, rows = found["tokens"], found["sizes"]
    amount = f"{readable_number(given)} tokens" if given else f"{TOKENS_A_PARAMETER} tokens a parameter"
    price = " and price" if any("price" in row for row in rows) else ""
    table = Table("model", "holds", "tokens/s", f"days{price} for {amount}", "limit", box=None)
    for row in rows:
        speed, days, price = (_rounded(row[name]) if name in row else "" for name in ("tokens_per_s", "days", "price"))
        table.add_row(row["model"], row["holds"], speed, f"{days}\n{price}".strip(), row["limit"])
    console.print(table)
    more = "--model SIZE shows one size with memory, links and bytes"
    for note in [f"tokens are {found['token']}", *found["notes"], RECOVERED, more]:
        console.print(f"note: {note}", style="dim", soft_wrap=True)


def _rounded(figure: JsonObject) -> str:
    """Return a figure with its range as text of few digits, for a table."""
    mid, low, high = (f"{one:,.0f}" if one >= 100 else f"{one:.2g}" for one in figure.values())
    return f"{mid} ({low} to {high})"


def _range(figure: JsonObject) -> str:
    return f"{figure['mid']:,.3g} ({figure['low']:,.3g} to {figure['high']:,.3g})"


def _bytes(figure: JsonObject) -> str:
    return f"{readable_bytes(figure['mid'])} ({readable_bytes(figure['low'])} to {readable_bytes(figure['high'])})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Predict what a swarm can train, how fast, and at what price."
    parser = shared.Parser(prog="python -m decentral.estimate", description=about)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a shipped one")
    model = "a size such as 125M, instead of the config's depth and width; or a config; default: a table of sizes"
    parser.add_argument("--model", metavar="SIZE|CONFIG", help=model)
    parser.add_argument("--model-from", metavar="DIR", help="a Hugging Face folder whose shape the model has")
    shared.add_set_flag(parser)
    peers = (
        "[COUNTx]DEVICE [PLACE[:UP/DOWN]], ...; Mb/s, by default 20/100 where PLACE begins with home, else 1000/1000"
    )
    peers += "; the machines of a PLACE share its link, but with PLACE homes each has a home of its own"
    parser.add_argument("--peers", required=True, metavar="PEERS", help=peers)
    parser.add_argument(
        "--tokens", type=quantities.count, metavar="N", help="tokens to train, such as 10B: days and price"
    )
    parser.add_argument(
        "--price", metavar="PRICE", help="of an hour of a device, in any currency: 0.4, or 4090=0.35,A100=1.2"
    )
    search = "work of the search for routes and of the simulation, by the time that it takes on a quiet machine"
    search += "; default 60 s"
    parser.add_argument("--seconds", type=quantities.duration_s, default=60.0, metavar="TIME", help=search)
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
