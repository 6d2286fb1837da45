"""The background loop: one thread per process, on which tunnels and SDK objects live.

Jupyter's synchronous KernelManager runs its own loop only while it is being called, so a tunnel on
the caller's loop would stall between calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use. A forked child gets one of its own."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(Workers(thread_name_prefix="sandbox-kernel"))
            started = threading.Event()
            _loop.call_soon(started.set)
            threading.Thread(target=_loop.run_forever, name="sandbox-kernel", daemon=True).start()
            started.wait()
        return _loop


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run a coroutine on the background loop; for callers without a loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


async def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and await it on the caller's.

    Cancelling the caller cancels the coroutine, and waits until it has cleaned up.
    """
    loop = background_loop()
    if asyncio.get_running_loop() is loop:
        return await coroutine
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    task: asyncio.Task[T] | None = None

    def start() -> None:
        nonlocal task
        task = loop.create_task(coroutine)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    loop.call_soon_threadsafe(start)
    waiter = asyncio.wrap_future(outcome)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        loop.call_soon_threadsafe(lambda: task and task.cancel())
        await asyncio.wait([waiter])
        if not waiter.cancelled():
            waiter.exception()  # retrieved, though nobody wants it
        raise


async def carry_through(coroutine: Coroutine[Any, Any, T]) -> T:
    """As ``run``, but if the caller is cancelled, the coroutine goes on, and logs its failure."""
    outcome = submit(coroutine)
    try:
        return await asyncio.shield(asyncio.wrap_future(outcome))
    except asyncio.CancelledError:
        outcome.add_done_callback(_log_failure)
        raise


async def aside(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a blocking call in a thread, for which neither a cancelled caller nor the exit waits."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()
    make = functools.partial(_settle, outcome, functools.partial(call, *args, **kwargs))
    threading.Thread(target=make, name="sandbox-kernel-aside", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _settle(outcome: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001  (goes to whoever awaits the call)
        outcome.set_exception(error)


def _log_failure(outcome: concurrent.futures.Future[Any]) -> None:
    error = None if outcome.cancelled() else outcome.exception()
    if error is not None:
        logging.getLogger("sandbox_kernel").error("%s", error)


class Workers(concurrent.futures.ThreadPoolExecutor):
    """Threads for blocking calls that still work when the process exits. The standard executor
    refuses work by then, but the last sandboxes are removed at that time."""

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: concurrent.futures.Future[R] = concurrent.futures.Future()
            _settle(done, functools.partial(fn, *args, **kwargs))
            return done


def _after_fork_in_child() -> None:
    # The thread is gone in the child, and everything on its loop belongs to the parent.
    global _loop, _lock
    _lock = threading.Lock()
    _loop = None


os.register_at_fork(after_in_child=_after_fork_in_child)
