"""Images as the SDK knows them: references to a registry, and OCI layouts, which it must load."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import microsandbox as sdk

from sandbox_kernel.errors import SandboxError, SandboxTimeout, SpecError
from sandbox_kernel.images import image_store
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.spec import SandboxSpec

_LOAD_TIMEOUT, _POLL = 1800.0, 0.2
_PREFIX = "localhost/sandbox-kernel"


async def reference(spec: SandboxSpec) -> tuple[str, bool]:
    """The SDK's name for the spec's image, and whether it is here already. A layout is loaded
    once for each content, however many processes ask for it."""
    if spec.image is None:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: the backend 'microsandbox' needs an image "
            f"with Python. Give a registry's reference (image='python:3.12-slim'), or make one "
            f"with `sandbox-kernel image build` and give its name."
        )
    layout = await asyncio.to_thread(image_store.resolve, spec.image)
    if layout is not None:
        return await load(layout), True
    if spec.image.startswith(("/", ".", "~")):
        raise SpecError(f"image={spec.image!r} is no folder with an OCI layout.")
    return spec.image, False


async def load(layout: Path) -> str:
    """Make the image of a layout known to the SDK; its name there."""
    image = await asyncio.to_thread(image_store.load, layout)
    name = f"{_PREFIX}/{image.digest.partition(':')[2][:32]}:latest"
    if await _known(name):
        return name
    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as folder:
        archive = os.path.join(folder, "image.tar")
        try:
            async with _alone():
                if not await _known(name):
                    await asyncio.to_thread(_pack, layout, archive)
                    await asyncio.wait_for(sdk.Image.load(archive, tag=name), _LOAD_TIMEOUT)
        except SandboxTimeout:
            raise
        except (sdk.MicrosandboxError, asyncio.TimeoutError) as error:
            raise SandboxError(
                f"The image in {layout} could not be loaded by microsandbox: "
                f"{error or f'it took more than {_LOAD_TIMEOUT:g} s'}"
            ) from error
    return name


async def _known(name: str) -> bool:
    try:
        await sdk.Image.get(name)
    except sdk.ImageNotFoundError:
        return False
    return True


@contextlib.asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """Loading takes long and is done by one process at a time."""
    path = private_dir(data_dir() / "microsandbox") / "load.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        async for _ in attempts(_LOAD_TIMEOUT, first=_POLL, most=_POLL):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        else:
            raise SandboxTimeout(
                f"Another process has been loading an image for {_LOAD_TIMEOUT:g} s."
            )
        yield
    finally:
        os.close(fd)


def _pack(layout: Path, archive: str) -> None:
    with tarfile.open(archive, "w") as tar:
        for name in ("oci-layout", "index.json", "blobs"):
            tar.add(layout / name, arcname=name)
