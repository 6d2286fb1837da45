"""What images are built from in these tests: tiny root file systems, wheels, archives."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import tarfile
import zipfile
from pathlib import Path

X86_64, AARCH64 = 62, 183


def elf(machine: int = X86_64, *, bits: int = 64) -> bytes:
    """The beginning of a Linux program."""
    start = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1, 1]) + bytes(9)
    return start + struct.pack("<HH", 3, machine) + bytes(200)


def make_rootfs(
    root: Path,
    *,
    python: str = "usr/bin/python3.11",
    machine: int = X86_64,
    libc: str = "glibc",
    debian: bool = True,
    ipykernel: bool = False,
) -> Path:
    """The files by which an image's Python is known, and a few others."""
    files: dict[str, bytes] = {
        python: elf(machine),
        "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nann:x:1001:1002::/home/ann:/bin/sh\n",
        "usr/lib/python3.11/os.py": b"# os\n",
    }
    if libc == "glibc":
        files["usr/lib/x86_64-linux-gnu/libc.so.6"] = (
            b"\0GNU C Library stable release version 2.36.\0"
        )
    elif libc == "musl":
        files["lib/ld-musl-x86_64.so.1"] = b"\0" * 50 + b"\x001.2.4\0" + b"musl libc\0"
    packages = "usr/lib/python3/dist-packages" if debian else "usr/lib/python3.11/site-packages"
    files[f"{packages}/README"] = b"packages\n"
    if ipykernel:
        files[f"{packages}/ipykernel/__init__.py"] = b""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / python).chmod(0o755)
    link = (root / python).with_name("python3")
    if not link.exists():
        link.symlink_to(Path(python).name)
    return root


def make_wheel(
    folder: Path, name: str, version: str = "1.0", *, tag: str = "py3-none-any", requires: str = ""
) -> Path:
    """A real wheel of one module, with a program of the same name."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": f"version = {version!r}\ndef main(): print(version)\n",
        f"{name}_launcher.py": f"from {name} import main\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}={name}:main\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text)}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.mode = kind, link, size, 0o755
    return made


def make_tar(*entries: tarfile.TarInfo) -> bytes:
    """An archive of these entries; files are full of zeros."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for one in entries:
            archive.addfile(one, io.BytesIO(bytes(one.size)) if one.isreg() else None)
    return packed.getvalue()
