"""Emulators of hosted services, for their unmodified SDKs to talk to.

http        a small HTTP/1.1 server: routes, streamed answers (SSE), websockets
network     what lies between: a proxy that ends TLS for names of the service, and delay
certificates  a certificate authority of the emulator's own
faults      what goes wrong, as tests ask for it
jails       the sandboxes: real jails that can be frozen, with commands, streams and files
service     what services have in common: refusals, and how a time is written
running     starts an emulator as a process of its own, for fixtures and for `python -m`

Each service has a package here with its routes; `python -m tests.emulators.NAME` starts it and
prints the environment variables with which the SDK finds it.
"""
