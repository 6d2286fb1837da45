"""``sandbox-kernel image``: build, list, rm, export."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.cli.foreground import Interrupted
from sandbox_kernel.cli.formatting import age, note, print_json, table
from sandbox_kernel.cli.options import Commands, add_command, add_group
from sandbox_kernel.untrusted_text import printable

_NAME_HELP = "as `image list` shows it"
_HEADING = ("NAME", "DIGEST", "SIZE", "PYTHON", "ARCHITECTURE", "AGE")


def add(commands: Commands) -> None:
    inner = add_group(commands, "image", _image)
    build = add_command(inner, "build", _build)
    build.add_argument("-t", "--tag", required=True, metavar="NAME", help="name of the image")
    about = (
        "debian (the default), a folder or archive with a root file system or an OCI layout, or an "
        "image by its name"
    )
    build.add_argument("--from", dest="source", default="debian", metavar="BASE", help=about)
    about = "requirements.txt of packages to install, as wheels"
    build.add_argument("--with", dest="requirements", type=Path, metavar="FILE", help=about)
    build.add_argument("--python", metavar="PATH", help="the interpreter, if not python3 on PATH")
    add_command(inner, "list", _list).add_json(quiet=True)
    rm = add_command(inner, "rm", _rm)
    rm.add_argument("names", nargs="+", metavar="NAME", help=_NAME_HELP)
    export = add_command(inner, "export", _export)
    export.add_argument("name", metavar="NAME", help=_NAME_HELP)
    about = "a file; - for the standard output; a folder, if it ends with / or is one"
    export.add_argument("target", metavar="TARGET", help=about)


def _image(arguments: argparse.Namespace) -> None:
    """Build and manage images for backends that boot one.

    An image that is built here is used by its name, as in `install BACKEND --image NAME`.

    examples:
      sandbox-kernel image build -t py
      sandbox-kernel image list
      sandbox-kernel image export py - | docker load
    """


def _build(arguments: argparse.Namespace) -> None:
    """Make an image with Python and ipykernel.

    Needs no Docker, and root only for --from debian where there is debootstrap but no mmdebstrap.
    Runs nothing of the base. The same base and packages give the same digest, which is printed.

    examples:
      sandbox-kernel image build -t py
      sandbox-kernel image build -t science --with requirements.txt
      sandbox-kernel image build -t mine --from ./rootfs.tar.gz
      sandbox-kernel image build -t mine --from ./oci-layout --python /opt/python/bin/python3.12
    """
    from sandbox_kernel.images.build import build_image  # lazy: start-up time

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


def _list(arguments: argparse.Namespace) -> None:
    """List the images that were built here.

    With --json: a list of objects with the keys name, digest, size (bytes), python, architecture,
    created (seconds since 1970), path.

    examples:
      sandbox-kernel image list
      sandbox-kernel image list --json
    """
    from sandbox_kernel.images.image_store import list_images  # lazy: start-up time

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


def _rm(arguments: argparse.Namespace) -> None:
    """Remove images.

    Sandboxes that were made from them live on. An image that does not exist counts as removed.

    examples:
      sandbox-kernel image rm py
    """
    from sandbox_kernel.images.image_store import remove  # lazy: start-up time

    for name in arguments.names:
        if remove(name):
            print(printable(name))
        else:
            note(f"There is no image {name!r}. Nothing to remove.")


def _export(arguments: argparse.Namespace) -> None:
    """Write an image to a file or folder, for other tools.

    The file is an OCI archive that `docker load`, `podman load`, `msb load` and skopeo read.

    examples:
      sandbox-kernel image export py py.tar
      sandbox-kernel image export py ./py-layout/
      sandbox-kernel image export py - | docker load
    """
    from sandbox_kernel.images import image_store  # lazy: start-up time

    target = Path(arguments.target)
    with _ended_by_signals():
        if arguments.target == "-":
            if sys.stdout.isatty():
                arguments.parser.error("an archive is not for a terminal: name a file, or pipe it")
            image_store.export_archive(arguments.name, sys.stdout.buffer)
        elif arguments.target.endswith("/") or target.is_dir():
            image_store.export_folder(arguments.name, target)
        else:
            image_store.export_file(arguments.name, target)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first signal raise Interrupted here, so that unfinished work is cleaned up."""
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
