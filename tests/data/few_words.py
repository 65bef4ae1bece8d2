"""A tokenizer that knows a few words, and has no token for any other word."""

import json
from pathlib import Path

import pytest

WORDS = ("the", "swarm", "</s>")


def few_words(folder: Path) -> Path:
    """Write the tokenizer into a folder, and return the folder."""
    pytest.importorskip("tokenizers", reason="needs the extra hf: pip install 'decentral[hf]'")
    end = {"id": 2, "content": "</s>", "special": True, "normalized": False}
    content = {
        "version": "1.0",
        "added_tokens": [end | {"single_word": False, "lstrip": False, "rstrip": False}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
