"""Cells that a notebook runs: their results, their order, and how they are stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_kernel import Notebook
from sandbox_kernel.agents.jobs import Job
from sandbox_kernel.errors import KernelError, SandboxError, SandboxTimeout, SpecError

SLEEPS = "import time\nprint('sleeping')\ntime.sleep(600)"
IGNORES = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ignoring")
time.sleep(600)
"""


async def printing(notebook: Notebook, code: str) -> Job:
    """A job that runs, and has printed."""
    job = await notebook.start(code)
    await job.changed(timeout=60)
    assert job.output().text
    return job


async def test_a_cell_gives_a_result() -> None:
    """Status, count, outputs, text and duration come with it, and variables stay."""
    async with Notebook.open() as notebook:
        first = await notebook.run("x = 6\nprint('hello')\nx * 7")
        second = await notebook.run("x + 1")
    assert (first.status, first.execution_count) == ("ok", 1)
    assert [output["output_type"] for output in first.outputs] == ["stream", "execute_result"]
    assert first.text == "hello\n42"
    assert first.duration > 0
    assert second.text == "7"
    assert notebook.state == "closed"


async def test_an_error_is_told_apart() -> None:
    """A cell that fails has the status, and the error by name; the next one runs."""
    async with Notebook.open() as notebook:
        failed = await notebook.run("print('before')\n1 / 0")
        after = await notebook.run("'after'")
    assert failed.status == "error"
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")
    assert failed.outputs[0]["text"] == "before\n"
    assert after.text == "'after'"


async def test_many_callers_at_once_are_served_in_order() -> None:
    """Cells of tasks that run at once run one after the other, in the order of the calls."""
    async with Notebook.open() as notebook:
        await notebook.run("seen = []")
        cells = [notebook.run(f"seen.append({n}); {n}") for n in range(40)]
        results = await asyncio.gather(*cells)
        seen = await notebook.run("str(seen)")
        states = {job.state for job in notebook.jobs.values()}
    assert [result.text for result in results] == [str(n) for n in range(40)]
    assert [result.execution_count for result in results] == list(range(2, 42))
    assert seen.text == repr(str(list(range(40))))
    assert states == {"done"}


async def test_output_is_read_by_cursor_while_a_cell_runs() -> None:
    """A page has what came after the cursor, and the last one is done."""
    async with Notebook.open() as notebook:
        job = await notebook.start("for n in range(3):\n    print(n, input())")
        texts = []
        cursor = 0
        for answer in "abc":
            await job.until_asked(60)
            assert job.state == "waiting for input"
            page = job.output(cursor)
            texts.append(page.text)
            cursor = page.cursor
            await job.input(answer)
        pages = [page async for page in job.follow(cursor)]
    assert [text.strip() for text in texts] == ["", "0 a", "1 b"]
    assert "".join(page.text for page in pages).strip() == "2 c"
    assert pages[-1].done
    assert job.state == "done"


async def test_a_timeout_interrupts() -> None:
    """A cell that takes too long is interrupted, and its output until then is there."""
    async with Notebook.open() as notebook:
        late = await notebook.run(SLEEPS, timeout=1)
        assert late.status == "timeout"
        assert late.outputs[0]["text"] == "sleeping\n"
        assert "1 s" in late.why
        assert (await notebook.run("1 + 1")).text == "2"


async def test_a_timeout_may_leave_the_cell_running() -> None:
    """The result says that it runs on; its job is found by the id."""
    async with Notebook.open() as notebook:
        left = await notebook.run(SLEEPS, timeout=1, on_timeout="leave")
        job = notebook.job(left.job_id)
        assert (left.status, job.state) == ("timeout", "running")
        with pytest.raises(SandboxTimeout, match="running"):
            await job.wait(0.01)
        await job.cancel()
        assert job.state == "cancelled"


async def test_a_timeout_may_kill() -> None:
    """Another kernel takes its place, without the variables."""
    async with Notebook.open() as notebook:
        await notebook.run("x = 1")
        killed = await notebook.run(IGNORES, timeout=1, on_timeout="kill")
        assert killed.status == "timeout"
        assert "killed" in killed.why
        gone = await notebook.run("x")
        assert gone.error is not None
        assert gone.error.name == "NameError"


async def test_queued_jobs_are_cancelled_without_the_kernel() -> None:
    """One that waits is taken out of the queue; the one that runs goes on."""
    async with Notebook.open() as notebook:
        running = await printing(notebook, "print('go')\ninput()")
        waiting = await notebook.start("y = 1")
        last = await notebook.start("'y' in globals()")
        assert (waiting.state, last.state) == ("queued", "queued")
        await waiting.cancel()
        await running.until_asked(60)
        await running.input("")
        assert (await waiting.wait()).status == "cancelled"
        assert (await running.wait()).status == "ok"
        assert (await last.wait()).text == "False"


async def test_a_running_job_is_cancelled_by_an_interrupt() -> None:
    """The cell ends, and those behind it run with the variables that there are."""
    async with Notebook.open() as notebook:
        await notebook.run("x = 5")
        running = await printing(notebook, SLEEPS)
        behind = await notebook.start("x")
        await running.cancel()
        result = await running.wait()
        assert (result.status, result.why) == ("cancelled", "it was cancelled")
        assert (await behind.wait()).text == "5"


async def test_a_job_that_ignores_the_interrupt_is_killed_after_its_grace() -> None:
    """So is every job behind it cancelled: it was meant for a kernel that is gone."""
    async with Notebook.open() as notebook:
        running = await printing(notebook, IGNORES)
        behind = await notebook.start("1")
        await running.cancel(grace=0.5)
        assert (await running.wait()).status == "cancelled"
        assert "killed" in running.why
        assert (await behind.wait()).status == "cancelled"
        assert (await notebook.run("2")).text == "2"


