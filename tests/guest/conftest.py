from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_kernel.guest.wire import VERSION
from sandbox_kernel.guest.wire.handshake import Welcome
from tests.guest.agents import AgentProcess, Host, NewHost
from tests.guest.loops import LOOPS, Driver, Pair


@pytest.fixture(params=LOOPS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Each of the two loops."""
    driver = Driver(request.param)
    yield driver
    driver.close()


@pytest.fixture(params=["raw", "base64"])
def pair(request: pytest.FixtureRequest, driver: Driver) -> Iterator[Pair]:
    """Two peers with a link between them, on each loop and with each codec."""
    pair = Pair(driver, request.param)
    yield pair
    pair.close()
    driver.settle(2)


@pytest.fixture
def guest_driver() -> Iterator[Driver]:
    driver = Driver("guest")
    yield driver
    driver.close()


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    agent = AgentProcess()
    yield agent
    agent.close()


@pytest.fixture
def new_host(guest_driver: Driver, agent: AgentProcess) -> Iterator[NewHost]:
    """Makes hosts, each with a session of its own, that are not connected yet."""
    hosts: list[Host] = []

    def make(session: str = "one") -> Host:
        hosts.append(Host(guest_driver, agent, session))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def host(new_host: NewHost) -> Host:
    host = new_host()
    assert host.connect() == Welcome(VERSION, "one", 0)
    return host
