"""Every input of the corpus at its decoder, and no decoder without a corpus.

An input that once crashed a decoder stays in tests/fuzz/corpus/, so this is also the list of what was found so.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.fuzz import decoders, seeds
from tests.fuzz.decoders import DECODERS
from tests.test_rooms import MODULES, tree

PARSERS = {
    "msgpack.unpackb",
    "read_msgpack",
    "json.loads",
    "strict_json.loads",
    "yaml.load",
    "yaml.safe_load",
    "csv.DictReader",
    "np.frombuffer",
    "torch.frombuffer",
    "safe_open",
    "int.from_bytes",
    "serialization.load_der_public_key",
    "serialization.load_der_private_key",
}  # what libraries read bytes with
NEVER_ACCEPTED = {"identity_file"}  # no whole private key is in the repository
NOT_OF_BYTES = {
    "comm.net.dht_values.require_records": "tests/fuzz/dht_calls.py makes its answers",
    "comm.net.fair_shares.begin": "counts what a sender has",
    "comm.net.fair_shares.reserve": "counts what a sender has",
    "comm.net.dht_calls.begin": "counts the calls of a peer",
    "comm.net.dht_calls.check_request": "a call that hivemind has parsed: tests/comm/net/test_dht_calls.py",
    "comm.wire.blobs.require_bound": "a decoded message and a length, which read_rest has read",
    "comm.net.streams._next_question": "four bytes of a length, which read_rest checks",
    "sim.network.virtual_network._serve": "the size of a question in virtual time",
    "sim.network.virtual_network.check": "the size of a question in virtual time, which private_swarm.check has taken",
    "peers.membership.records.require_valid": "our own record",
    "peers.membership.statements.opened": "a journal's base64 of a record: tests/peers/membership/test_statements.py",
    "serving.gather_weights._fetch": "a decoded message",
    "engine.owned_rules.partner_window": "hands a window to the rule of its owner",
    "engine.shards.call": "raises what the owner's rule has raised",
    "sim.planned.read": "a plan that the user names: tests/sim/test_planned.py",
    "view.page.sources.facts": "a run.json that the user names; a damaged one counts as none",
    "view.page.sources.lines": "journals that the user names, and what the process that started the page writes",
    "serving.chat_template.of_tokenizer": "the user's own tokenizer: tests/serving/test_chat_template.py",
    "data.text_codec._is_of_bytes": "the user's own tokenizer",
    "data.corpora._bytes_of": "the user's own text, of any bytes",
    "model.families.read": "the user's own config.json: tests/model/test_families.py",
    "model.start_weights._file": "the user's own folder, whose errors are one line",
    "model.start_weights._places": "the user's own folder, whose errors are one line",
    "store.sending.opened_upload": "the user's own folder: tests/store/test_sending.py",
    "store.sending._facts": "the user's own folder: tests/store/test_sending.py",
    "store.uploader._run_child": "what a child of our own prints",
    "view.run_comparison.of": "a config that was received before",
    "view.model_card._settings": "a config of our own",
    "data.library_trial.tried": "what a child of our own prints",
    "data.tokenizer._digest": "the user's own tokenizer, which the library has read",
    "data.tokenizer.settings": "the user's own tokenizer, whose errors are one line",
    "data.documents._hash": "a digest of our own",
    "data.documents._parsed_lines": "the user's own data: tests/data/test_data_files.py",
    "data.chat_rows._parsed": "the user's own data: tests/data/test_chat_rows.py",
    "data.token_file.described": "the user's own token file: tests/data/test_token_file.py",
    "data.stream.of": "a position of our own; a damaged one counts as none",
    "comm.codecs.blockwise._tensor": "a part of those formulas",
    "comm.gossip.kernels_cuda.merge": "numbers that were read before",
    "comm.gossip.kernels_cuda.distance": "numbers that were read before",
    "peers.membership.roster.read": "a decoded record of another run: tests/fuzz/fuzzed_node.py",
    "comm.rounds.round_state.accept": "a decoded message: tests/fuzz/fuzzed_node.py",
    "core.rng.seed_of": "a digest of our own",
    "engine.micro_batch_names._mixed": "a digest of our own",
    "engine.tensor_file.__init__": "memory of our own",
    "engine.tensor_file.finish": "a header of our own",
    "sim.liars._scaled": "a simulated liar's own numbers",
    "engine.tensor_file.checksum": "a tensor of our own",
    "comm.gossip.kernels_cpu.close": "numbers of our own",
    "comm.gossip.kernels_cuda.close": "numbers of our own",
    "comm.gossip.outer_kernels.close": "numbers of our own",
    "engine.checkpoint.save": "numbers of our own",
    "engine.checkpoint.__getitem__": "a checkpoint whose header was read before: tests/engine/test_checkpoint.py",
    "engine.checkpoint.write": "a state of our own",
    "sim.surrogate_model.decode": "simulated numbers",
    "sim.surrogate_stages._read": "simulated numbers",
    "sim.virtual_signer._opened": "simulated signatures",
    "sim.virtual_signer.open": "simulated signatures",
}


@pytest.mark.parametrize("name", DECODERS)
def test_no_input_of_the_corpus_crashes_its_decoder(name: str) -> None:
    inputs = seeds.corpus(name)
    taken = [data for data in inputs if not decoders.refused(DECODERS[name].run, data)]
    assert len(inputs) > 8
    assert taken or name in NEVER_ACCEPTED, "a decoder that refuses all tests nothing behind its door"


def readers() -> Iterator[str]:
    """Functions of the product that raise ProtocolError, or call a library's parser."""
    for module in MODULES:
        for function in ast.walk(tree(module)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_reads, ast.walk(function))):
                yield f"{module}.{function.name}"


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return "ProtocolError(" in ast.unparse(node)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS


def test_every_function_that_reads_bytes_of_others_is_in_the_table() -> None:
    covered = {name for one in DECODERS.values() for name in one.covers}
    missing = sorted(set(readers()) - covered - set(NOT_OF_BYTES))
    assert missing == [], "name each in `covers` of tests/fuzz/decoders.py, or in NOT_OF_BYTES of test_corpus.py"


def test_the_table_names_functions_that_are_there() -> None:
    defined = {
        f"{module}.{node.name}"
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = {name for one in DECODERS.values() for name in one.covers} | set(NOT_OF_BYTES)
    assert sorted(named - defined) == []
