"""Running a command in a sandbox as another user of it.

``sudo`` is missing in most images and in the local jail, so the sandbox's own shell looks for a
way. Where there is none (a jail has one user only), the command fails with a sentence that says so.
"""

from __future__ import annotations

from collections.abc import Sequence

CANNOT_SWITCH = 126
"""Exit code of a command for whose user there is no way."""

_SCRIPT = """
user=$1; shift
own=$(id -u)
if [ "$user" = "$own" ] || [ "$user" = "$(id -un 2>/dev/null)" ]; then exec "$@"; fi
if ! id -u "$user" >/dev/null 2>&1; then why="it has no such user"
elif [ "$own" = 0 ] && command -v setpriv >/dev/null 2>&1 &&
  setpriv --reuid "$user" --regid "$user" --init-groups true 2>/dev/null
then exec setpriv --reuid "$user" --regid "$user" --init-groups "$@"
elif [ "$own" = 0 ] && su -s /bin/sh "$user" -c true >/dev/null 2>&1
then exec su -s /bin/sh "$user" -c 'exec "$0" "$@"' -- "$@"
elif command -v sudo >/dev/null 2>&1 && sudo -n -u "$user" true 2>/dev/null
then exec sudo -n -u "$user" -- "$@"
else why="user $(id -un 2>/dev/null || echo "$own") may not become another one in it"
fi
echo "This sandbox cannot run commands as user $user: $why. Leave user out, or choose an image\
 and a backend whose sandboxes have that user." >&2
exit 126
"""


def as_user(argv: Sequence[str], user: str | None) -> list[str]:
    """The command line that runs ``argv`` as a user of the sandbox; itself without one."""
    return ["/bin/sh", "-c", _SCRIPT, "as-user", user, *argv] if user else list(argv)
