"""What a peer trains on: text and tokens of every kind, and the tokenizer."""
