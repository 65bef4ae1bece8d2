"""A peer's journal, a file with one JSON line for each event. Start reading at `events.py`."""
