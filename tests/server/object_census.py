"""An extension that lets a test count what the server's process holds of us."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import MutableMapping, MutableSet
from typing import Any

from jupyter_server.base.handlers import JupyterHandler

PATH = "/census"


class _CensusHandler(JupyterHandler):
    def get(self) -> None:
        """Instances of each of our classes, and how long their collections are in all."""
        for _ in range(2):
            gc.collect()
        found: Counter[str] = Counter()
        for thing in gc.get_objects():
            if str(type(thing).__module__).startswith("sandbox_kernel."):
                found[type(thing).__qualname__] += 1
                for name, value in getattr(thing, "__dict__", {}).items():
                    if isinstance(value, MutableMapping | MutableSet | list):
                        found[f"{type(thing).__qualname__}.{name}"] += len(value)
        self.finish(dict(found))


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: Any) -> None:
    app.web_app.add_handlers(".*$", [(PATH, _CensusHandler)])
