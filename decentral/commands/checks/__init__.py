"""The checks of `python -m decentral.doctor`, one file per subject. A check returns what it found, and the remedy."""
