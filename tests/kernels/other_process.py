"""A kernel that another process has started, and how to take it over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.provisioning import KernelProvisionerFactory
from jupyter_client.utils import run_sync

from .conftest import KernelStarter
from .live import PATIENCE, Live

START = """
import json, sys, time
from jupyter_client import KernelManager
from jupyter_client.utils import run_sync
km = KernelManager(kernel_name="sandbox")
km.start_kernel()
kc = km.client()
kc.start_channels()
kc.wait_for_ready(90)
kc.execute_interactive("x = 41; open('kept.txt', 'w').write('kept')", output_hook=lambda m: None)
print(json.dumps(run_sync(km.provisioner.get_provisioner_info)()), flush=True)
"""


@contextlib.contextmanager
def other_process(code: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that has started a kernel, and what it saved about it."""
    process = subprocess.Popen(
        [sys.executable, "-c", START + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def attach(starter: KernelStarter, info: dict[str, Any]) -> Live:
    """Take a kernel over, as a restarted server does."""
    manager = KernelManager(kernel_name="sandbox")
    provisioner = KernelProvisionerFactory.instance().create_provisioner_instance(
        info["kernel_id"], manager.kernel_spec, parent=manager
    )
    run_sync(provisioner.load_provisioner_info)(info)
    manager.provisioner = provisioner
    manager._launch_args, manager._attempted_start = {}, True
    manager.load_connection_info(info["connection_info"])
    live = Live(manager, manager.client())
    starter.started.append(live)
    live.client.start_channels()
    live.client.wait_for_ready(timeout=PATIENCE)
    return live


def forget_endpoints(folder: Path) -> None:
    """A process that was killed leaves the folder of its sockets."""
    for left in (folder / "run").glob("c-*"):
        shutil.rmtree(left)
