"""Notebooks that another process goes on with, after their caller has died or let go of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest

from sandbox_kernel import Notebook, load_backend
from sandbox_kernel.errors import KernelError, SandboxError, SandboxExists, SandboxNotFound
from sandbox_kernel.tunnel import background
from tests.helpers.waiting import until

from .other_process import caller, killed_caller

COUNTS = '''
code = """
import os, time
n = 0
while not os.path.exists('enough'):
    print('line', n, flush=True)
    n += 1
    time.sleep(0.002)
print('all', n)
"""
nb = await Notebook.open(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TEST_PATH"))
await nb.run("x = 41; print('first')")
job = await nb.start(code)
queued = await nb.start("print('never sent')")
read = 0
while read < 50:
    read += len((await job.changed(read)).items)
tell(sandbox=nb.sandbox, job=job.id, queued=queued.id, pid=os.getpid())
'''


def lines_of(text: str) -> tuple[list[int], int]:
    """The numbers that the counting cell printed, and how many it says it printed."""
    *lines, last = text.splitlines()
    assert last.startswith("all "), last
    return [int(line.removeprefix("line ")) for line in lines], int(last.removeprefix("all "))


async def test_every_line_is_read_once_after_the_caller_was_killed(folder: Path) -> None:
    """SIGKILL in the middle of a cell: another process has all of its output, each line once, and
    true states of all jobs; the kernel goes on with its variables."""
    path = folder / "counted.ipynb"
    with killed_caller(COUNTS, TEST_PATH=str(path)) as told:
        async with Notebook.attach(told["sandbox"]) as notebook:
            job = notebook.job(told["job"])
            assert (job.state, notebook.state) == ("running", "busy")
            await job.changed(job.output().cursor + 100)
            await notebook.write("enough", b"")
            pages = [page async for page in job.follow()]
            text = "".join(item["text"] for page in pages for item in page.items)
            numbers, count = lines_of(text)
            assert numbers == list(range(count))
            assert pages[-1].done
            states = [job.state for job in notebook.jobs.values()]
            assert states == ["done", "done", "lost"]
            assert "before it was sent" in notebook.job(told["queued"]).why
            assert (await notebook.run("x + 1")).text == "42"
            first = next(iter(notebook.jobs.values()))
            assert (await first.wait()).text == "first"
    recorded = nbformat.read(path, 4)
    nbformat.validate(recorded)
    assert lines_of(recorded.cells[1].outputs[0].text)[0] == numbers
    assert [len(cell.outputs) for cell in recorded.cells] == [1, 1, 0, 1]


DIES = """
nb = await Notebook.open(os.environ["TEST_PATH"])
job = await nb.start(
    "import os, time\\nfor n in range(500):\\n    print('line', n)\\n"
    "while not os.path.exists('go'): time.sleep(0.01)\\n"
    "print('all', 500, flush=True)\\ntime.sleep(0.5)\\nos._exit(7)"
)
while job.state == "queued":
    await job.changed(timeout=1)
tell(sandbox=nb.sandbox, job=job.id, kernel=nb._session.kernel.provisioner.pid)
"""


async def test_a_kernel_that_died_after_its_caller_has_left_its_output(folder: Path) -> None:
    """All that its cell printed is there, and why the job ended; after a restart the notebook goes
    on in the same sandbox."""
    path = folder / "died.ipynb"
    with killed_caller(DIES, TEST_PATH=str(path)) as told:
        handle = await background.run(load_backend("local").get(told["sandbox"]))
        ends = f"touch go; while kill -0 {told['kernel']} 2>/dev/null; do sleep 0.02; done"
        await background.run(handle.exec("/bin/sh", ["-c", ends], timeout=60))
        async with Notebook.attach(path) as notebook:
            result = await notebook.job(told["job"]).wait(60)
            assert lines_of(result.outputs[0]["text"]) == (list(range(500)), 500)
            assert result.status == "died"
            assert "exit code 7" in result.why
            assert (notebook.state, notebook.sandbox) == ("dead", told["sandbox"])
            with pytest.raises(KernelError, match="exit code 7"):
                await notebook.run("1")
            await notebook.restart()
            assert (await notebook.run("import os; os.path.exists('go')")).text == "True"
    recorded = nbformat.read(path, 4)
    assert lines_of(recorded.cells[0].outputs[0].text)[1] == 500


async def test_a_notebook_is_found_by_path_and_by_a_part_of_its_name(folder: Path) -> None:
    """So it is by the whole name, and nothing else is found."""
    path = folder / "found.ipynb"
    code = f"nb = await Notebook.open({str(path)!r})\ntell(sandbox=nb.sandbox)"
    with killed_caller(code) as told:
        (live,) = Notebook.live()
        assert (live.sandbox, live.path, live.owner) == (told["sandbox"], str(path), None)
        async with Notebook.attach(told["sandbox"][:-2]) as notebook:
            await notebook.detach()
        with pytest.raises(SandboxNotFound, match=told["sandbox"]):
            await Notebook.attach("nonesuch")
        async with Notebook.attach(path) as notebook:
            assert notebook.path == path
        assert not Notebook.live()


async def test_a_notebook_in_use_is_not_taken_by_accident() -> None:
    """Attaching names the process that has it; taking it over ends that one's use of it."""
    code = """
nb = await Notebook.open()
job = await nb.start("input()")
tell(sandbox=nb.sandbox, pid=os.getpid())
result = await job.wait()
tell(status=result.status, why=result.why, state=nb.state)
"""
    with caller(code) as (process, told):
        with pytest.raises(SandboxExists, match=str(told["pid"])):
            await Notebook.attach(told["sandbox"])
        async with Notebook.attach(told["sandbox"], take_over=True) as notebook:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert '"lost"' in line
            assert '"closed"' in line
            assert "another process" in line
            (job,) = notebook.jobs.values()
            await job.cancel()
            assert (await notebook.run("1")).text == "1"


