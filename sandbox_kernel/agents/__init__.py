"""Cells as durable jobs, for pipelines and agents; and doors for agent frameworks.

result          what a cell came to
model_text      a cell's outputs as text for a model; with tracebacks, terminal_text, html_text
images          pictures among outputs, and their size
sandbox_bridge  the sandbox of a framework's agent, with bridge_files; deepagents, pydantic_ai,
                inspect_ai, smolagents and ag2 are what the frameworks see
"""
