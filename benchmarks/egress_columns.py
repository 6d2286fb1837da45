"""The ways to a server that ``python -m benchmarks egress`` compares, and the servers."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import trustme

from benchmarks import proxies
from benchmarks.columns import COLUMNS
from benchmarks.livekernel import LiveKernel
from sandbox_kernel.gateway import addresses
from sandbox_kernel.gateway.names import Address, Target
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.egress_environment import PROXY_PORT
from sandbox_kernel.tunnel import background

HOST, READ_HOST = "bench.test", "read.test"
"""What the sandbox calls the servers: one without and one with TLS, whose requests are read."""
LIMIT = 300.0
UPLOAD = "upload.bin"
"""A file in each column's folder."""

Run = Callable[[Sequence[str]], str]
"""Runs a command to its end, and gives its output."""


@dataclass(frozen=True)
class Column:
    """A way to the server."""

    name: str
    run: Run
    proxy: str
    """The proxy's URL; empty: none."""
    hosts: Mapping[str, str]
    """Way -> the server's name. A way without one is none of this column's."""
    pid: int | str | None
    """The proxy's process, if its memory is measured."""


OPAQUE, HTTP, BY_NAME, TLS = "opaque", "http", "by name", "tls"
"""Ways to a server: by CONNECT, without anybody who reads what passes; requests of plain HTTP to a
proxy; without a proxy, in the sandbox; requests inside TLS, which the proxy ends and reads."""


@contextlib.contextmanager
def origin(*certificate: str) -> Iterator[int]:
    """A web server; its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.origin", *certificate],
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def certificate(folder: Path) -> tuple[str, str]:
    """A certificate and its key for the server with TLS, which this process trusts from now on."""
    authority = trustme.CA()
    made = authority.issue_cert(READ_HOST, proxies.READ_HOST)
    chain, key, trusted = (str(folder / name) for name in ("chain.pem", "key.pem", "trusted.pem"))
    for number, part in enumerate(made.cert_chain_pems):
        part.write_to_path(chain, append=number > 0)
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(trusted)
    os.environ["SSL_CERT_FILE"] = trusted
    return chain, key


@contextlib.contextmanager
def standing_for_names() -> Iterator[None]:
    """Names that end with .test are this machine's, for gateways of this process."""
    may_dial = addresses.may_dial

    async def resolve(name: str, port: int) -> Sequence[Address]:
        return [ipaddress.ip_address("127.0.0.1")]

    def may(address: Address, target: Target, *rest: Any) -> str | None:
        return None if target.host.endswith(".test") else may_dial(address, target, *rest)

    with (
        mock.patch.object(addresses, "SystemResolver", return_value=resolve),
        mock.patch.object(addresses, "may_dial", may),
    ):
        yield


@contextlib.contextmanager
def kernel_with_egress(rules: Sequence[Mapping[str, object]]) -> Iterator[LiveKernel]:
    with mock.patch.dict(os.environ, SANDBOX_KERNEL_EGRESS=json.dumps(rules)):
        live, _ = LiveKernel.start(COLUMNS["sandbox"])
    try:
        yield live
    finally:
        live.discard()


def sandbox_column(live: LiveKernel, size: int, *, reads_tls: bool) -> Column:
    found = live.manager.provisioner.kernel  # type: ignore[union-attr]
    assert isinstance(found, SandboxedKernel)
    handle = found.handle

    def run(command: Sequence[str]) -> str:
        name, *arguments = command
        result = background.submit(handle.exec(name, arguments, timeout=LIMIT)).result(LIMIT + 5)
        if not result.ok:
            raise RuntimeError(result.output.strip())
        return result.output

    run(["truncate", "-s", str(size), UPLOAD])
    proxy = f"http://127.0.0.1:{PROXY_PORT}"
    hosts = {OPAQUE: HOST, HTTP: HOST, BY_NAME: HOST}
    if reads_tls:
        hosts[TLS] = READ_HOST
    return Column("sandbox", run, proxy, hosts, "self")


def host_column(name: str, folder: Path, proxy: proxies.Proxy | None) -> Column:
    def run(command: Sequence[str]) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return done.stdout

    url, pid = (proxy.url, proxy.pid) if proxy else ("", None)
    hosts = {OPAQUE: proxies.OPAQUE_HOST, HTTP: proxies.READ_HOST}
    if name != "tinyproxy":
        hosts[TLS] = proxies.READ_HOST
    return Column(name, run, url, hosts, pid)
