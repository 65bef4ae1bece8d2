"""The commands. Each module parses its flags, calls other packages, and prints the result.

`python -m decentral.NAME` runs the module NAME; table.py lists them all.
"""
