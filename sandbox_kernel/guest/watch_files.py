"""Which files of a folder have changed, for ``agents/changed_files.py``. Runs in the sandbox, as
the text of a ``-c``, in the folder that it watches.

For each line on stdin it looks at the folder, and answers with one line of JSON: what has changed
since the last look, ``{"changes": [[path, kind, size], ...], "more": N, "unseen": bool}``. The
first look finds no changes. ``unseen``: there are more than MOST files, of which it keeps no track.
It ends with its input.
"""

import contextlib
import json
import os
import sys
from typing import Dict, List, Optional, Tuple

MOST = 20_000
MOST_CHANGES = 200
_MOST_DEPTH = 32
_LEFT_OUT = frozenset(["__pycache__", "node_modules", "site-packages"])
Seen = Dict[str, Tuple[int, ...]]


class TooMany(Exception):
    """The folder has more than MOST files."""


def look(top: str = ".") -> Seen:
    """Size, inode and times of each file, but for hidden ones and caches. TooMany."""
    seen: Seen = {}
    waiting = [(top, "", 0)]
    while waiting:
        folder, prefix, depth = waiting.pop()
        try:
            entries = os.scandir(folder)
        except OSError:
            continue  # deleted just now, or not ours to read
        with entries:
            for entry in entries:
                name = entry.name
                if name[0] == "." or name in _LEFT_OUT:
                    continue
                path = prefix + name
                if entry.is_dir(follow_symlinks=False):
                    if depth < _MOST_DEPTH:
                        waiting.append((entry.path, path + "/", depth + 1))
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                times = status.st_mtime_ns, status.st_ctime_ns
                seen[path] = (status.st_size, status.st_ino, *times)
                if len(seen) > MOST:
                    raise TooMany
    return seen


def difference(before: Seen, after: Seen) -> "List[Tuple[str, str, int]]":
    """Path, kind of change and size of what differs, by path."""
    changes = [
        (path, "changed" if path in before else "created", facts[0])
        for path, facts in after.items()
        if before.get(path) != facts
    ]
    changes += [(path, "deleted", 0) for path in before if path not in after]
    return sorted(changes)


def main() -> int:
    before: Optional[Seen] = None
    for _ in sys.stdin.buffer:
        after: Optional[Seen] = None
        with contextlib.suppress(TooMany):
            after = look()
        known = before is not None and after is not None
        changes = difference(before or {}, after or {}) if known else []
        answer = {
            "changes": changes[:MOST_CHANGES],
            "more": max(0, len(changes) - MOST_CHANGES),
            "unseen": after is None,
        }
        before = after
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
