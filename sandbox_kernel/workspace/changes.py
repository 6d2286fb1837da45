"""What differs between two trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sandbox_kernel.workspace.reports import Change
from sandbox_kernel.workspace.trees import entries_of


def changes(
    read: Callable[[bytes], bytes], old: bytes, new: bytes, prefix: str
) -> Iterator[Change]:
    """What changed from one tree to another (empty: none), by path."""
    if old == new:
        return
    before = {entry.name: entry for entry in entries_of(read, old)} if old else {}
    after = {entry.name: entry for entry in entries_of(read, new)} if new else {}
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        path = prefix + name
        inner_old = was.tree if was is not None and was.kind == "d" else b""
        inner_new = now.tree if now is not None and now.kind == "d" else b""
        slash = "/" if inner_old or inner_new else ""
        if was is None or now is None or was.kind != now.kind:
            if was is not None:
                yield Change("removed", path + ("/" if inner_old else ""), was.size, 0)
            if now is not None:
                yield Change("added", path + ("/" if inner_new else ""), 0, now.size)
        elif slash:
            if was.mode != now.mode:
                yield Change("meta", path + "/")
        else:
            same = (was.chunks, was.target, was.size) == (now.chunks, now.target, now.size)
            yield Change("meta" if same else "changed", path, was.size, now.size)
        yield from changes(read, inner_old, inner_new, path + "/")
