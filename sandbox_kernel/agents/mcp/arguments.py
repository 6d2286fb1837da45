"""Arguments that several tools have, with what a client is told about them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

SandboxName = Annotated[
    str, Field(min_length=1, max_length=63, description="name of the sandbox, as `open` gave it")
]
JobId = Annotated[str, Field(min_length=1, max_length=200, description="the job, as `run` gave it")]
Wait = Annotated[
    float | None,
    Field(
        ge=0, le=3600, description="seconds to wait for the end (default and most: the server's)"
    ),
]
FilePath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=4000,
        description="path in the sandbox's workspace, relative to it",
    ),
]
