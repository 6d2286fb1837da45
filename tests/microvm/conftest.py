"""These tests need real microVMs, so they run in the rig only: ``make test-microvm``."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("SANDBOX_KERNEL_RIG") else ["test_*.py"]
