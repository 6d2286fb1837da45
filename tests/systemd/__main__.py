"""Boots a machine with systemd and cgroup v2, and tries in it what an ordinary user, a service and
root get there (``inside.py``).

    python -m tests.systemd

The machine is User-Mode Linux, a kernel that is a plain process: no KVM, and some two minutes. It
comes from Debian's package, which is fetched and not installed. Its root is the host's, read-only.
(A systemd that was started on the host itself would take the host's processes into its own
cgroups.) Needs root, and systemd and dbus installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
LIMIT = 600.0
DONE = "all is well"

INIT = """#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin; export PATH
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run; mount -t tmpfs tmpfs /tmp
mkdir -p /dev/shm /dev/pts; mount -t tmpfs tmpfs /dev/shm; mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=755 tmpfs /var/lib/systemd
mkdir -p /tmp/etc /tmp/plain /run/user /run/dbus /run/systemd/system/user@1234.service.d
cp -a /etc/. /tmp/etc/; mount --bind /tmp/etc /etc
rm -f /etc/fstab /etc/systemd/system/*.wants/*
echo 0123456789abcdef0123456789abcdef > /etc/machine-id
echo 'plain:x:1234:1234::/tmp/plain:/bin/sh' >> /etc/passwd; echo 'plain:x:1234:' >> /etc/group
chown 1234:1234 /tmp/plain
cd /run/systemd/system
cat > user-runtime-dir@.service <<END
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/install -d -m 700 -o 1234 -g 1234 /run/user/1234
END
cat > user@1234.service.d/own.conf <<END
[Unit]
DefaultDependencies=no
[Service]
PAMName=
Environment=XDG_RUNTIME_DIR=/run/user/1234 HOME=/tmp/plain
END
cat > try.service <<END
[Unit]
Wants=user@1234.service dbus.service
After=user@1234.service dbus.service
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/bin/sh FOLDER/try.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
TimeoutStartSec=infinity
END
cat > try.target <<END
[Unit]
Wants=dbus.socket try.service
DefaultDependencies=no
END
for name in udevd udev-trigger tmpfiles-setup tmpfiles-setup-dev sysusers remount-fs update-utmp \\
  modules-load journal-flush; do ln -s /dev/null systemd-$name.service; done
exec /usr/lib/systemd/systemd --unit=try.target --log-target=null --show-status=0
"""

TRY = """
export PYTHONPATH=PROJECT:PACKAGES HOME=/tmp/root PATH=/usr/bin:/bin
cd /
as_user() {
  XDG_RUNTIME_DIR=/run/user/1234 HOME=/tmp/plain \\
    setpriv --reuid=1234 --regid=1234 --clear-groups "$@"
}
inside() { echo /usr/bin/python3 -m tests.systemd.inside "$@"; }
(
  set -e  # which "( ... ) && ..." would make nothing of
  # As after a login by ssh, which is not in the manager's part of the tree.
  systemd-run --quiet --scope --slice=user-1234.slice --unit=session-1 \\
    setpriv --reuid=1234 --regid=1234 --clear-groups \\
    env XDG_RUNTIME_DIR=/run/user/1234 HOME=/tmp/plain $(inside /user@1234.service/)
  as_user systemd-run --user --quiet --wait --pipe -p Environment=PYTHONPATH=$PYTHONPATH \\
    $(inside /user@1234.service/)
  $(inside /system.slice/)
  as_user $(inside none)
  mkdir -p /var/lib/systemd/linger; touch /var/lib/systemd/linger/plain
  as_user $(inside /user@1234.service/)
  test -z "$(find /sys/fs/cgroup -name 'sandbox-kernel*')"
) 2>&1
test $? = 0 && echo DONE
echo o > /proc/sysrq-trigger
"""


def fetch(folder: Path) -> Path:
    """The kernel, from Debian's package."""
    subprocess.run(["apt-get", "-qq", "download", "user-mode-linux"], cwd=folder, check=True)
    [package] = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder / "usr" / "bin" / "linux.uml"


def main() -> int:
    if os.getuid() != 0 or not shutil.which("systemd-run") or not shutil.which("apt-get"):
        sys.exit("This takes root on a Debian with systemd.")
    # Not below /tmp, which the machine has one of its own of.
    with tempfile.TemporaryDirectory(prefix="systemd-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        kernel = fetch(folder)
        words = {
            "FOLDER": name,
            "PROJECT": str(PROJECT),
            "PACKAGES": sysconfig.get_path("purelib"),
            "DONE": DONE,
        }
        for file, text in (("init.sh", INIT), ("try.sh", TRY)):
            for word, value in words.items():
                text = text.replace(word, value)
            (folder / file).write_text(text)
            (folder / file).chmod(0o755)
        machine = [
            str(kernel),
            "mem=1500M",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
        ]
        machine += [f"init={folder}/init.sh", "con=null", "con0=null,fd:1", "ssl=null", "quiet"]
        ran = subprocess.run(
            machine,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": "/dev/shm"},
            timeout=LIMIT,
            check=False,
        )
    output = ran.stdout.decode(errors="replace")
    print(output)
    return 0 if DONE in output else 1


if __name__ == "__main__":
    sys.exit(main())
