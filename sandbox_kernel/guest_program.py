"""The program that runs inside sandboxes: the sources of ``wire/`` and ``guest/`` as one package.

Backends that copy it into the sandbox send ``zipapp()``; the local jail mounts a compiled copy
(``sandboxes/local/guest_copy.py``); what must run before a file can be copied, or without one, is
the text of a command line (``program()``). All import it as PACKAGE, so that it never mixes with a
``sandbox_kernel`` that may be installed in the sandbox.
"""

from __future__ import annotations

import ast
import base64
import functools
import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "sandbox_guest"
_WARM = "guest/warm/"
"""Run by the warm interpreter, imported by nobody."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LOADER = """
import sys
class Program:
    modules = {modules!r}
    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return type(sys.__spec__)(name, self, is_package=self.modules[name][0])
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(self.modules[module.__name__][1], module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Program())
from {main} import main
sys.exit(main())
"""


def sources() -> dict[str, bytes]:
    """Path below the package -> content, sorted by path."""
    here = Path(__file__).parent
    paths = [*(here / "guest").rglob("*.py"), *(here / "wire").rglob("*.py")]
    found = {path.relative_to(here).as_posix(): path.read_bytes() for path in paths}
    return dict(sorted({"__init__.py": b"", **found}.items()))


@functools.cache
def zipapp() -> bytes:
    """A zip that ``python3 guest.pyz agent ...`` runs. The same sources give the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        main = f"import sys\nfrom {PACKAGE}.guest.__main__ import main\nsys.exit(main())\n"
        needed = {f"{PACKAGE}/{path}": text for path, text in _needed("guest/__main__").items()}
        for path, content in {"__main__.py": main.encode(), **needed}.items():
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


@functools.cache
def program(module: str) -> str:
    """A text for ``python3 -c`` that runs ``main`` of one module of ours, such as
    ``guest.commands.single``. It holds that module and all those of ours that it imports."""
    modules = {
        _module_name(path): (path.endswith("__init__.py"), content.decode())
        for path, content in _needed(module.replace(".", "/")).items()
    }
    text = _LOADER.format(modules=modules, main=f"{PACKAGE}.{module}")
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return f"import binascii,zlib;exec(zlib.decompress(binascii.a2b_base64({packed!r})))"


def _needed(path: str) -> dict[str, bytes]:
    """The sources of a module, its packages, and all modules of ours that it imports."""
    all_sources = sources()
    found: dict[str, bytes] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        file = f"{path}.py" if f"{path}.py" in all_sources else f"{path}/__init__.py".lstrip("/")
        if file in found or file not in all_sources:  # e.g. a class, imported by its name
            continue
        found[file] = all_sources[file]
        waiting.append(path.rpartition("/")[0])
        waiting += _imported(ast.parse(found[file]), file.rpartition("/")[0].split("/"))
    if "guest/warm_process.py" in found:
        found |= {name: text for name, text in all_sources.items() if name.startswith(_WARM)}
    return dict(sorted(found.items()))


def _imported(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """Paths of what a module imports from this package, in functions, too; not for types only."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            yield "/".join(base)
            yield from ("/".join([*base, alias.name]) for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def _module_name(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("__init__").strip("/").split("/")
    return ".".join([PACKAGE, *filter(None, parts)])