async def test_a_cancelled_caller_interrupts_its_cell() -> None:
    """``asyncio.timeout`` around a run does not leave the kernel busy."""
    async with Notebook.open() as notebook:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await notebook.run(SLEEPS)
        assert (await notebook.run("3")).text == "3"
        assert [job.state for job in notebook.jobs.values()] == ["cancelled", "done"]


async def test_a_cell_gets_its_input() -> None:
    """Texts in their order, a function of the prompt, or neither."""
    async with Notebook.open() as notebook:
        texts = await notebook.run("input('a') + input('b')", input=["1", "2"])
        called = await notebook.run("input('who? ')", input=lambda prompt: prompt.upper())
        refused = await notebook.run("input()")
        too_little = await notebook.run("input() + input()", input="only one")
    assert texts.text == "'12'"
    assert called.text == "'WHO? '"
    assert refused.status == "error"
    assert too_little.status == "cancelled"
    assert "more input" in too_little.why


async def test_a_kernel_that_dies_is_told_with_the_reason() -> None:
    """The cell died and why; those behind it did not run; a restart goes on, with the files."""
    async with Notebook.open() as notebook:
        await notebook.run("open('kept.txt', 'w').write('kept')")
        dying = await notebook.start("input()\nimport os; os._exit(7)")
        behind = await notebook.start("1")
        await dying.until_asked(60)
        await dying.input("")
        died = await dying.wait()
        assert (died.status, died.why) == ("died", "exit code 7")
        assert (await behind.wait()).status == "cancelled"
        assert (notebook.state, notebook.death) == ("dead", "exit code 7")
        with pytest.raises(KernelError, match="Restart"):
            await notebook.run("1")
        await notebook.restart()
        assert notebook.state == "idle"
        assert (await notebook.run("open('kept.txt').read()")).text == "'kept'"


async def test_memory_is_named_as_the_cause_of_death() -> None:
    """What the sandbox knows of a kill is in the job."""
    async with Notebook.open(memory_mib=256) as notebook:
        died = await notebook.run("x = bytearray(2**30)")
    assert died.status == "died"
    assert died.why.startswith("out of memory")


async def test_what_came_before_a_sudden_death_is_there() -> None:
    """Output that the sandbox has recorded is not lost with the kernel."""
    code = "import os, sys, time\nprint('last words', flush=True)\ninput()\nos.kill(os.getpid(), 9)"
    async with Notebook.open() as notebook:
        job = await notebook.start(code)
        await job.until_asked(60)
        await job.input("")
        died = await job.wait()
    assert died.status == "died"
    assert [output["text"] for output in died.outputs] == ["last words\n"]


async def test_a_silent_cell_leaves_no_trace() -> None:
    """It runs, and gives a result, but is no job and no cell of the notebook."""
    async with Notebook.open() as notebook:
        silent = await notebook.run("print('hidden')", silent=True)
        assert silent.text == "hidden"
        assert not notebook.jobs
        assert (await notebook.run("1")).execution_count == 1


async def test_restart_cancels_what_runs_and_waits() -> None:
    """Nobody waits for a cell of the kernel that is gone."""
    async with Notebook.open() as notebook:
        running = await printing(notebook, SLEEPS)
        waiting = await notebook.start("1")
        await notebook.restart()
        assert (running.state, waiting.state) == ("cancelled", "cancelled")
        assert (await notebook.run("4")).text == "4"


async def test_interrupt_is_an_error_of_the_cell() -> None:
    """As with Ctrl-C; nothing else is cancelled."""
    async with Notebook.open() as notebook:
        running = await printing(notebook, SLEEPS)
        waiting = await notebook.start("1")
        await notebook.interrupt()
        interrupted = await running.wait()
        assert interrupted.error is not None
        assert interrupted.error.name == "KeyboardInterrupt"
        assert (await waiting.wait()).status == "ok"


async def test_what_cannot_be_is_refused_before_anything_is_made(folder: Path) -> None:
    """Wrong settings, kernels and paths are named."""
    with pytest.raises(SpecError, match="memory_mib"):
        await Notebook.open(memory_mb=100)
    with pytest.raises(SpecError, match="nonesuch"):
        await Notebook.open(kernel="nonesuch")
    with pytest.raises(SpecError, match="does not run in a sandbox"):
        await Notebook.open(kernel="python3")
    with pytest.raises(SpecError, match="folder does not exist"):
        await Notebook.open(folder / "missing" / "a.ipynb")
    with pytest.raises(SpecError, match=r"\.ipynb"):
        await Notebook.open(folder / "a.txt")
    assert not Notebook.live()


async def test_another_loop_is_refused() -> None:
    """A call on a loop that the notebook does not live on says so."""
    async with Notebook.open() as notebook:

        def elsewhere() -> str:
            with pytest.raises(SandboxError, match="event loop") as refused:
                asyncio.run(notebook.run("1"))
            return str(refused.value)

        assert "BlockingNotebook" in await asyncio.to_thread(elsewhere)


async def test_a_closed_notebook_says_so() -> None:
    """Its outputs are still there, but it runs nothing."""
    async with Notebook.open() as notebook:
        job = await notebook.start("'there'")
        await job.wait()
        left = await notebook.start(SLEEPS)
    await notebook.close()
    assert (await job.wait()).text == "'there'"
    assert left.state == "cancelled"
    with pytest.raises(SandboxError, match="closed"):
        await notebook.run("1")
