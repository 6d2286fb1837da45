"""The extra ``gateway``: the packages with which encrypted requests can be read."""

from __future__ import annotations

import functools
import importlib.util

INSTALL = "pip install 'sandbox-kernel[gateway]'"
MISSING = f"encrypted requests can be read only with the extra 'gateway': {INSTALL}"


@functools.cache
def installed() -> bool:
    """Looks for the packages, and imports none."""
    return all(importlib.util.find_spec(name) for name in ("cryptography", "h2"))
