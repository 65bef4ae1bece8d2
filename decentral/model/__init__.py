"""The model: its shape, layers, adapters, and Hugging Face folders. `shape` and `families` do not import torch."""
