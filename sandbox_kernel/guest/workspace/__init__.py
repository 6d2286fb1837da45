"""The sandbox's half of persist and hydrate; the formats are shared with the host.

docs/workspace.md describes the format of trees, docs/wire.md the messages.
"""
