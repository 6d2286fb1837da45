"""ZMTP 3 (ZeroMQ's protocol), as far as the guest looks into it or speaks it."""

GREETING_SIZE = 64
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""

SUBSCRIBE_ALL = b"\x00\x01\x01"
