"""A server with five notebooks, used at random for half an hour: ``make soak``.

It is no part of ``make test``. It looks for what no single test shows: kernels that die unasked,
saves that are lost, and descriptors, processes and memory that add up.
"""
