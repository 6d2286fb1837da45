"""Fills the image caches of the microVM backends: ``python -m tests.microvm.seed IMAGE...``.

Unpacking an image takes minutes in the rig and seconds outside. Outside, where the rig is needed,
no VM boots; but a backend that tries has unpacked the image by then.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background

from .__main__ import BACKENDS, SPEC

TIMEOUT = 300.0


async def seed(images: Sequence[str]) -> None:
    for backend in BACKENDS:
        client = load_backend(backend)
        for image in images:
            spec = SandboxSpec.from_mapping({**SPEC, "image": image, "start_timeout": TIMEOUT})
            try:
                await client.create(spec)
            except SandboxError as error:
                print(f"{backend}, {image}: {error}")  # what is in the cache decides, not this
            else:
                await client.remove(spec.name)
        await client.close()


if __name__ == "__main__":
    background.submit(asyncio.wait_for(seed(sys.argv[1:]), 4 * TIMEOUT)).result()
