"""Jupyter's own test suite for kernels, with every part of it switched on."""

# ruff: noqa: RUF012  (the suite is filled in through class attributes)

from __future__ import annotations

import contextlib
from queue import Empty
from typing import Any, ClassVar
from unittest import TestCase

import jupyter_kernel_test as suite
import pytest

from sandbox_kernel.jupyter.iopub_listener import PREFIX

from .conftest import own_folder
from .live import PATIENCE, Leftovers, restart_from_spare


@pytest.fixture(autouse=True)
def folder() -> None:
    """These classes have folders of their own, for all of their tests."""


class _InOwnFolders(TestCase):
    """Starts the kernel of a class of tests, and checks at its end that nothing is left."""

    kernel_name = "sandbox"
    km: ClassVar[Any]
    kc: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        with contextlib.ExitStack() as stack:
            monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
            leftovers = Leftovers(stack.enter_context(own_folder(monkeypatch)))
            super().setUpClass()
            cls.addClassCleanup(stack.pop_all().close)
            cls.addClassCleanup(leftovers.check)
            cls.addClassCleanup(lambda: cls.km.cleanup_resources())


class TestSandboxKernel(_InOwnFolders, suite.KernelTests):
    """All that jupyter_kernel_test knows about a kernel."""

    language_name = "python"
    file_extension = ".py"

    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('careful', file=sys.stderr)"

    completion_samples = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "import string; string.ascii_low", "matches": {"ascii_lowercase"}},
    ]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]

    code_page_something = "zip?"
    code_generate_error = "raise RuntimeError('on purpose')"
    code_execute_result = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
        {"code": "'ünïcödé'", "result": "'ünïcödé'"},
        {
            "code": "from IPython.display import HTML; HTML('<b>bold</b>')",
            "mime": "text/html",
            "result": "<b>bold</b>",
        },
    ]
    code_display_data = [
        {
            "code": "from IPython.display import *; display(HTML('<b>test</b>'))",
            "mime": "text/html",
        },
        {"code": "display(Math('\\\\frac{1}{2}'))", "mime": "text/latex"},
        {
            "code": "display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))",
            "mime": "image/svg+xml",
        },
        {"code": "display(JSON({'a': [1, 2]}))", "mime": "application/json"},
        {
            "code": "display(Image(bytes.fromhex('89504e470d0a1a0a'), format='png'))",
            "mime": "image/png",
        },
    ]

    code_history_pattern = "1?2*"
    # "range" is tested below: IPython calls the present session 0, the suite by its number.
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    # Not part of the package's own suite, but of its language.
    code_stdin = "print('got', input('name: '))"

    def execute_helper(self, *args: Any, **kwargs: Any) -> Any:
        """The suite allows a tenth of a second between messages, too little on a busy machine."""
        channel = self.kc.iopub_channel
        get = channel.get_msg
        channel.get_msg = lambda timeout: get(timeout=PATIENCE)
        try:
            return super().execute_helper(*args, **kwargs)
        finally:
            channel.get_msg = get

    def test_stdin(self) -> None:
        """A cell that asks is answered over the stdin channel."""
        self.flush_channels()
        request = self.kc.execute(self.code_stdin, allow_stdin=True)
        asked = self.kc.get_stdin_msg(timeout=PATIENCE)
        assert asked["parent_header"]["msg_id"] == request
        assert asked["content"] == {"prompt": "name: ", "password": False}
        self.kc.input("Ada")
        reply = self.get_non_kernel_info_reply(timeout=PATIENCE)
        suite.validate_message(reply, "execute_reply", request)
        texts: list[str] = []
        while "got Ada\n" not in "".join(texts):
            message = self.kc.get_iopub_msg(timeout=PATIENCE)
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])

    def test_history_range(self) -> None:
        """A part of this session's history."""
        reply = self.history_helper(
            ["'a'", "'b'"], output=False, raw=True, hist_access_type="range", session=0, start=1
        )
        assert [line for _, _, line in reply["content"]["history"]][-2:] == ["'a'", "'b'"]

    def test_nothing_is_skipped(self) -> None:
        """A part of the suite that is not filled in would be skipped without a word."""
        parts = [
            name
            for name in dir(suite.KernelTests)
            if name.startswith(("code_", "supported_")) or name.endswith("_samples")
        ]
        assert len(parts) > 10
        assert [name for name in parts if not getattr(self, name)] == []

    def test_quiet_between_cells(self) -> None:
        """Nothing is sent that nobody asked for."""
        self.flush_channels()
        with pytest.raises(Empty):
            self.kc.get_iopub_msg(timeout=0.2)


class TestSpareKernel(TestSandboxKernel):
    """The same of a kernel that had already started before it was one."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        restart_from_spare(cls.km, cls.kc)


class TestIopubWelcome(_InOwnFolders, suite.IopubWelcomeTests):
    """The kernel greets a client that subscribes to its output, so that none is missed."""

    support_iopub_welcome = True

    def setUp(self) -> None:
        """The debugger prints a note while the kernel starts. It may come first, from a plain local
        kernel, too (1 of 25). So may the greeting of another client, which everybody hears: that
        of our own listener, for hints."""
        super().setUp()
        get = self.kc.get_iopub_msg

        def get_answer(**options: Any) -> Any:
            message = get(**options)
            by_itself = message["msg_type"] == "stream" and not message["parent_header"]
            to_another = message["content"].get("subscription") == PREFIX.decode()
            return None if by_itself or to_another else message

        self.kc.get_iopub_msg = get_answer
