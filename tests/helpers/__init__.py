"""Shared by tests of several folders. See tests/README.md."""
