"""The host's Python in the jail: what is shown, what is hidden, and the overlay on top of it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.paths import data_dir
from sandbox_kernel.sandboxes.local import bubblewrap, environment, system_mounts
from sandbox_kernel.sandboxes.local.environment import PythonEnvironment, describe
from sandbox_kernel.sandboxes.local.mounts import Bind, Symlink
from sandbox_kernel.sandboxes.local.overlay_venv import overlay_venv

from .jails import NOBODY, SYSTEM_PYTHON, Jails, public_bwrap, public_folder

TARGET = "/home/sandbox/.venv"
BASE_PYTHON = os.path.realpath(sys.executable)
pytestmark = pytest.mark.usefixtures("own_dirs")


@pytest.fixture
def here() -> Jails:
    """Jails of this user's."""
    return Jails(bubblewrap.find())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a secret in it."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "secret").write_text("hunter2")
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def venv(home: Path) -> Path:
    """A virtual environment (without pip) in the home folder."""
    return make_venv(home / "venv")


def make_venv(folder: Path, *options: str, pip: bool = False, python: str = BASE_PYTHON) -> Path:
    options = options if pip else ("--without-pip", *options)
    subprocess.run([python, "-m", "venv", *options, folder], check=True, timeout=120)
    return folder


def site_packages(venv: Path) -> Path:
    (found,) = venv.glob("lib/python3.*/site-packages")
    return found


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel of one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


