"""One module a command. Each has ``add``, which describes it to the parser, and ``run``.

What is slow to import, Jupyter above all, is imported by ``run``: help and completion are quick.
"""
