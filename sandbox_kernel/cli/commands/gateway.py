"""``sandbox-kernel gateway``: the egress gateway by itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SandboxError

if TYPE_CHECKING:
    from sandbox_kernel.gateway.gateway import Gateway

_LOOK_EVERY = 1.0
_DEFAULT = "127.0.0.1"


def add(commands: Commands) -> None:
    parser = add_command(commands, "gateway", run)
    parser.add_argument("--policy", required=True, metavar="FILE", help="the rules")
    about = f"where to listen (default: {_DEFAULT}, and a port that is free)"
    parser.add_argument("--listen", default=_DEFAULT, metavar="ADDRESS[:PORT]", help=about)
    about = "write the certificate of an authority there, and read encrypted requests where a rule "
    about += "is about requests; the clients must trust it (needs the extra 'gateway')"
    parser.add_argument("--ca", metavar="FILE", help=about)
    parser.add_argument("--audit", metavar="FILE", help="append each decision, as lines of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the egress gateway by itself: a proxy that lets out what a policy allows.

    HTTP proxy (CONNECT included) and SOCKS5 (socks5h://) on one port, which is printed. It
    serves until Ctrl-C. The policy is JSON, or one rule a line with # for comments. It is read
    again when the file changes, and on SIGHUP; a file that cannot be read or understood then
    denies everything.

    examples:
      sandbox-kernel gateway --policy rules.txt --listen 127.0.0.1:3128
      sandbox-kernel gateway --policy rules.json --audit egress.jsonl
      sandbox-kernel gateway --policy rules.json --ca authority.pem
    """
    host, port = _listen_address(arguments)
    reload = asyncio.Event()

    def on_signal(signum: int) -> bool:
        if signum != signal.SIGHUP:
            return False
        reload.set()
        return True

    serving = _serve(arguments, host, port, reload)
    try:
        return foreground.run(serving, on_signal=on_signal)
    except foreground.Interrupted as interrupted:
        if interrupted.exit_code == 128 + signal.SIGINT:
            return 0  # the usual end
        raise


def _listen_address(arguments: argparse.Namespace) -> tuple[str, int]:
    from sandbox_kernel.gateway.names import NameRefused, read_authority  # lazy: start-up time

    try:
        address = ipaddress.ip_address(arguments.listen)
    except ValueError:
        try:
            target = read_authority(arguments.listen.removesuffix(":0"), 1)
        except NameRefused as error:
            arguments.parser.error(f"--listen takes ADDRESS[:PORT]: {error}")
        return target.host, target.port if target.port != 1 else 0
    return str(address), 0


async def _serve(arguments: argparse.Namespace, host: str, port: int, reload: asyncio.Event) -> int:
    from sandbox_kernel.gateway.audit import AuditLog
    from sandbox_kernel.gateway.gate import Gate
    from sandbox_kernel.gateway.gateway import Gateway
    from sandbox_kernel.gateway.policy_file import WatchedPolicy, read_policy_file
    from sandbox_kernel.gateway.presets import expand

    found = await asyncio.to_thread(expand, read_policy_file(arguments.policy))
    gate = Gate(found.policy)
    audit = AuditLog(arguments.audit) if arguments.audit else None
    if audit is not None:
        with _usable("--audit", arguments.audit, "written"):
            audit.check()
    gateway = Gateway(gate, audit=audit or (lambda event: None), private_names=found.private_names)
    if arguments.ca:
        await asyncio.to_thread(_end_tls, gateway, arguments.ca)

    def use(policy: EgressPolicy) -> None:
        expansion = expand(policy)
        gateway.private_names = expansion.private_names
        gate.set_policy(expansion.policy)

    watched = WatchedPolicy(arguments.policy, use, note)
    with _usable("--listen", arguments.listen, "used"):
        server = await asyncio.start_server(gateway.serve, host, port)
    async with server:
        address = server.sockets[0].getsockname()
        if not ipaddress.ip_address(address[0]).is_loopback:
            note(f"Everybody who reaches {address[0]} can use this proxy.")
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        print(f"{shown}:{address[1]}", flush=True)
        try:
            while True:
                asked = await _asked_within(reload, _LOOK_EVERY)
                watched.reload() if asked else watched.check()
        finally:
            gateway.close()


def _end_tls(gateway: Gateway, file: str) -> None:
    from sandbox_kernel.gateway.tls import extra

    if not extra.installed():
        raise SandboxError(f"--ca: {extra.MISSING}")
    from sandbox_kernel.gateway.tls.authority import Authority

    authority = Authority("this machine")
    with _usable("--ca", file, "written"):
        write_atomically(Path(file), authority.certificate.decode(), lasting=False)
    gateway.end_tls(authority)


@contextlib.contextmanager
def _usable(option: str, value: str, how: str) -> Iterator[None]:
    """SandboxError, which names the option, instead of OSError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise SandboxError(f"{option}: {value} cannot be {how}: {why}.") from None


async def _asked_within(reload: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(reload.wait(), seconds)
    except TimeoutError:
        return False
    reload.clear()
    return True
