"""File systems that this host has mounted below a folder: a jail that is shown the folder would see
them, too, whatever they show. Nothing is mounted or changed here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.sandboxes.local.hidden_paths import contains, private_places

_OF_THE_KERNEL = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
        *("devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore"),
        *("rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"),
    )
)


@dataclass(frozen=True)
class _Mounted:
    device: str
    root: str
    """Which folder of that device is seen."""
    point: str
    kind: str


def never_shown(top: str) -> set[str]:
    """The mount points below a folder that show the kernel's own files, or a place that is never
    shown under its own name either, such as the home folder."""
    mounts = _mounts()
    below = [mount for mount in mounts if mount.point != top and contains(top, mount.point)]
    if not below:
        return set()
    private = [_place(mounts, path) for path in private_places()]
    own = [_place(mounts, str(path)) for path in (data_dir(), runtime_dir())]
    return {
        mount.point
        for mount in below
        if mount.kind in _OF_THE_KERNEL
        or any(device == mount.device and contains(mount.root, path) for device, path in private)
        or any(device == mount.device and contains(path, mount.root) for device, path in own)
    }


def _mounts() -> list[_Mounted]:
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as lines:
        return [_parsed(line) for line in lines]


def _parsed(line: str) -> _Mounted:
    before, _, after = line.partition(" - ")
    fields = before.split(" ")
    return _Mounted(fields[2], _plain(fields[3]), _plain(fields[4]), after.split(" ")[0])


def _plain(text: str) -> str:
    for escaped, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escaped, char)
    return text


def _place(mounts: list[_Mounted], path: str) -> tuple[str, str]:
    """The device that a path is on, and its path there."""
    real = os.path.realpath(path)
    mount = max((m for m in mounts if contains(m.point, real)), key=lambda m: len(m.point))
    inside = os.path.relpath(real, mount.point)
    return mount.device, os.path.normpath(os.path.join(mount.root, inside))
