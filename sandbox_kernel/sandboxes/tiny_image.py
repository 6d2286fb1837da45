"""The smallest image that a microVM can run: one program of our own that exits, or waits.

The boot check of ``doctor`` uses it, so that finding out whether VMs work here needs no network
and no image of the user's. The same bytes come out each time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import struct
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxUnavailable

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
_MACHINES = {"x86_64": (62, "amd64", _X86_64), "aarch64": (183, "arm64", _AARCH64)}

WAIT = ("/bin/true", "wait")
"""The image's own command: it never ends."""


def tiny_layout(folder: Path, machine: str | None = None) -> Path:
    """Make an OCI layout in ``folder`` with ``/bin/true`` in it, unless it is there already.

    ``/bin/true`` exits at once when called without arguments. Raises SandboxUnavailable on a
    machine for which there is no such program.
    """
    if (folder / "index.json").is_file():
        return folder
    elf_machine, architecture, code = _known(machine or platform.machine())
    layer = _layer(_elf(elf_machine, code))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / "layout"
        _write(made, architecture, layer)
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "index.json").is_file():  # else another process was faster
                raise
    return folder


def _known(machine: str) -> tuple[int, str, bytes]:
    try:
        return _MACHINES[machine]
    except KeyError:
        raise SandboxUnavailable(
            f"MicroVMs run on {' and '.join(sorted(_MACHINES))} machines; this one is {machine!r}."
        ) from None


def _elf(machine: int, code: bytes) -> bytes:
    size = _HEADERS + len(code)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 2, machine, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + code


def _layer(program: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, mode, content in (
            ("bin/true", 0o755, program),
            ("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/true\n"),
            ("etc/group", 0o644, b"root:x:0:\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = mode, len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _write(folder: Path, architecture: str, layer: bytes) -> None:
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, kind: str, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        media_type = f"application/vnd.oci.image.{kind}"
        return {
            "mediaType": media_type,
            "digest": f"sha256:{digest}",
            "size": len(content),
            **more,
        }

    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Cmd": list(WAIT), "WorkingDir": "/", "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(_json(config), "config.v1+json"),
        "layers": [blob(gzip.compress(layer, mtime=0), "layer.v1.tar+gzip")],
    }
    platform_ = {"architecture": architecture, "os": "linux"}
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [blob(_json(manifest), "manifest.v1+json", platform=platform_)],
    }
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    (folder / "index.json").write_bytes(_json(index))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
