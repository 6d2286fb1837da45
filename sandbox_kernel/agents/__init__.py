"""Doors for agents and pipelines. Each framework's has a module, and an extra, of its own."""
