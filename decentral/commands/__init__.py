"""The commands.

Each parses its flags, calls, and prints. `python -m decentral.NAME` runs the module of that name here.
"""
