"""Archives from anywhere: what could harm whoever unpacks an image is refused."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from sandbox_kernel.images import archives
from sandbox_kernel.images.archives import BadArchive, decompressed, entries

from .inputs import entry, make_tar

LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def read(data: bytes, **options: int) -> list[str]:
    file = io.BytesIO(data)
    return [found.name for found, _ in entries(decompressed(file, "it"), "it", **options)]


@pytest.mark.parametrize(
    ("harm", "archive"),
    [
        ("traversal", [entry("../etc/passwd")]),
        ("traversal further down", [entry("usr/../../etc/passwd")]),
        ("a file through a link", [entry("a", LINK, "/etc"), entry("a/passwd")]),
        ("a file through a relative link", [entry("a", LINK, "../.."), entry("a/b/c")]),
        ("a link that becomes a folder", [entry("a", LINK, "/etc"), entry("a", FOLDER)]),
        ("a folder that becomes a link", [entry("a/b"), entry("a", LINK, "/etc")]),
        ("a file in a file", [entry("a"), entry("a/b")]),
        ("a hard link out of it", [entry("a", HARD, "../../etc/shadow")]),
        ("a hard link to what is not there", [entry("a", HARD, "etc/shadow")]),
        ("a hard link to a link", [entry("s", LINK, "/etc/shadow"), entry("a", HARD, "s")]),
        ("a device", [entry("sda", tarfile.BLKTYPE)]),
        ("another device", [entry("usr/dev/null", tarfile.CHRTYPE)]),
        ("an unknown kind", [entry("a", b"Z")]),
        ("a name that no system takes", [entry("a" * 256)]),
        ("a root that is a file", [entry("./")]),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_hostile_archives_are_refused(harm: str, archive: list[tarfile.TarInfo]) -> None:
    """Nothing that leads out of the image, or through a link, gets in."""
    with pytest.raises(BadArchive, match=r"it is refused: it (has|puts)|cannot be read"):
        read(make_tar(*archive))


def test_bombs_are_refused() -> None:
    """The content is counted, as it comes out of the compression."""
    bomb = gzip.compress(make_tar(entry("zeros", size=8 * 2**20)))
    assert len(bomb) < 20_000
    with pytest.raises(BadArchive, match="more than"):
        read(bomb, limit=2**20)


def test_headers_are_bounded() -> None:
    """An extended header is read into memory, so it may not be large."""
    long = entry("x" * 10)
    long.pax_headers = {"comment": "y" * (archives.MAX_HEADER + 10)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(long)
    with pytest.raises(BadArchive, match="header of"):
        read(packed.getvalue())


@pytest.mark.parametrize(
    "data", [b"nonsense" * 100, gzip.compress(b"x" * 600)[:15]], ids=["nonsense", "cut"]
)
def test_broken_archives_are_refused(data: bytes) -> None:
    """What is no archive gives an error of ours, not tarfile's."""
    with pytest.raises(BadArchive, match="cannot be read"):
        read(data)


def test_names_are_relative() -> None:
    """However an archive spells them, names come without a leading slash or dots."""
    archive = make_tar(entry("./", FOLDER), entry("/a/./b"), entry("./c"), entry("d", HARD, "/c"))
    assert read(archive) == ["", "a/b", "c", "d"]
