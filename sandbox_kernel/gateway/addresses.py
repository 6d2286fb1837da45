"""Which addresses may be dialled, whatever a name said.

A name is resolved once; every address is checked, and exactly those that passed are dialled. So a
name cannot mean one host when it is checked and another when it is dialled (rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from sandbox_kernel.egress import EgressRule
from sandbox_kernel.gateway.names import Address, Target
from sandbox_kernel.gateway.refusals import Refusal

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]
"""Gives the addresses of a name, for a port. OSError if it has none."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

RESOLVE_TIMEOUT = 10.0
CONNECT_TIMEOUT = 20.0
READ_LIMIT = 256 * 1024
"""What a connection's reader keeps before it stops reading; also the size of large reads."""
_MOST_ADDRESSES = 8
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
_RESOLVERS = 8
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 6}
"""Seconds without data until the first question, seconds between questions, and how many."""

LOOPBACK, OWN, METADATA, PRIVATE = "loopback", "this machine's own", "metadata", "private"
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Where providers of machines answer with credentials. One is in a public range.
    (METADATA, ("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200")),
    (METADATA, ("192.0.0.192", "168.63.129.16", "fd00:ec2::/32", "fd20:ce::254")),
    (LOOPBACK, ("127.0.0.0/8", "::1")),
    (PRIVATE, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")),
    (PRIVATE, ("64:ff9b:1::/48",)),
    ("link-local", ("169.254.0.0/16", "fe80::/10")),
    ("shared", ("100.64.0.0/10",)),
    ("unspecified", ("0.0.0.0/8", "::")),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("broadcast", ("255.255.255.255",)),
    ("benchmarking", ("198.18.0.0/15", "2001:2::/48")),
    ("documentation", ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")),
    ("documentation", ("2001:db8::/32", "3fff::/20")),
    ("reserved", ("192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4", "2001::/23", "5f00::/16")),
)
_TRUSTED_KINDS = (PRIVATE, "shared", "benchmarking", "documentation")
"""What names that the host's owner has configured may resolve to."""
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LAST_32_BITS = tuple(
    map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", str(_NAT64)))
)


@functools.cache
def _table() -> tuple[tuple[str, Network], ...]:
    return tuple((kind, ipaddress.ip_network(text)) for kind, nets in _KINDS for text in nets)


def kind_of(address: Address, is_own: Callable[[Address], bool] | None = None) -> str | None:
    """Why an address is not for a sandbox: the kind of address it is; None for a public one. IPv4
    addresses inside IPv6 ones count, too."""
    for inner in _embedded(address):
        if found := kind_of(inner, is_own):
            return found
    for kind, network in _table():
        if address in network:
            return kind
    mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if address.version == 6 and not mapped and address not in _GLOBAL_V6 and address not in _NAT64:
        return "reserved"
    return OWN if (is_own or is_own_address)(address) else None


def _embedded(address: Address) -> Iterator[ipaddress.IPv4Address]:
    if not isinstance(address, ipaddress.IPv6Address) or address in (_zero(), _zero(1)):
        return
    low = int(address) & 0xFFFFFFFF
    if any(address in network for network in _LAST_32_BITS):
        yield ipaddress.IPv4Address(low)
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if (int(address) >> 32) & 0xFDFFFFFF == 0x5EFE:  # ISATAP
        yield ipaddress.IPv4Address(low)


def _zero(last: int = 0) -> ipaddress.IPv6Address:
    return ipaddress.IPv6Address(last)


def is_own_address(address: Address) -> bool:
    """Whether an interface of this machine has the address: only then a socket can be bound to
    it. Where sockets may be bound to any address, it is where the machine reaches it from."""
    if not _binds(address):
        return False
    if not _binds(ipaddress.IPv4Address("192.0.2.1")):
        return True
    with contextlib.suppress(OSError), _udp(address) as probe:
        probe.connect((str(address), 9))  # UDP: nothing is sent
        return ipaddress.ip_address(probe.getsockname()[0]) == address
    return False


def _binds(address: Address) -> bool:
    try:
        with _udp(address) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _udp(address: Address) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.socket(family, socket.SOCK_DGRAM)


def may_dial(
    address: Address,
    target: Target,
    rule: EgressRule | None,
    private_names: Collection[str] = (),
    is_own: Callable[[Address], bool] | None = None,
) -> str | None:
    """None if the address may be dialled for a target that the rule allowed; else its kind.

    An address that is not public passes if the rule names it, or names a network all of whose
    addresses are of that kind: 10.0.0.0/8 opens private addresses, 0.0.0.0/0 does not. Names that
    the host's owner trusts (``private_names``) may have private addresses; those given as
    ``name:port`` may also be this machine.
    """
    kind = kind_of(address, is_own)
    if kind is None or (rule is not None and _opens(rule, address, kind, is_own)):
        return None
    if target.address is None:
        trusted_here = f"{target.host}:{target.port}" in private_names
        if kind in _TRUSTED_KINDS and (trusted_here or target.host in private_names):
            return None
        if kind in (LOOPBACK, OWN) and trusted_here:
            return None
    return kind


def _opens(
    rule: EgressRule, address: Address, kind: str, is_own: Callable[[Address], bool] | None
) -> bool:
    if not rule.is_address:
        return False
    network = ipaddress.ip_network(rule.host)
    if address not in network:
        return False
    return all(kind_of(end, is_own) == kind for end in (network[0], network[-1]))


class Dialler:
    """Opens connections to targets that a policy has allowed."""

    def __init__(
        self,
        *,
        resolve: Resolve | None = None,
        private_names: Collection[str] = (),
        is_own: Callable[[Address], bool] | None = None,
        resolve_timeout: float = RESOLVE_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self.private_names = private_names
        self._resolve = resolve or SystemResolver()
        self._is_own = is_own
        self._resolve_timeout = resolve_timeout
        self._connect_timeout = connect_timeout

    async def dial(
        self,
        target: Target,
        rule: EgressRule | None,
        *outer: EgressRule | None,
        not_at: Collection[EgressRule] = (),
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Address]:
        """A connection to the target, which ``rule`` and those of ``outer`` allowed, at no address
        that the rules ``not_at`` are about; and the address that it is to. Refusal: 403 if its
        address may not be dialled, 502 if it cannot be reached, 504 if that takes too long."""
        addresses = await self.checked_addresses(target, rule, *outer, not_at=not_at)
        return await self._connect(target, addresses)

    async def checked_addresses(
        self,
        target: Target,
        rule: EgressRule | None,
        *outer: EgressRule | None,
        not_at: Collection[EgressRule] = (),
    ) -> list[Address]:
        """The addresses of a target that may be dialled, at least one. Refusal."""
        found = [target.address] if target.address else await self._addresses(target)
        return self.check(found[:_MOST_ADDRESSES], target, rule, *outer, not_at=not_at)

    def check(
        self,
        found: Sequence[Address],
        target: Target,
        rule: EgressRule | None,
        *outer: EgressRule | None,
        not_at: Collection[EgressRule] = (),
    ) -> list[Address]:
        """Those of a target's addresses that may be dialled, at least one. Refusal."""
        if target.address is None and not_at:
            found = _without_denied(found, target, not_at)
        kinds = {address: self._why_not(address, target, (rule, *outer)) for address in found}
        allowed = [address for address, kind in kinds.items() if kind is None]
        if not allowed:
            address, kind = next(iter(kinds.items()))
            where = "is" if target.address else f"has the address {address},"
            raise Refusal(
                403,
                f"egress denied: {target} ({where} {_article(kind)} address; only a rule for the "
                f"address allows it)",
            )
        return allowed

    def _why_not(
        self, address: Address, target: Target, rules: Collection[EgressRule | None]
    ) -> str | None:
        """None if the address may be dialled by all of these rules."""
        kinds = (may_dial(address, target, r, self.private_names, self._is_own) for r in rules)
        return next((kind for kind in kinds if kind is not None), None)

    async def _addresses(self, target: Target) -> Sequence[Address]:
        try:
            async with asyncio.timeout(self._resolve_timeout):
                found = await self._resolve(target.host, target.port)
        except TimeoutError:
            raise Refusal(504, f"no answer from DNS for {target.host}") from None
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise Refusal(502, f"{target.host} cannot be resolved: {why}{_proxy_note()}") from None
        if not found:
            raise Refusal(502, f"{target.host} has no address")
        return found

    async def _connect(
        self, target: Target, addresses: Sequence[Address]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Address]:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._connect_timeout
        failure: OSError = TimeoutError()
        for tried, address in enumerate(addresses):
            # One that does not answer leaves time for the others.
            share = max(0.0, end - loop.time()) / (len(addresses) - tried)
            try:
                async with asyncio.timeout(share):
                    reader, writer = await asyncio.open_connection(
                        str(address), target.port, limit=READ_LIMIT
                    )
                _keep_alive(writer)
                return reader, writer, address
            except OSError as error:  # TimeoutError is one
                failure = error
        if isinstance(failure, TimeoutError):
            seconds = f"{self._connect_timeout:g} s"
            raise Refusal(504, f"{target} did not answer within {seconds}{_proxy_note()}")
        why = failure.strerror or str(failure)
        raise Refusal(502, f"{target} cannot be reached: {why}{_proxy_note()}")


def _without_denied(
    addresses: Sequence[Address], target: Target, rules: Collection[EgressRule]
) -> list[Address]:
    """The addresses that no rule denies. Refusal if there are none: a rule that denies addresses
    would mean little if a name could stand for them."""
    left, denied = [], ""
    for address in addresses:
        forms = [address, *_embedded(address)]
        about = next((r for r in rules for f in forms if r.concerns(str(f), target.port)), None)
        if about is None:
            left.append(address)
        else:
            denied = f"has the address {address}, and a rule denies {about.host}"
    if not left:
        raise Refusal(403, f"egress denied: {target} ({denied})")
    return left


def _proxy_note() -> str:
    """A reason that the owner of this machine may not think of. Behind a proxy it would be the
    proxy that resolves names, so nothing could be said about the address that is dialled."""
    name = next((name for name in _PROXIES if os.environ.get(name)), None)
    return f" (the gateway does not use this machine's {name})" if name else ""


def _article(kind: str | None) -> str:
    if kind == OWN:
        return OWN
    return f"an {kind}" if str(kind)[0] in "aeiou" else f"a {kind}"


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let TCP find out whether the server is still there, when nothing moves for long."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class SystemResolver:
    """The system's resolver, with threads of its own: a lookup may take long, and those of one
    sandbox must not keep others waiting."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="gateway-resolver")

    async def __call__(self, name: str, port: int) -> Sequence[Address]:
        look_up = functools.partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
        return [ipaddress.ip_address(text) for text in texts]
