"""One notebook and its user, who does things at random and knows what must come of them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from sandbox_kernel.workspace import Store, name_for_notebook
from tests.helpers.waiting import wait_until
from tests.kernels.live import PATIENCE
from tests.server.running import JupyterServer, NotDone, Tab

LINES = 2000
INTERRUPTS, INTERRUPT_PATIENCE = 3, 10.0
"""As a person does, who interrupts again: ipykernel swallows one that comes while it puts a line
aside, a plain local one, too (1 of 900 or so)."""


class Gate:
    """Lets users act, and holds them all for whoever wants to look around."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._acting = 0
        self._held = False

    def __enter__(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._held)
            self._acting += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._acting -= 1
            self._condition.notify_all()

    def hold(self) -> bool:
        """Wait until nobody acts, and let nobody begin. False: somebody does not come to an end."""
        with self._condition:
            self._held = True
            return self._condition.wait_for(lambda: not self._acting, timeout=10 * PATIENCE)

    def release(self) -> None:
        with self._condition:
            self._held = False
            self._condition.notify_all()


class Actor(threading.Thread):
    """``problems`` is for all; ``full``: the disk is, so nothing is asked that needs it."""

    def __init__(
        self,
        server: JupyterServer,
        number: int,
        seed: int,
        *,
        gate: Gate,
        kernel: str,
        full: threading.Event,
        over: threading.Event,
        problems: list[str],
    ) -> None:
        super().__init__(name=f"notebook-{number}", daemon=True)
        self._server, self._kernel, self._gate = server, kernel, gate
        self._random = random.Random(seed * 1000 + number)
        self._full, self._over, self._problems = full, over, problems
        self._renames = 0
        self._number = number
        self.path = f"n{number}.ipynb"
        self.done: Counter[str] = Counter()
        self._count = 0
        """What the file `count` in the sandbox says."""
        self._token = 0
        """A variable of the kernel, set whenever we have started one: if it is gone, the kernel
        has died unasked."""

    def open(self) -> None:
        """The notebook, for the first time."""
        self._server.notebook(self.path)
        self._open()
        self._write()

    def run(self) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (5, self.print_much),
            (5, self.save),
            (2, self.rename),
            (3, self.interrupt),
            (2, self.restart),
            (2, self.reopen),
            (2, self.reconnect),
        ]
        weights, doing = [w for w, _ in actions], [a for _, a in actions]
        while not self._over.is_set():
            (act,) = self._random.choices(doing, weights)
            with self._gate:
                if self._full.is_set() and act not in (self.print_much, self.interrupt):
                    act = self.print_much
                try:
                    self._check_alive()
                    act()
                    self.done[act.__name__] += 1
                except Exception as error:  # noqa: BLE001  (all are told in the end)
                    what = f"{self.path}: {act.__name__}: {type(error).__name__}: {error}"
                    self._problems.append(f"{time.strftime('%H:%M:%S')} {what[:3000]}")
                    print(f"  PROBLEM {self._problems[-1][:600]}", flush=True)
                    self._recover()
            self._over.wait(self._random.uniform(0, 1))

    # --- what a user does

    def print_much(self) -> None:
        text = self._tab.run(f"for i in range({LINES}): print(i, 'x' * 50)")
        lines = text.count("x" * 50)
        assert lines == LINES, f"{lines} lines of {LINES}"

    def save(self) -> None:
        self._write()
        self._server.notebook(self.path, (f"# {self._count}",))
        wait_until(lambda: self._saved() == self._count or None, f"save {self._count}")

    def rename(self) -> None:
        self._renames += 1
        new = f"n{self._number}-{self._renames}.ipynb"
        self._server.request("PATCH", f"/api/contents/{self.path}", {"path": new})
        body = {"path": new, "name": new}
        self._server.request("PATCH", f"/api/sessions/{self._session}", body)
        self.path = new
        self.save()

    def interrupt(self) -> None:
        request = self._tab.begin("import time\nwhile True: print('y' * 60); time.sleep(0.001)")
        wait_until(lambda: self._prints(request) or None, "what the cell prints")
        kernel = self._tab.kernel_id
        for patience in (*[INTERRUPT_PATIENCE] * (INTERRUPTS - 1), PATIENCE):
            self._server.request("POST", f"/api/kernels/{kernel}/interrupt")
            try:
                reply = self._tab.until_done(request, within=patience)
                break
            except NotDone:
                if patience == PATIENCE:
                    raise
        assert reply.get("ename") == "KeyboardInterrupt", reply

    def _prints(self, request: str) -> bool:
        message = self._tab.read()
        return (message["parent"], message["kind"]) == (request, "stream")

    def restart(self) -> None:
        self._server.request("POST", f"/api/kernels/{self._tab.kernel_id}/restart")
        self._tab.close()
        self._tab.connect()
        self._mark()
        self._check_files()

    def reopen(self) -> None:
        """Shut the kernel down, and open the notebook again: a new sandbox with the old files."""
        self._tab.close()
        self._server.request("DELETE", f"/api/sessions/{self._session}")
        self._open()
        self._check_files()

    def reconnect(self) -> None:
        request = self._tab.begin("import time\nfor i in range(20): print(i); time.sleep(0.05)")
        self._tab.close()
        self._tab.connect()
        reply = self._tab.until_done(request)
        assert reply["status"] == "ok", reply
        got = self._tab.text(request).split()
        assert got == [str(i) for i in range(20)], got

    # --- and what must be so

    def _open(self) -> None:
        session = self._server.session(self.path, self._kernel)
        self._session = session["id"]
        self._tab = Tab(self._server, session["kernel"]["id"])
        self._mark()

    def _mark(self) -> None:
        self._token = self._random.randrange(10**9)
        self._tab.run(f"token = {self._token}")

    def _write(self) -> None:
        self._count += 1
        size = self._random.randrange(1000, 200_000)
        self._tab.run(
            f"import os; open('data', 'wb').write(os.urandom({size})); "
            f"open('count', 'w').write('{self._count}')"
        )

    def _check_alive(self) -> None:
        self._tab.messages.clear()
        # IPython itself prints here, too, and in between, if it cannot write its history.
        told = self._tab.run("print('token', globals().get('token'))")
        assert str(self._token) in told, f"the kernel has died unasked: {told!r}"

    def _check_files(self) -> None:
        found = self._tab.run(
            "import os; print(open('count').read() if os.path.exists('count') else '')"
        )
        assert found.strip() == str(self._count), f"count is {found.strip()!r}, not {self._count}"

    def _saved(self) -> int:
        store = Store.open()
        latest = store.latest(name_for_notebook(str(self._server.root / self.path)))
        if latest is None:
            return -1
        entry = store.lookup(latest, "count")
        return int(b"".join(store.read(piece[1]) for piece in entry.pieces())) if entry else -1

    def _recover(self) -> None:
        """After a failure, which is noted: go on with a new kernel, and what files it has."""
        try:
            self._tab.close()
            while self._full.is_set():
                time.sleep(1)
            for session in self._server.get("/api/sessions"):
                if session["path"] == self.path:
                    self._server.request("DELETE", f"/api/sessions/{session['id']}")
            self._open()
            self._write()
        except Exception as error:  # noqa: BLE001
            self._problems.append(f"{self.path}: no way back: {type(error).__name__}: {error}")
            self._over.wait(5)
