"""Sandboxes: the surface (``base``), finding backends (``backends``), one package a backend."""
