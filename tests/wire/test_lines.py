"""Lines of JSON messages."""

from __future__ import annotations

import pytest

from sandbox_kernel.wire.lines import LineReader

MIB = 2**20


def test_lines_are_cut_wherever_the_pieces_end() -> None:
    """And a line that does not end is refused, not kept."""
    reader = LineReader()
    assert reader.feed(b"a\nbc") == [b"a"]
    assert reader.feed(memoryview(b"d")) == []
    assert reader.feed(b"e\n\nf\n") == [b"bcde", b"", b"f"]
    piece = bytes(MIB)
    for _ in range(4):
        assert reader.feed(piece) == []
    with pytest.raises(ValueError, match="4194304"):
        reader.feed(b"x")


def test_a_line_that_comes_byte_by_byte_costs_no_more_than_another() -> None:
    """No test of speed: with a cost that grows with the line this would not end."""
    reader = LineReader()
    for _ in range(MIB // 4):
        reader.feed(b"x")
    assert reader.feed(b"\n") == [b"x" * (MIB // 4)]
