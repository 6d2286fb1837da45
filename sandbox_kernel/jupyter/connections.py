"""Connection files: where clients connect on this machine, and what the kernel must know of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.jupyter.jupyter_internals import wants_encryption
from sandbox_kernel.paths import runtime_dir
from sandbox_kernel.tunnel.endpoints import PRIORITY, Address

_FOLDERS = "c-"
_UNUSED_AFTER = 60.0
_MAX_FILE = 2**20


def set_up_manager(manager: Any, encryption: Any) -> str | None:
    """Give a kernel manager CurveZMQ keys, if its policy asks for them, and IPC sockets. Their
    folder; None if the user has named TCP ports."""
    if wants_encryption(manager, encryption) and manager.curve_publickey is None:
        manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()
    ports = [getattr(manager, f"{channel}_port") for channel in PRIORITY]
    if manager.transport != "tcp" or any(ports):
        return None
    folder = endpoint_folder()
    manager.transport = "ipc"
    manager.ip = os.path.join(folder, "c")
    return folder


def endpoint_folder() -> str:
    """A name for the folder of a new kernel's local sockets; ``listen`` makes the folder.

    Deletes folders that dead processes left: old ones where nobody listens.
    """
    for folder in runtime_dir().glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):  # another process deletes it just now
            old = time.time() - folder.stat().st_mtime > _UNUSED_AFTER
            if old and not any(_trouble_at(str(path)) for path in folder.iterdir()):
                shutil.rmtree(folder)
    return str(runtime_dir() / f"{_FOLDERS}{secrets.token_hex(6)}")


def addresses(connection: Mapping[str, Any]) -> dict[str, Address]:
    """Channel -> local address, as a connection file gives them."""
    ip = str(connection["ip"])
    found: dict[str, Address] = {}
    for channel in PRIORITY:
        port = int(connection[f"{channel}_port"])
        found[channel] = (ip, port) if connection["transport"] == "tcp" else f"{ip}-{port}"
    return found


def guest_connection(connection: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a connection file that the kernel in the sandbox must have, too."""
    keep = ("key", "signature_scheme", "kernel_name", "curve_publickey", "curve_secretkey")
    values = {key: connection[key] for key in keep if connection.get(key) is not None}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def read_connection_file(path: str) -> dict[str, Any]:
    """The connection that a client wrote to a file. SpecError if it cannot be used."""
    refused = f"The connection file {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise SpecError(f"{refused} cannot be read: {error.strerror}.") from None
    if len(data) > _MAX_FILE:
        raise SpecError(f"{refused} is larger than {_MAX_FILE} bytes, so it is none.")
    try:
        connection = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{refused} is not JSON: {error}.") from None
    if not isinstance(connection, dict):
        raise SpecError(f"{refused} does not hold a JSON object.")
    connection = {"transport": "tcp", "ip": "127.0.0.1", **connection}
    if connection["transport"] not in ("tcp", "ipc"):
        transport = connection["transport"]
        raise SpecError(f"{refused} has the transport {transport!r}; known are tcp and ipc.")
    for key in ("ip", "key", "signature_scheme"):
        if not isinstance(connection.get(key, ""), str):
            raise SpecError(f"{refused} has {key}={connection[key]!r}, which is no string.")
    for channel in PRIORITY:
        port = connection.get(f"{channel}_port")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise SpecError(
                f"{refused} has {channel}_port={port!r}. A port from 1 to 65535 is needed for "
                f"each channel; let the Jupyter client write the file."
            )
    if connection["transport"] == "tcp" and connection["ip"] == "*":
        connection["ip"] = "0.0.0.0"  # noqa: S104  (the client's choice, in ZeroMQ's words)
    return connection


def check_free(addresses: Mapping[str, Address]) -> None:
    """SandboxError if another process listens at one of these addresses. To be called before a
    sandbox is made; ``listen`` would take a Unix socket from its owner."""
    for channel, address in addresses.items():
        why = _trouble_at(address)
        if not why:
            continue
        shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise SandboxError(
            f"The kernel's {channel} endpoint {shown} cannot be used: {why}. End the kernel that "
            f"has this connection file, or let the client choose another one."
        )


def _trouble_at(address: Address) -> str:
    """Why we cannot listen at an address; empty if nobody is there."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
        try:
            if isinstance(address, str):
                probe.settimeout(1.0)
                probe.connect(address)
                return "another process listens there"
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        except OSError as error:
            return error.strerror or str(error)
    return ""
