"""Building, listing, removing and exporting images."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sandbox_kernel.cli import main
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.images import image_store
from sandbox_kernel.images.build import build_image
from sandbox_kernel.images.oci import Layout

from .inputs import AARCH64, entry, make_rootfs, make_tar, make_wheel

PROGRAM = [sys.executable, "-m", "sandbox_kernel"]


def files_of(path: Path) -> dict[str, tarfile.TarInfo]:
    """All entries of an image's layers, upper ones last."""
    found = {}
    for layer in image_store.load(path).layers:
        with tarfile.open(Layout(path).blob(layer["digest"])) as archive:
            found.update({one.name: one for one in archive})
    return found


def content_of(path: Path, name: str) -> bytes:
    for layer in reversed(image_store.load(path).layers):
        with tarfile.open(Layout(path).blob(layer["digest"])) as archive:
            if name in archive.getnames():
                file = archive.extractfile(name)
                assert file is not None
                return file.read()
    raise AssertionError(f"no {name} in the image")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds packages in this folder only."""
    folder = tmp_path / "wheels"
    make_wheel(folder, "ipykernel", "99.0", requires='old_only; python_version < "3.10"')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_the_same_files_give_the_same_digest(rootfs: Path, tmp_path: Path) -> None:
    """Neither the time nor the place nor the order of the files on disk shows in an image."""
    first = build_image("one", str(rootfs)).digest
    shutil.copytree(rootfs, tmp_path / "copy", symlinks=True)
    os.utime(tmp_path / "copy" / "etc", (1, 1))
    (tmp_path / "copy" / "dev").mkdir()
    (rootfs / "dev").mkdir()
    (rootfs / "dev" / "console").write_text("what a running system has there is left out")
    assert build_image("two", str(rootfs)).digest == build_image("3", str(tmp_path / "copy")).digest
    assert build_image("one", str(rootfs)).digest != first  # a folder more


def test_what_an_image_says(rootfs: Path) -> None:
    """Its configuration, its owners and its times are those of an image for kernels."""
    (rootfs / "usr/bin/python3.11").chmod(0o4755)
    path = build_image("py", str(rootfs)).path
    image = image_store.load(path)
    assert image.config["architecture"] == "amd64"
    assert image.config["config"]["WorkingDir"] == "/workspace"
    assert image.config["config"]["Cmd"] == ["python3"]
    assert image.config["config"]["Env"][0].startswith("PATH=/usr/local/sbin:")
    files = files_of(path)
    assert files["workspace"].isdir()
    assert {(one.uid, one.gid, one.uname) for one in files.values()} == {(0, 0, "")}
    assert files["etc/passwd"].mtime == 315532800
    assert files["usr/bin/python3.11"].mode == 0o4755
    # What was compiled from a source is valid for its time only.
    source = rootfs / "usr/lib/python3.11/os.py"
    assert files["usr/lib/python3.11/os.py"].mtime == int(source.stat().st_mtime)


def test_ipykernel_is_added(wheels: Path, tmp_path: Path) -> None:
    """Packages go where the image's Python looks for them, and programs run by it."""
    built = build_image("py", str(make_rootfs(tmp_path / "r")))
    place = "usr/local/lib/python3.11/dist-packages"
    files = files_of(built.path)
    assert content_of(built.path, f"{place}/ipykernel/__init__.py").startswith(b"version = '99.0'")
    program = content_of(built.path, "usr/local/bin/ipykernel")
    assert program.startswith(b"#!/usr/bin/python3\n")
    compiled = f"{place}/ipykernel/__pycache__/__init__.cpython-311.pyc"
    if sys.version_info[:2] == (3, 11):
        assert content_of(built.path, compiled)[4:8] == b"\1\0\0\0"  # a hash that is not checked
    assert not any(str(tmp_path) in name for name in files)


