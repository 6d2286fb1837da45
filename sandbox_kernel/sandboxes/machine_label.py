"""What the backends of hosted services share."""

from __future__ import annotations

import os


def label() -> str:
    """Under which sandboxes of several machines belong together. Each backend puts it where its
    service can hold it, and checks it for that."""
    return os.environ.get("SANDBOX_KERNEL_LABEL", "default")
