"""Cells as durable jobs, for pipelines and agents.

result        what a cell came to
model_text    a cell's outputs as text for a model; with tracebacks, terminal_text, html_text
images        pictures among outputs, and their size
"""
