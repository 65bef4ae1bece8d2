"""A peer's training data: text and tokens of every kind, and tokenizers."""
