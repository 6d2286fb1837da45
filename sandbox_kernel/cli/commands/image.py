"""``sandbox-kernel image``: build, list, remove and export images for kernels."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.cli.foreground import Interrupted
from sandbox_kernel.cli.parser import Commands, add_command
from sandbox_kernel.cli.text import age, note, print_json, table
from sandbox_kernel.text import printable

_HEADING = ("NAME", "DIGEST", "SIZE", "PYTHON", "ARCHITECTURE", "AGE")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "image",
        lambda arguments: 2,
        "build and manage images for backends that boot one",
        details="An image that\nis built here is used by its name, as in `install BACKEND --image "
        "NAME`.",
        examples=("image build -t py", "image list", "image export py - | docker load"),
    )
    inner = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_build(inner)
    _add_list(inner)
    _add_rm(inner)
    _add_export(inner)


def _add_build(commands: Commands) -> None:
    parser = add_command(
        commands,
        "build",
        _build,
        "make an image with Python and ipykernel",
        details="Needs\nno Docker, and root only for --from debian where there is debootstrap but "
        "no mmdebstrap.\nNothing of the base is run. The same base and packages give the same "
        "digest. Prints the\ndigest.",
        examples=(
            "image build -t py",
            "image build -t science --with requirements.txt",
            "image build -t mine --from ./rootfs.tar.gz",
            "image build -t mine --from ./oci-layout --python /opt/python/bin/python3.12",
        ),
    )
    parser.add_argument("-t", "--tag", required=True, metavar="NAME", help="name of the image")
    parser.add_argument(
        "--from",
        dest="source",
        default="debian",
        metavar="BASE",
        help="debian (the default), a folder or archive with a root file system or an OCI layout, "
        "or an image by its name",
    )
    parser.add_argument(
        "--with",
        dest="requirements",
        type=Path,
        metavar="FILE",
        help="requirements.txt of packages to install, as wheels",
    )
    parser.add_argument("--python", metavar="PATH", help="the interpreter, if not python3 on PATH")


def _add_list(commands: Commands) -> None:
    parser = add_command(
        commands,
        "list",
        _list,
        "list the images that were built here",
        details="With --json: a list of\nobjects with the keys name, digest, size (bytes), python, "
        "architecture, created (seconds\nsince 1970), path.",
        examples=("image list", "image list --json"),
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("-q", "--quiet", action="store_true", help="print names only")


def _add_rm(commands: Commands) -> None:
    parser = add_command(
        commands,
        "rm",
        _rm,
        "remove images",
        details="Sandboxes that were made from them live on. An image\nthat is not there counts "
        "as removed.",
        examples=("image rm py",),
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `image list` shows it")


def _add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "write an image to a file or folder, for other tools",
        details="The file\nis an OCI archive that `docker load`, `podman load`, `msb load` and "
        "skopeo read.",
        examples=(
            "image export py py.tar",
            "image export py ./py-layout/",
            "image export py - | docker load",
        ),
    )
    parser.add_argument("name", metavar="NAME", help="as `image list` shows it")
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a file; - for the standard output; a folder, if it ends with / or is one",
    )


def _build(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.images.build import build_image

    with _ended_by_signals():
        built = build_image(
            arguments.tag,
            arguments.source,
            requirements=arguments.requirements,
            python=arguments.python,
            note=note,
        )
    note(f"Built {arguments.tag}: {built.interpreter.target}, in {built.path}")
    print(built.digest)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.images.store import list_images

    found = list_images()
    keys = ("name", "digest", "size", "python", "architecture", "created", "path")
    if arguments.json:
        values = [{key: getattr(image, key) for key in keys} for image in found]
        print_json([{**value, "path": str(value["path"])} for value in values])
    elif arguments.quiet:
        for image in found:
            print(printable(image.name))
    else:
        rows = [
            (
                image.name,
                image.digest.removeprefix("sha256:")[:12],
                f"{image.size / 2**20:.1f} MiB",
                image.python or "-",
                image.architecture,
                age(time.time() - image.created),
            )
            for image in found
        ]
        print(table([_HEADING, *rows]))
    return 0


def _rm(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.images.store import remove

    for name in arguments.names:
        if remove(name):
            print(printable(name))
        else:
            note(f"There is no image {name!r}. Nothing to remove.")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.images.store import export_archive, export_folder

    target = Path(arguments.target)
    with _ended_by_signals():
        if arguments.target == "-":
            if sys.stdout.isatty():
                arguments.parser.error("an archive is not for a terminal: name a file, or pipe it")
            export_archive(arguments.name, sys.stdout.buffer)
        elif arguments.target.endswith("/") or target.is_dir():
            export_folder(arguments.name, target)
        else:
            _export_file(arguments.name, target)
    return 0


def _export_file(name: str, target: Path) -> None:
    from sandbox_kernel.images.store import export_archive

    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            export_archive(name, file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals raise Interrupted here, once, so that what was begun is cleaned up."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def raised(signum: int, frame: object) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {
        signum: signal.signal(signum, raised)
        for signum in signals
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