def host_install(venv: Path, wheel: Path) -> None:
    """Install a wheel into a virtual environment of the host's, as pip would."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages(venv))


class Kernel:
    """Runs code in a jail as a kernel there would: with the overlay's interpreter."""

    def __init__(self, jails: Jails, env: PythonEnvironment, folder: Path) -> None:
        self.jails, self.env, self.overlay = jails, env, folder / "overlay"
        self.python = overlay_venv(env, self.overlay, TARGET)
        self.binds = [
            *env.binds(),
            Bind(str(self.overlay), TARGET, writable=True),
            Bind(str(folder), "/wheels"),
        ]

    def answer(self, code: str) -> Any:
        path = [f"{TARGET}/bin", *self.env.path_entries(), "/usr/bin", "/bin"]
        return self.jails.answer(
            code,
            python=self.python,
            binds=self.binds,
            env={"HOME": "/home/sandbox", "PATH": ":".join(path), **self.env.variables()},
            cwd="/tmp",
        )

    def pip(self, *arguments: str) -> str:
        """Run pip in the jail, as ``%pip`` does."""
        command = ["-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments]
        return str(
            self.answer(
                f"""
import subprocess
ran = subprocess.run([sys.executable, *{command!r}], capture_output=True, text=True)
assert ran.returncode == 0, ran.stdout + ran.stderr
answer(ran.stdout)
"""
            )
        )

    def version_of(self, module: str) -> str | None:
        return self.answer(  # type: ignore[no-any-return]
            f"""
try:
    import {module}
    answer({module}.VERSION)
except ImportError:
    answer(None)
"""
        )


# Describing an interpreter


def test_a_virtual_environment_is_described(venv: Path) -> None:
    """The path that was asked for stays, and the real interpreter behind it is found."""
    found = describe(str(venv / "bin/python"))
    assert found.executable == str(venv / "bin/python")
    assert found.base_executable == BASE_PYTHON
    assert (found.prefix, found.base_prefix) == (str(venv), sys.base_prefix)
    assert found.version == sys.version_info[:2]
    assert found.site_packages == (str(site_packages(venv)),)
    assert (found.user_site, found.extra_paths) == (None, ())
    assert found.path_entries() == [str(venv / "bin"), os.path.dirname(BASE_PYTHON)]
    assert found.is_venv


def test_a_copied_interpreter_has_its_base(home: Path) -> None:
    """A virtual environment made with --copies leads back to the interpreter it came from."""
    venv = make_venv(home / "copied", "--copies")
    assert describe(str(venv / "bin/python")).base_executable == BASE_PYTHON


def test_the_answer_is_kept_until_something_changes(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start costs no process; a new package, .pth file or user site does."""
    asked = []
    ask = environment._ask

    def counted(python: str) -> dict[str, Any]:
        asked.append(python)
        return ask(python)

    monkeypatch.setattr(environment, "_ask", counted)
    python = str(venv / "bin/python")
    project = venv.parent / "project"
    first = describe(python)
    assert describe(python) == first
    assert len(asked) == 1

    pth = site_packages(venv) / "project.pth"
    pth.write_text(f"{project}\n")
    assert describe(python).extra_paths == ()  # the folder is not there yet
    project.mkdir()
    assert describe(python).extra_paths == (str(project),)
    assert describe(python).extra_paths == (str(project),)
    assert len(asked) == 3

    pth.write_text("")
    os.utime(pth, ns=(1, 1))
    assert describe(python).extra_paths == ()
    for kept in (data_dir() / "cache").iterdir():
        kept.write_text("[damaged")
    assert describe(python) == first


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    """The error names the field of the spec and what happened."""
    other, old = tmp_path / "other", tmp_path / "old"
    other.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    old.write_text("""#!/bin/sh\necho '{"version": [3, 6]}'\n""")
    for path in (other, old):
        path.chmod(0o755)
    with pytest.raises(SpecError, match=r"python='.*other'.*no such thing"):
        describe(str(other))
    with pytest.raises(SpecError, match=r"Python 3\.6; a sandbox needs 3\.9"):
        describe(str(old))
    with pytest.raises(SpecError, match="does not run"):
        describe(str(tmp_path / "missing"))
    with pytest.raises(SpecError, match="absolute"):
        describe("python3")


# Editable installs


def test_paths_of_pth_files_are_shown(here: Jails, venv: Path, tmp_path: Path) -> None:
    """`import myproject` works in the jail as it does in a local kernel."""
    source = venv.parent / "project/src"
    source.mkdir(parents=True)
    (source / "myproject.py").write_text("VERSION = 'editable'\n")
    (site_packages(venv) / "myproject.pth").write_text(f"{source}\n")
    found = describe(str(venv / "bin/python"))
    assert found.extra_paths == (str(source),)
    kernel = Kernel(here, found, tmp_path)
    assert kernel.version_of("myproject") == "editable"
    home = kernel.answer(f"answer([os.listdir(p) for p in {[str(venv.parent)]}])")
    assert sorted(home[0]) == ["project", "venv"]


def test_editable_finders_are_shown(here: Jails, venv: Path, tmp_path: Path) -> None:
    """An editable install of setuptools' that maps names to folders works, too."""
    package = venv.parent / "project/package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 'mapped'\n")
    (package.parent / ".env").write_text("SECRET=1\n")
    (site_packages(venv) / "__editable___package_finder.py").write_text(
        f"""
import sys, importlib.util
MAPPING = {{"package": {str(package)!r}}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return importlib.util.spec_from_file_location(name, MAPPING[name] + "/__init__.py")
def install():
    sys.meta_path.append(Finder)
"""
    )
    (site_packages(venv) / "package.pth").write_text(
        "import __editable___package_finder; __editable___package_finder.install()\n"
    )
    found = describe(str(venv / "bin/python"))
    assert found.editable_paths == (str(package),)
    kernel = Kernel(here, found, tmp_path)
    assert kernel.version_of("package") == "mapped"
    assert kernel.answer(f"answer(os.listdir({str(package.parent)!r}))") == ["package"]


def test_paths_that_would_show_the_home_folder_are_left_out(venv: Path) -> None:
    """A .pth file that names the home folder, or more, opens nothing."""
    wide = [str(venv.parent), str(venv.parent.parent), "/", "/tmp", "/etc"]
    (site_packages(venv) / "wide.pth").write_text("\n".join(wide))
    found = describe(str(venv / "bin/python"))
    assert found.extra_paths == ()
    assert not {mount.target for mount in found.binds()} & set(wide)


def test_an_interpreter_whose_folder_is_the_home_folder_is_refused(venv: Path) -> None:
    """It could not be shown without everything else that is there."""
    found = replace(describe(str(venv / "bin/python")), prefix=str(venv.parent))
    with pytest.raises(SpecError, match="holds the home folder"):
        found.binds()


# What the jail sees


def test_every_link_on_the_way_leads_there(here: Jails, venv: Path, tmp_path: Path) -> None:
    """bin/python may be a link to a link in a linked folder; all of it works in the jail."""
    hops = venv.parent / "hops"
    (hops / "real").mkdir(parents=True)
    (hops / "real/python").symlink_to(BASE_PYTHON)
    (hops / "current").symlink_to("real")
    (hops / "secret").write_text("hunter2")
    link = venv / "bin/python"
    link.unlink()
    link.symlink_to("../../hops/current/python")
    (tmp_path / "elsewhere").symlink_to(venv.parent)
    asked = tmp_path / "elsewhere/venv/bin/python"

    mounts = describe(str(asked)).binds()
    links = {mount.target: mount.source for mount in mounts if isinstance(mount, Symlink)}
    assert links == {
        str(tmp_path / "elsewhere"): str(venv.parent),
        str(hops / "current"): "real",
        str(hops / "real/python"): BASE_PYTHON,
    }
    found = here.answer(
        f"answer([sys.prefix, os.listdir({str(hops)!r}), os.listdir({str(venv.parent)!r})])",
        python=str(asked),
        binds=mounts,
    )
    assert os.path.realpath(found[0]) == str(venv)
    assert [sorted(names) for names in found[1:]] == [["current", "real"], ["hops", "venv"]]


def test_the_home_folder_is_not_visible(here: Jails, venv: Path, tmp_path: Path) -> None:
    """Of the folder in which the environment lies, the jail sees the environment only."""
    kernel = Kernel(here, describe(str(venv / "bin/python")), tmp_path)
    found = kernel.answer(
        f"""
def writable(path):
    try:
        open(path + "/probe", "w").close()
        return True
    except OSError:
        return False
answer([os.listdir({str(venv.parent)!r}), writable({str(venv)!r}), writable({TARGET!r})])
"""
    )
    assert found == [["venv"], False, True]


def test_the_system_is_shown_without_its_secrets(here: Jails) -> None:
    """Shells, TLS and time zones work; accounts, host names and private keys are not there."""
    found = here.answer(
        """
import glob, ssl, subprocess, time
hidden = ("passwd", "shadow", "hosts", "resolv.conf", "hostname", "machine-id", "ssh", "sudoers",
          "ssl/private", "pip.conf", "fstab", "environment")
answer([subprocess.run(["sh", "-c", "ls / | wc -l"], capture_output=True).returncode,
        time.strftime("%Z") != "", [n for n in hidden if os.path.lexists("/etc/" + n)]])
"""
    )
    assert found == [0, True, []]


def test_the_jail_has_its_own_accounts_and_hosts(here: Jails, tmp_path: Path) -> None:
    """The user is `sandbox` with a home, and the host's name leads to itself."""
    binds = system_mounts.write_identity(tmp_path / "identity", "jail")
    found = here.answer(
        """
import getpass, grp, pwd, socket
answer([pwd.getpwuid(os.getuid()).pw_name, pwd.getpwuid(os.getuid()).pw_dir,
        grp.getgrgid(os.getgid()).gr_name, socket.gethostbyname(socket.gethostname())])
""",
        binds=binds,
    )
    assert found == ["sandbox", "/home/sandbox", "sandbox", "127.0.0.1"]


# The overlay


def test_the_kernels_own_packages_come_from_the_parent(here: Jails, tmp_path: Path) -> None:
    """The environment that runs these tests is shown; ipykernel is imported from it."""
    kernel = Kernel(here, describe(sys.executable), tmp_path)
    found = kernel.answer(
        """
import ipykernel.kernelapp, psutil, zmq
from jupyter_core.paths import jupyter_path
answer([sys.prefix, sys.executable, ipykernel.__file__, psutil.cpu_count() >= 1, jupyter_path()])
"""
    )
    assert found[:2] == [TARGET, f"{TARGET}/bin/python"]
    assert found[2].startswith(sys.prefix + "/")
    assert found[3]
    assert f"{sys.prefix}/share/jupyter" in found[4]


def test_sys_path_is_in_order(here: Jails, venv: Path, tmp_path: Path) -> None:
    """Standard library, then the overlay, then the parent, each once."""
    kernel = Kernel(here, describe(str(venv / "bin/python")), tmp_path)
    path = kernel.answer("answer(sys.path)")
    assert len(path) == len(set(path))
    stdlib = next(p for p in path if p.endswith(f"/lib/python3.{sys.version_info[1]}"))
    overlay = next(p for p in path if p.startswith(TARGET))
    assert path.index(stdlib) < path.index(overlay) < path.index(str(site_packages(venv)))


def test_pip_installs_into_the_overlay(here: Jails, venv: Path, tmp_path: Path) -> None:
    """What is installed in the jail is importable at once and leaves the host alone. The parent
    has no pip; the jail gets it from ensurepip's wheel."""
    make_wheel(tmp_path, "tiny", "1.0")
    kernel = Kernel(here, describe(str(venv / "bin/python")), tmp_path)
    kernel.pip("install", "--no-index", "--find-links", "/wheels", "tiny")
    assert kernel.version_of("tiny") == "1.0"
    assert (site_packages(kernel.overlay) / "tiny.py").exists()
    assert not (site_packages(venv) / "tiny.py").exists()
    # Refreshing the overlay at the next start keeps it.
    assert Kernel(here, kernel.env, tmp_path).version_of("tiny") == "1.0"


def test_an_upgrade_wins_over_the_parent(here: Jails, tmp_path: Path) -> None:
    """pip of the parent sees the parent's packages, and what it installs hides them."""
    venv = make_venv(tmp_path / "with pip", pip=True)
    wheels = [make_wheel(tmp_path, "tiny", version) for version in ("1.0", "2.0")]
    host_install(venv, wheels[0])
    env = describe(str(venv / "bin/python"))
    assert env.pip_wheel is None
    kernel = Kernel(here, env, tmp_path)
    assert kernel.version_of("tiny") == "1.0"
    said = kernel.pip("install", "--no-index", "--find-links", "/wheels", "tiny")
    assert "already satisfied" in said
    kernel.pip("install", "--no-index", "--find-links", "/wheels", "--upgrade", "tiny")
    assert kernel.version_of("tiny") == "2.0"
    assert (site_packages(venv) / "tiny.py").read_text() == "VERSION = '1.0'\n"


def test_the_parents_later_packages_are_seen(here: Jails, venv: Path, tmp_path: Path) -> None:
    """pip install on the host, restart the kernel, import."""
    kernel = Kernel(here, describe(str(venv / "bin/python")), tmp_path)
    assert kernel.version_of("tiny") is None
    host_install(venv, make_wheel(tmp_path, "tiny", "1.0"))
    assert kernel.version_of("tiny") == "1.0"


def test_an_interpreter_without_a_virtual_environment(here: Jails, tmp_path: Path) -> None:
    """The system's Python keeps its packages, and its user's, and gets a writable side."""
    base = tmp_path / "userbase"
    major, minor = describe(SYSTEM_PYTHON).version
    user = base / f"lib/python{major}.{minor}/site-packages"
    user.mkdir(parents=True)
    (user / "mine.py").write_text("VERSION = 'user'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONUSERBASE", str(base))
        env = describe(SYSTEM_PYTHON)
    assert (env.is_venv, env.user_site) == (False, str(user))
    kernel = Kernel(here, env, tmp_path)
    assert kernel.version_of("mine") == "user"
    assert set(env.site_packages) <= set(kernel.answer("answer(sys.path)"))


def test_a_virtual_environment_that_sees_the_system(here: Jails, home: Path) -> None:
    """--system-site-packages holds for the overlay, too."""
    venv = make_venv(home / "open", "--system-site-packages")
    env = describe(str(venv / "bin/python"))
    assert env.system_site
    path = Kernel(here, env, home.parent).answer("answer(sys.path)")
    own, *base = env.site_packages
    assert own == str(site_packages(venv))
    assert path.index(own) < min(path.index(folder) for folder in base)


def test_for_an_ordinary_user() -> None:
    """All of it works for a user without any rights."""
    if os.getuid() != 0:
        pytest.skip("this user is an ordinary one already")
    with public_folder() as tools, public_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)
        venv = make_venv(folder / "venv", python=SYSTEM_PYTHON)
        make_wheel(folder, "tiny", "1.0")
        kernel = Kernel(
            Jails(public_bwrap(tools), NOBODY), describe(str(venv / "bin/python")), folder
        )
        for path in (kernel.overlay, *kernel.overlay.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        kernel.pip("install", "--no-index", "--find-links", "/wheels", "tiny")
        assert kernel.version_of("tiny") == "1.0"


# The overlay's folder belongs to the jail, so it may hold anything


def test_links_in_the_overlay_are_not_followed(venv: Path, tmp_path: Path) -> None:
    """A link that the jail left behind does not make the host write somewhere else."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    env = describe(str(venv / "bin/python"))
    overlay = tmp_path / "overlay"
    overlay_venv(env, overlay, TARGET)
    pth = site_packages(overlay) / "zzz_sandbox_parent.pth"
    for place in (overlay / "pyvenv.cfg", overlay / "bin/python", pth):
        place.unlink()
        place.symlink_to(victim / "file")
    overlay_venv(env, overlay, TARGET)
    assert os.readlink(overlay / "bin/python") == BASE_PYTHON

    (overlay / "lib").rename(overlay / "old")
    (overlay / "lib").symlink_to(victim)
    overlay_venv(env, overlay, TARGET)
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == "untouched"
    assert not (overlay / "lib").is_symlink()


def test_an_overlay_that_cannot_be_repaired_is_reported(venv: Path, tmp_path: Path) -> None:
    """The error says which folder to delete, and nothing is left lying about."""
    env = describe(str(venv / "bin/python"))
    overlay = tmp_path / "overlay"
    (overlay / "pyvenv.cfg").mkdir(parents=True)
    with pytest.raises(SandboxError, match=rf"{overlay}.*Delete that folder"):
        overlay_venv(env, overlay, TARGET)
    assert sorted(os.listdir(overlay)) == ["bin", "lib", "lib64", "pyvenv.cfg"]
