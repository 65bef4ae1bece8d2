"""The checks of `python -m decentral.doctor`, a file for each family. Each says what it found, and the remedy."""
