"""The sandbox kernel next to a plain local ipykernel: ``python -m benchmarks``.

A *column* is a way to run a kernel (``columns.py``), a *row* is a figure (``rows.py``). Every
column has its own process (``worker.py``), in which a KernelManager and a client drive real kernels
(``livekernel.py``). The main process gives them tasks in turn (``compare.py``), so that all columns
see the same machine. ``docs/performance.md`` has the details.
"""