def test_building_twice_with_packages(
    wheels: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that are fetched again give the same image, and cached ones need no index."""
    root = str(make_rootfs(tmp_path / "r"))
    first = build_image("one", root).digest
    shutil.rmtree(data / "packages")
    assert build_image("one", root).digest == first
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert build_image("two", root).digest == first


def test_requirements_for_another_python(wheels: Path, tmp_path: Path) -> None:
    """Requirements hold for the image's Python and machine, not for those of this process."""
    make_wheel(wheels, "old_only")
    make_wheel(wheels, "native", tag="cp39-cp39-manylinux_2_28_aarch64")
    make_wheel(wheels, "native", tag=f"cp39-cp39-manylinux_2_28_{os.uname().machine}")
    (tmp_path / "with.txt").write_text("native==1.0  # a comment\n\n")
    root = make_rootfs(tmp_path / "r", python="usr/bin/python3.9", machine=AARCH64)
    built = build_image("py", str(root), requirements=tmp_path / "with.txt")
    place = "usr/local/lib/python3.9/dist-packages"
    wheel = content_of(built.path, f"{place}/native-1.0.dist-info/WHEEL")
    assert b"aarch64" in wheel
    assert f"{place}/old_only/__init__.py" in files_of(built.path)
    assert image_store.load(built.path).config["architecture"] == "arm64"


def test_no_wheels(wheels: Path, tmp_path: Path) -> None:
    """A package that has no wheel for the image is named, and nothing is left."""
    make_wheel(wheels, "native", tag="cp312-cp312-manylinux_2_99_x86_64")
    (tmp_path / "with.txt").write_text("native\n")
    root = make_rootfs(tmp_path / "r")
    with pytest.raises(SandboxError, match=r"no wheels of native .* for Python 3\.11 on x86_64"):
        build_image("py", str(root), requirements=tmp_path / "with.txt")
    assert list(image_store.images_dir().iterdir()) == []


def test_requirements_that_only_pip_understands(wheels: Path, tmp_path: Path) -> None:
    """Files, links and options in a requirements file are left to pip, and not cached."""
    extra = make_wheel(tmp_path / "elsewhere", "extra")
    (tmp_path / "with.txt").write_text(f"--no-index\n{extra}\n")
    built = build_image("py", str(make_rootfs(tmp_path / "r")), requirements=tmp_path / "with.txt")
    assert any(name.endswith("/extra/__init__.py") for name in files_of(built.path))


@pytest.mark.parametrize("kind", ["folder", "archive", "name"])
def test_layers_of_an_oci_base_are_kept(
    kind: str, rootfs: Path, wheels: Path, tmp_path: Path
) -> None:
    """An OCI base keeps its layers, and one is added on top."""
    make_wheel(wheels, "extra")
    (tmp_path / "with.txt").write_text("extra\n")
    base = build_image("base", str(rootfs))
    source = "base"
    if kind == "folder":
        source = str(tmp_path / "layout")
        image_store.export_folder("base", Path(source))
    elif kind == "archive":
        source = str(tmp_path / "base.tar.gz")
        with gzip.open(source, "wb") as file:
            image_store.export_archive("base", file)  # type: ignore[arg-type]
    built = build_image("top", source, requirements=tmp_path / "with.txt")
    layers = image_store.load(built.path).layers
    assert layers[:-1] == image_store.load(base.path).layers
    assert f"{built.interpreter.packages[1:]}/extra/__init__.py" in files_of(built.path)


def test_an_archive_as_root_file_system(rootfs: Path, tmp_path: Path) -> None:
    """A folder and an archive of it give images with the same files."""
    with tarfile.open(tmp_path / "r.tar.xz", "w:xz") as archive:
        archive.add(rootfs, arcname=".")
    one, two = build_image("one", str(rootfs)), build_image("two", str(tmp_path / "r.tar.xz"))
    assert sorted(files_of(one.path)) == sorted(files_of(two.path))


def test_a_hostile_archive_leaves_nothing(tmp_path: Path) -> None:
    """A refused archive is an error of one line, and nothing is in the store."""
    (tmp_path / "bad.tar").write_bytes(make_tar(entry("usr/../../etc/passwd")))
    with pytest.raises(SpecError, match="is refused"):
        build_image("py", str(tmp_path / "bad.tar"))
    assert list(image_store.images_dir().iterdir()) == []


def test_a_damaged_layer_is_refused(rootfs: Path) -> None:
    """A layer that is not what its digest says is not built upon."""
    path = build_image("base", str(rootfs)).path
    layer = Layout(path).blob(image_store.load(path).layers[0]["digest"])
    layer.write_bytes(gzip.compress(make_tar(entry("evil"))))
    with pytest.raises(SpecError, match="does not have that digest"):
        build_image("top", "base")


def test_a_layout_that_points_elsewhere(tmp_path: Path) -> None:
    """Digests are checked before they become file names."""
    layout = Layout.create(tmp_path)
    index = {"manifests": [{"digest": "sha256:../../../../etc/passwd", "mediaType": "x"}]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match="not by a sha256"):
        layout.image("amd64")


def test_names_and_paths_and_references(rootfs: Path, tmp_path: Path) -> None:
    """A spec's image is a built one, a layout on disk, or a registry's."""
    built = build_image("py", str(rootfs))
    assert image_store.resolve("py") == built.path
    assert image_store.resolve(str(built.path)) == built.path
    assert image_store.resolve("python:3.12-slim") is None
    assert image_store.resolve("registry.example/py") is None
    assert image_store.resolve(str(rootfs)) is None
    assert image_store.load(built.path).digest == built.digest


def test_an_image_built_anew_replaces_the_old_one(rootfs: Path) -> None:
    """Only the blobs of the new one are left."""
    build_image("py", str(rootfs))
    (rootfs / "more").write_text("more")
    path = build_image("py", str(rootfs)).path
    image = image_store.load(path)
    blobs = {
        image.digest,
        image.manifest["config"]["digest"],
        *(la["digest"] for la in image.layers),
    }
    assert {f"sha256:{blob.name}" for blob in (path / "blobs/sha256").iterdir()} == blobs
    assert [found.name for found in image_store.list_images()] == ["py"]


def test_the_command(rootfs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """build, list, export and rm, as a user sees them."""
    assert main(["image", "build", "-t", "py", "--from", str(rootfs)]) == 0
    digest = capsys.readouterr().out.strip()
    assert main(["image", "list"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "DIGEST", "SIZE", "PYTHON", "ARCHITECTURE", "AGE"]
    assert row.split()[:2] == ["py", digest.removeprefix("sha256:")[:12]]
    assert main(["image", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["digest"] == digest
    assert main(["image", "export", "py", str(tmp_path / "py.tar")]) == 0
    assert main(["image", "export", "py", f"{tmp_path}/layout/"]) == 0
    assert image_store.load(tmp_path / "layout").digest == digest
    assert main(["image", "rm", "py", "other"]) == 0
    assert capsys.readouterr().out == "py\n"
    assert main(["image", "list", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["image", "build", "-t", "again", "--from", str(tmp_path / "py.tar")]) == 0
    assert main(["image", "export", "nothing", "-"]) == 1


def test_exports_are_for_docker_as_well(rootfs: Path) -> None:
    """An exported archive is an OCI layout, and what older tools know as an image, too."""
    path = build_image("py", str(rootfs)).path
    packed, again = io.BytesIO(), io.BytesIO()
    image_store.export_archive("py", packed)
    image_store.export_archive("py", again)
    assert packed.getvalue() == again.getvalue()
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        manifest = json.load(archive.extractfile("manifest.json") or packed)
        names = archive.getnames()
    assert {"oci-layout", "index.json", manifest[0]["Config"], *manifest[0]["Layers"]} <= set(names)
    assert len(manifest[0]["Layers"]) == len(image_store.load(path).layers)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(signum: int, tmp_path: Path, data: Path) -> None:
    """Ctrl-C while packages are fetched cleans up, and ends pip."""
    rootfs = make_rootfs(tmp_path / "r")
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        started = subprocess.Popen(
            [*PROGRAM, "image", "build", "-t", "py", "--from", str(rootfs)],
            env={**os.environ, "PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull},
            stderr=subprocess.DEVNULL,
        )
        connection, _ = index.accept()  # by pip, which now waits for an answer
        with connection:
            started.send_signal(signum)
            assert started.wait(60) == 128 + signum
            connection.settimeout(60)
            while connection.recv(65536):
                pass  # until pip is gone
    assert list(image_store.images_dir().iterdir()) == list((data / "packages").iterdir()) == []


def test_what_a_killed_build_has_left_is_cleared_up(rootfs: Path) -> None:
    """The next build removes what belongs to nobody any more."""
    left = image_store.images_dir() / ".building-left"
    (left / "layout").mkdir(parents=True)
    with image_store.building(image_store.images_dir()) as mine:
        build_image("py", str(rootfs))
        assert mine.is_dir()
    assert sorted(path.name for path in image_store.images_dir().iterdir()) == ["py"]
