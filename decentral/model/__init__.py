"""The model: its shape, its layers, its adapters, and folders of Hugging Face. `shape` and `families` know no torch."""
