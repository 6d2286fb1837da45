"""Sandboxes: the surface and one package a backend.

base              what a backend implements and what its users call; results, capabilities,
                  exec_stream and command hold the values and classes that it names
backends          finds a backend by its name
recording_client  the base of backends that keep records; creation_marker marks half-made ones
broker            for SDKs that one process at a time may use
"""
