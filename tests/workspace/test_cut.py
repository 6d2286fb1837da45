"""Where files are cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.guest.workspace.cut import length_of_chunk
from sandbox_kernel.guest.workspace.tree_format import (
    CHUNK,
    LEAST_CHUNK,
    chunk_text,
    digest,
    encode_entry,
    pieces,
)
from sandbox_kernel.workspace.trees import parse_tree


def lines(seed: int, size: int) -> bytes:
    source = random.Random(seed)
    made = bytearray()
    while len(made) < size:
        made += (
            f"{source.random()},{source.randrange(10**6)},name-{source.randrange(99)}\n".encode()
        )
    return bytes(made[:size])


def chunks_of(data: bytes) -> list[bytes]:
    found = []
    offset = 0
    while offset < len(data):
        piece = data[offset : offset + CHUNK]
        found.append(piece[: length_of_chunk(piece, len(data))])
        offset += len(found[-1])
    return found


CONTENTS = {
    "lines": lines(1, 12 * CHUNK),
    "one line of fields": lines(2, 12 * CHUNK).replace(b"\n", b","),
    "one line of words": lines(3, 12 * CHUNK).replace(b"\n", b" ").replace(b",", b" "),
    "binary": random.Random(4).randbytes(12 * CHUNK),
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("where", [0, 5 * CHUNK + 12345])
def test_an_insertion_and_a_removal_change_few_chunks(kind: str, where: int) -> None:
    data = CONTENTS[kind]
    before = set(map(digest, chunks_of(data)))
    for changed in (
        data[:where] + b"0.5,17,inserted" + data[where:],
        data[:where] + data[where + 1000 :],
    ):
        new = sum(len(c) for c in chunks_of(changed) if digest(c) not in before)
        assert new <= 4 * CHUNK


@pytest.mark.parametrize("kind", CONTENTS)
def test_appending_changes_the_end_alone(kind: str) -> None:
    data = CONTENTS[kind]
    before, after = chunks_of(data[: 9 * CHUNK]), chunks_of(data)
    same = [one for one, other in zip(before, after, strict=False) if one == other]
    assert sum(map(len, same)) > 7 * CHUNK


@pytest.mark.parametrize(
    "data",
    [b"\n" * 4 * CHUNK, b"0\n" * 2 * CHUNK, b"," * 3 * CHUNK, b"x" * 3 * CHUNK, b" " * (CHUNK + 1)],
)
def test_monotonous_files(data: bytes) -> None:
    """Every place is like every other."""
    found = chunks_of(data)
    assert b"".join(found) == data
    assert all(LEAST_CHUNK <= len(chunk) <= CHUNK for chunk in found[:-1])


def test_small_and_huge_files_are_cut_by_length() -> None:
    data = CONTENTS["lines"][:CHUNK]
    assert length_of_chunk(data, CHUNK) == CHUNK
    assert length_of_chunk(data, 2**34 + 1) == CHUNK
    assert length_of_chunk(data, 2**34) < CHUNK


@given(st.integers(0, 2**32), st.integers(1, 4 * CHUNK))
def test_what_is_written_is_read_again(seed: int, size: int) -> None:
    """The chunks of any file are a valid entry, with the places that they were cut at."""
    source = random.Random(seed)
    data = source.choice(list(CONTENTS.values()))[source.randrange(CHUNK) :][:size]
    texts, places, offset = [], [], 0
    for chunk in chunks_of(data):
        texts.append(chunk_text(digest(chunk), len(chunk), size - offset))
        places.append((offset, digest(chunk), len(chunk)))
        offset += len(chunk)
    entry = encode_entry(["name", "f", 0o644, 0, size, texts])
    [read], _ = parse_tree(b'{"entries":[' + entry + b"]}")
    assert list(read.pieces()) == places
    assert [(at, h.hex(), n) for at, h, n in places] == list(pieces(texts, size))
