"""One module a command, or a few that belong together; ``add`` describes them to the parser.

What is slow to import, Jupyter above all, is imported when a command runs: help and completion are
quick.
"""
