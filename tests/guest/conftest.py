"""An agent as a process, and hosts that talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_kernel.wire import VERSION
from sandbox_kernel.wire.handshake import Welcome
from tests.guest.agents import AgentProcess, Host, NewHost
from tests.wire.conftest import driver
from tests.wire.loops import Driver

__all__ = ["driver"]


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
