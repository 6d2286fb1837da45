"""Cells as durable jobs, for pipelines and agents; and doors for agent frameworks.

notebook        Notebook, and blocking its twin without an event loop
jobs            a cell on its way; job_state and job_queue are behind it, catching_up after a death
result          what a cell came to; model_text the same as text for a model
recorded        the notebook's file
notebook_run    whole notebooks: pipeline, parameters, papermill_engine
mcp/            the same for clients of MCP
openai_agents/  the OpenAI Agents SDK; sandbox_bridge is below the other frameworks: deepagents,
                pydantic_ai, inspect_ai, smolagents and ag2 are what they see
"""
