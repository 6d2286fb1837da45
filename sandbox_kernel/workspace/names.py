"""Names of workspaces, and the name that belongs to a notebook."""

from __future__ import annotations

import hashlib
import re
import unicodedata

from sandbox_kernel.spec import NOTEBOOK, check_name

_LONGEST_SLUG = 48


def check_workspace_name(name: str) -> str:
    """The name itself, or SpecError: names become file names in the store."""
    return check_name(name, "A workspace name")


def name_for_notebook(path: str, scope: str = "") -> str:
    """The workspace of a notebook that was given no other name.

    ``path`` is as the contents service says it ("work/demo.ipynb"); ``scope`` tells servers apart
    that serve different folders (their root folder). The name can be read by people and is unique
    to path and scope: ``work-demo-3f2a9c41``.
    """
    plain = unicodedata.normalize("NFKD", path.removesuffix(NOTEBOOK))
    plain = plain.encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[-_LONGEST_SLUG:].strip("-")
    identity = f"{scope}\0{path}".encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(identity).hexdigest()[:8]
    return check_workspace_name(f"{slug or 'notebook'}-{digest}")