async def test_detaching_leaves_a_cell_running() -> None:
    """Its waiter is told that it is lost to him; the next one finds it running, and ends it."""
    notebook = await Notebook.open()
    running = await notebook.start("for n in range(10**6):\n    print(n)\n    input()")
    waiting = await notebook.start("1")
    await running.until_asked(60)
    await notebook.detach()
    assert (running.state, waiting.state) == ("lost", "lost")
    with pytest.raises(SandboxError, match="another process"):
        await notebook.run("1")
    await notebook.close()
    async with Notebook.attach(notebook.sandbox) as again:
        job, unsent = again.jobs.values()
        assert (job.state, unsent.state) == ("waiting for input", "lost")
        assert job.output().text.strip() == "0"
        await job.input("")
        await until(lambda: job.state == "waiting for input" or len(job.output().items) > 1)
        await job.cancel()
        assert job.state == "cancelled"


async def test_a_cell_that_ended_while_nobody_was_there_has_ended() -> None:
    """Its end, its error and its outputs come from the sandbox's recording."""
    code = """
nb = await Notebook.open()
job = await nb.start("import os, time\\nprint('begun', flush=True)\\n"
    "while not os.path.exists('go'): time.sleep(0.01)\\n"
    "print('end', flush=True)\\nopen('gone', 'w').close()\\n1/0")
await job.changed()
await nb.write("go", b"") if os.environ.get("TEST_GO") else None
tell(sandbox=nb.sandbox)
"""
    with killed_caller(code, TEST_GO="1") as told:
        async with Notebook.attach(told["sandbox"]) as notebook:
            (job,) = notebook.jobs.values()
            result = await job.wait(60)
            assert result.status == "error"
            assert result.error is not None
            assert result.error.name == "ZeroDivisionError"
            assert result.outputs[0]["text"] == "begun\nend\n"
            assert result.execution_count == 1


async def test_a_second_death_loses_nothing_either(folder: Path) -> None:
    """A process that attached is killed, too: the third one reads every line once."""
    path = folder / "twice.ipynb"
    again = """
nb = await Notebook.attach(os.environ["TEST_PATH"])
job = list(nb.jobs.values())[1]
read = job.output().cursor
while read < 200:
    read = (await job.changed(read)).cursor
tell(job=job.id)
"""
    with (
        killed_caller(COUNTS, TEST_PATH=str(path)) as told,
        killed_caller(again, TEST_PATH=str(path)) as second,
    ):
        assert second["job"] == told["job"]
        async with Notebook.attach(path) as notebook:
            await notebook.write("enough", b"")
            result = await notebook.job(told["job"]).wait(60)
            numbers, count = lines_of(result.outputs[0]["text"])
            assert numbers == list(range(count))


async def test_attaching_after_a_restart_of_the_attached_kernel() -> None:
    """A kernel that was taken over can be restarted, interrupted and restarted again."""
    with killed_caller("nb = await Notebook.open()\ntell(sandbox=nb.sandbox)") as told:
        async with Notebook.attach(told["sandbox"]) as notebook:
            await notebook.run("x = 1")
            await notebook.restart()
            gone = await notebook.run("x")
            assert gone.status == "error"
            assert (await notebook.run("2")).text == "2"
