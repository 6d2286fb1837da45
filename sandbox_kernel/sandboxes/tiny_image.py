"""The smallest image that a microVM can run: one program of our own that exits, or waits.

The boot check of ``doctor`` uses it, so that finding out whether VMs work here needs no network
and no image of the user's. The same bytes come out each time.
"""

from __future__ import annotations

import os
import platform
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.images.layers import Entry, made_file, made_folder
from sandbox_kernel.images.oci import Layout
from sandbox_kernel.images.target import OCI_ARCHITECTURES

_BASE = 0x400000
_HEADERS = 64 + 56

# exit(0) if there are no arguments; else wait for ever, so that it can be a VM's main program.
_X86_64 = bytes.fromhex(
    "48833c2401"  # cmp qword [rsp], 1      (argc)
    "7509"  # jne wait
    "b83c000000"  # mov eax, 60             (exit)
    "31ff"  # xor edi, edi
    "0f05"  # syscall
    "b822000000"  # wait: mov eax, 34       (pause)
    "0f05"  # syscall
    "ebf7"  # jmp wait
)
_AARCH64 = struct.pack(
    "<13I",
    0xF94003E0,  # ldr x0, [sp]             (argc)
    0xF100041F,  # cmp x0, #1
    0x54000081,  # b.ne wait
    0xD2800000,  # mov x0, #0
    0xD2800BA8,  # mov x8, #93              (exit)
    0xD4000001,  # svc #0
    0xD2800000,  # wait: mov x0, #0
    0xD2800001,  # mov x1, #0
    0xD2800002,  # mov x2, #0
    0xD2800003,  # mov x3, #0
    0xD2800928,  # mov x8, #73              (ppoll)
    0xD4000001,  # svc #0
    0x17FFFFFA,  # b wait
)
_MACHINES = {"x86_64": (62, _X86_64), "aarch64": (183, _AARCH64)}

WAIT = ("/bin/true", "wait")
"""The image's own command: it never ends."""


def tiny_layout(folder: Path, machine: str | None = None) -> Path:
    """Make an OCI layout in ``folder`` with ``/bin/true`` in it, unless it is there already.

    ``/bin/true`` exits at once when called without arguments. Raises SandboxUnavailable on a
    machine for which there is no such program.
    """
    if (folder / "index.json").is_file():
        return folder
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxUnavailable(
            f"MicroVMs run on {' and '.join(sorted(_MACHINES))} machines; this one is {machine!r}."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        layout = Layout.create(Path(temporary) / "layout")
        layer = layout.add_layer(_files(_elf(*_MACHINES[machine])))
        config = {
            "architecture": OCI_ARCHITECTURES[machine],
            "os": "linux",
            "config": {"Cmd": list(WAIT), "WorkingDir": "/", "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
        }
        layout.write_image(config, [], [layer], "tiny", {})
        try:
            os.rename(layout.path, folder)
        except OSError:
            if not (folder / "index.json").is_file():  # else another process was faster
                raise
    return folder


def _elf(machine: int, code: bytes) -> bytes:
    size = _HEADERS + len(code)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 2, machine, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + code


def _files(program: bytes) -> Iterator[Entry]:
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
        yield made_folder(name)
    yield made_file("bin/true", program, mode=0o755)
    yield made_file("etc/passwd", b"root:x:0:0:root:/root:/bin/true\n")
    yield made_file("etc/group", b"root:x:0:\n")
