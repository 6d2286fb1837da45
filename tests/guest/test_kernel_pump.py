"""What a client has said to one kernel opens its connection to the next one."""

from __future__ import annotations

import pytest

from sandbox_kernel.guest.kernel_pump import Conversation
from sandbox_kernel.wire.zmtp import COMMAND, PLAIN_GREETING, READY, READY_SUB, SUBSCRIBE_ALL

READY_XPUB = bytes([COMMAND, 26]) + READY + b"\x0bSocket-Type\x00\x00\x00\x04XPUB"
CLIENT = PLAIN_GREETING + READY_SUB
KERNEL = PLAIN_GREETING + READY_XPUB
MESSAGE = b"\x01\x05topic\x00\x04body"


def opened(channel: str = "iopub", client: bytes = CLIENT + SUBSCRIBE_ALL) -> Conversation:
    conversation = Conversation(channel)
    conversation.from_client(client)
    assert bytes(conversation.from_kernel(KERNEL + MESSAGE)) == KERNEL + MESSAGE
    return conversation


def opening(conversation: Conversation) -> bool:
    return conversation.opening


def can_go_on(conversation: Conversation) -> bool:
    return conversation.can_go_on


def test_the_next_kernel_is_told_what_the_last_one_was() -> None:
    """First the opening; the subscriptions when the kernel has answered it."""
    conversation = opened()
    assert can_go_on(conversation)
    assert conversation.go_on() == CLIENT
    assert opening(conversation)
    assert bytes(conversation.from_kernel(KERNEL[:70])) == b""
    assert opening(conversation)
    assert bytes(conversation.from_kernel(KERNEL[70:] + MESSAGE)) == MESSAGE
    assert not opening(conversation)
    assert conversation.subscriptions == SUBSCRIBE_ALL


def test_again_and_again() -> None:
    """One kernel after the other, some of which end before they have answered."""
    conversation = opened()
    for answer in (KERNEL + MESSAGE, KERNEL[:10], KERNEL, b"", KERNEL + 2 * MESSAGE):
        assert can_go_on(conversation)
        assert conversation.go_on() == CLIENT
        assert bytes(conversation.from_kernel(answer)) == answer[len(KERNEL) :]


def test_bytes_come_in_pieces_of_any_size() -> None:
    conversation = Conversation("iopub")
    for client in CLIENT + SUBSCRIBE_ALL:
        conversation.from_client(bytes([client]))
    for kernel in KERNEL + MESSAGE:
        conversation.from_kernel(bytes([kernel]))
    assert can_go_on(conversation)
    assert conversation.go_on() == CLIENT
    assert conversation.subscriptions == SUBSCRIBE_ALL


@pytest.mark.parametrize("end", [1, 3, len(MESSAGE) - 1], ids=["header", "frame", "part"])
def test_nobody_goes_on_in_the_middle_of_a_message(end: int) -> None:
    """Neither of the kernel's nor of the client's."""
    conversation = opened()
    conversation.from_kernel(MESSAGE[:end])
    assert not can_go_on(conversation)
    conversation.from_kernel(MESSAGE[end:])
    assert can_go_on(conversation)
    asking = opened("shell")
    asking.from_client(MESSAGE[:end])
    assert not can_go_on(asking)
    asking.from_client(MESSAGE[end:])
    assert can_go_on(asking)


def test_a_large_message_is_followed_to_its_end() -> None:
    conversation = opened()
    size = 300_000
    conversation.from_kernel(b"\x02" + size.to_bytes(8, "big") + bytes(size - 1))
    assert not can_go_on(conversation)
    conversation.from_kernel(b"\0")
    assert can_go_on(conversation)


def test_a_request_is_not_repeated() -> None:
    """Only a listener's messages, which are subscriptions, are said to the next kernel, too."""
    conversation = opened("shell")
    conversation.from_client(MESSAGE)
    assert can_go_on(conversation)
    assert conversation.subscriptions == b""


@pytest.mark.parametrize(
    "client",
    [
        PLAIN_GREETING.replace(b"NULL\0", b"CURVE") + bytes([COMMAND, 6]) + b"\x05HELLO",
        PLAIN_GREETING + SUBSCRIBE_ALL,
        bytes(200),
        b"GET / HTTP/1.1\r\n" * 10,
        CLIENT + SUBSCRIBE_ALL * 2000,
        CLIENT + b"\x02" + (10_000).to_bytes(8, "big") + bytes(10_000),
        b"",
    ],
    ids=["encrypted", "unready", "zeros", "http", "subscriptions", "subscription", "silent"],
)
def test_others_connect_again(client: bytes) -> None:
    """A connection whose opening cannot be repeated is not kept."""
    assert not can_go_on(opened(client=client))


def test_another_kind_of_kernel_cannot_go_on() -> None:
    """The client has had another answer."""
    conversation = opened()
    conversation.go_on()
    with pytest.raises(ValueError, match="another way"):
        conversation.from_kernel(KERNEL.replace(b"XPUB", b"YPUB"))
