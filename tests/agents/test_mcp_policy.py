"""What the operator of an MCP server decides: the policy, the token, who may connect, and the
ledger of sandboxes. Without kernels."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.agents.mcp import ledger as ledger_module
from sandbox_kernel.agents.mcp.configuration import LEASE, read_policy, settle_environment
from sandbox_kernel.agents.mcp.http_address import accepted_hosts, address_url, listen
from sandbox_kernel.agents.mcp.http_guard import Guard, Receive, Scope, Send
from sandbox_kernel.agents.mcp.ledger import Ledger
from sandbox_kernel.agents.mcp.policy import Door, Limits, Policy
from sandbox_kernel.agents.mcp.token import read_token
from sandbox_kernel.cli import main
from sandbox_kernel.errors import SandboxNotFound, SpecError, SpecRefused
from sandbox_kernel.spec import SETTINGS
from tests.helpers.own_folders import own_folders

POLICY = """
backends = ["local", "superserve"]
notebooks = ["~/notebooks"]
max_sandboxes = 2

[sandbox]
egress = ["files.example"]

[backend.local]
memory_mib = 512

[http]
port = 9000
"""


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_folders() as folder:
        monkeypatch.setenv("HOME", str(folder))
        yield folder


# --- the policy


def test_a_file_and_options_make_a_policy(tmp_path: Path) -> None:
    """Options win over the file, a backend's own table over what all share."""
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    policy = read_policy(str(file), {"max_sandboxes": 3}, {"audit": "none"}, {})
    assert policy.limits.max_sandboxes == 3
    assert policy.limits.notebooks == (f"{Path.home()}/notebooks",)
    assert policy.door.port == 9000
    assert policy.settings["local"]["memory_mib"] == 512
    assert policy.settings["local"]["audit"] == "none"
    assert policy.settings["local"]["lease_seconds"] == LEASE
    assert "memory_mib" not in policy.settings["superserve"]
    assert policy.settings["superserve"]["egress"] == policy.settings["local"]["egress"]


def test_a_policy_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"sandbox": {"lease_seconds": 30}, "install": False}))
    policy = read_policy(str(file), {}, {}, {})
    assert not policy.limits.install
    assert policy.settings["local"]["lease_seconds"] == 30


def test_the_environment_changes_nothing_that_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy without a way out stays so, whatever is in the client's environment; what it leaves
    open is as everywhere."""
    monkeypatch.setenv("SANDBOX_KERNEL_EGRESS", "default=allow")
    monkeypatch.setenv("SANDBOX_KERNEL_MEMORY_MIB", "700")
    file = tmp_path / "policy.toml"
    file.write_text("[sandbox]\negress = []\n")
    settings = read_policy(str(file), {}, {}, {}).settings["local"]
    assert "egress" not in settings
    assert settings["memory_mib"] == 700


def test_a_server_heeds_no_variables_after_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the environment would win over what sandboxes are opened with."""
    for variable in SETTINGS.values():
        monkeypatch.setenv(variable.variable, "default=allow")
    settle_environment()
    assert not {one.variable for one in SETTINGS.values()} & set(os.environ)
    assert "SANDBOX_KERNEL_DATA_DIR" in os.environ


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_sandbox = 2", "'max_sandbox'. Did you mean 'max_sandboxes'?"),
        ("max_sandboxes = 0", "max_sandboxes must be more than 0"),
        ("call_seconds = 59", "call_seconds must be at most 50"),
        ("on_disconnect = 'stay'", "on_disconnect is 'detach' or 'close'"),
        ("backends = ['nowhere']", "no sandbox backend 'nowhere'"),
        ("backends = []", "backends names none"),
        ("notebooks = ['here']", "takes absolute paths, not 'here'"),
        ("sandbox = 3", "takes a table"),
        ("[sandbox]\nname = 'mine'", "unknown key 'name'"),
        ("[sandbox]\nmemory_mb = 3", "Did you mean 'memory_mib'?"),
        ("[sandbox]\nmemory_mib = 3", "must be at least"),
        ("[sandbox]\nimage = 'debian'", "image"),
        ("[backend.boxlite]\ncpus = 1", "unknown key 'boxlite'"),
        ("[http]\nports = 1", "Did you mean 'port'?"),
        ("max_sandboxes", "not valid TOML"),
    ],
)
def test_a_wrong_policy_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """Nothing is guessed, and what a backend cannot enforce is refused at the start."""
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        read_policy(str(file), {}, {}, {})
    assert words in str(refused.value)


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_policy(str(tmp_path / "none.toml"), {}, {}, {})


def test_the_model_chooses_among_backends() -> None:
    policy = Policy(Limits(backends=("local", "superserve")))
    assert policy.choose(None) == "local"
    assert policy.choose("superserve") == "superserve"
    with pytest.raises(SpecRefused, match="'islo' is not allowed here"):
        policy.choose("islo")


def test_notebooks_stay_in_their_folders(tmp_path: Path) -> None:
    """Not through .., absolute paths or links; and only notebooks."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    (inside / "away").symlink_to(outside)
    (inside / "link.ipynb").symlink_to(outside / "target.ipynb")
    policy = Policy(Limits(notebooks=(str(inside),)))
    assert policy.notebook_path("a.ipynb") == inside / "a.ipynb"
    assert policy.notebook_path("deep/a.ipynb") == inside / "deep" / "a.ipynb"
    assert policy.notebook_path(str(inside / "a.ipynb")) == inside / "a.ipynb"
    wrong = ["../a.ipynb", "away/a.ipynb", "link.ipynb", str(outside / "a.ipynb"), "a.py"]
    for asked in [*wrong, "none/a.ipynb", "a\0.ipynb", "", "deep/../../outside/a.ipynb"]:
        with pytest.raises(SpecRefused):
            policy.notebook_path(asked)
    with pytest.raises(SpecRefused, match="operator has named no folder"):
        Policy().notebook_path("a.ipynb")


# --- the ledger


def test_the_ledger_counts_the_sandboxes_of_a_policy() -> None:
    """Those that are gone do not count, and neither do another policy's."""
    existing: set[str] = set()
    ledger, mine = Ledger(lambda: existing), {"mine": "local"}
    ledger.add("a", "mine", mine, 2)
    ledger.add("b", "mine", mine, 2)
    ledger.add("c", "other", {"other": "local"}, 2)
    with pytest.raises(SpecRefused, match="2 sandboxes already, and 2 are allowed"):
        ledger.add("d", "mine", mine, 2)
    ledger.forget("a")
    ledger.add("d", "mine", mine, 2)
    assert ledger.find("d", mine).sandbox == "d"


def test_the_ledger_forgets_what_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed while it made a sandbox does not use up the limit for ever."""
    ledger, mine = Ledger(lambda: {"lives"}), {"mine": "local"}
    ledger.add("lives", "mine", mine, 2)
    ledger.add("never", "mine", mine, 2)
    monkeypatch.setattr(ledger_module, "STARTING", 0.0)
    ledger.add("next", "mine", mine, 2)
    assert ledger.find("lives", mine)
    with pytest.raises(SandboxNotFound):
        ledger.find("never", mine)


@pytest.mark.parametrize("name", ["c", "unknown", "../a", "A", "", "a" * 100, "a\0", "tok en"])
def test_the_ledger_refuses_what_is_not_the_policys(name: str) -> None:
    """In the same words, whether there is such a sandbox or not."""
    ledger = Ledger(set)
    ledger.add("c", "other", {"other": "local"}, 1)
    with pytest.raises(SandboxNotFound, match="There is no sandbox"):
        ledger.find(name, {"mine": "local"})


def test_a_changed_policy_is_another() -> None:
    """Sandboxes that were made with more than is allowed now are not touched again."""
    before = Policy(settings={"local": {"egress": {"allow": ["files.example"]}}})
    assert before.fingerprint("local") != Policy(settings={"local": {}}).fingerprint("local")
    assert before.fingerprint("local") in before.fingerprints()


# --- the token, and who may connect


def test_a_token_is_made_once_and_for_this_user_only(folders: Path) -> None:
    token = read_token(None)
    assert len(token) >= 32
    assert read_token(None) == token
    mode = (folders / "data" / "mcp" / "token").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("x" * 32, 0o644, "Others can read"),
        ("short", 0o600, "needs one line of 16"),
        ("two words of length enough", 0o600, "without spaces"),
        ("x" * 2000, 0o600, "needs one line"),
    ],
)
def test_a_weak_token_is_refused(tmp_path: Path, content: str, mode: int, words: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(SpecError, match=words):
        read_token(str(file))


TOKEN = "t" * 32


def guard(*origins: str) -> Guard:
    async def unreachable(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    return Guard(unreachable, token=TOKEN, hosts=("127.0.0.1:80", "[::1]:80"), origins=origins)


def headers(**given: str) -> list[tuple[bytes, bytes]]:
    values = {"host": "127.0.0.1:80", "authorization": f"Bearer {TOKEN}", **given}
    return [(name.encode(), value.encode("latin-1")) for name, value in values.items() if value]


def test_the_guard_lets_in_who_has_the_token() -> None:
    assert guard().refusal(headers()) == (0, b"")
    assert guard().refusal(headers(host="[::1]:80", authorization=f"bearer {TOKEN}"))[0] == 0
    assert guard("http://a.example").refusal(headers(origin="http://a.example"))[0] == 0


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"host": "evil.example:80"}, 421),
        ({"host": "127.0.0.1:81"}, 421),
        ({"host": "127.0.0.1:80.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:80"}, 403),
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer " + "t" * 31}, 401),
        ({"authorization": "Bearer " + "\xff" * 32}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
    ],
)
def test_the_guard_refuses_others(given: dict[str, str], code: int) -> None:
    """By Host first, so that a page learns nothing about tokens."""
    assert guard().refusal(headers(**given))[0] == code


def test_the_guard_refuses_doubled_headers() -> None:
    """Two programs on the way might read different ones."""
    assert guard().refusal([*headers(), (b"host", b"127.0.0.1:80")])[0] == 421
    assert guard().refusal([*headers(), (b"authorization", b"Bearer x")])[0] == 401


def test_only_loopback_unless_the_operator_says_so() -> None:
    with pytest.raises(SpecError, match="Other machines may reach"):
        listen(Door(host="0.0.0.0"))
    with pytest.raises(SpecError, match="takes an address"):
        listen(Door(host="localhost"))
    taken = pytest.raises(SpecError, match="cannot be used: Address already in use")
    with listen(Door(port=0)) as listening, taken:
        listen(Door(port=listening.getsockname()[1]))


def test_hosts_by_which_a_server_is_known() -> None:
    assert accepted_hosts(Door(), 8808) == ("127.0.0.1:8808", "localhost:8808", "[::1]:8808")
    named = Door(host="192.0.2.1", allowed_hosts=("agents.example",))
    assert accepted_hosts(named, 8808) == ("agents.example",)
    assert address_url("::1", 1) == "http://[::1]:1/mcp"


# --- what to paste


@pytest.mark.parametrize(
    ("client", "servers"),
    [("claude", "mcpServers"), ("cursor", "mcpServers"), ("vscode", "servers")],
)
def test_print_config(
    client: str,
    servers: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same options, with paths that hold in any folder. Only JSON is on stdout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text("max_sandboxes = 2")
    given = ["--config", "p.toml", "--notebooks", "nb", "--no-install", "--egress", "@pip"]
    assert main(["mcp", *given, "--print-config", client]) == 0
    entry = json.loads(capsys.readouterr().out)[servers]["sandbox-kernel"]
    assert os.access(entry["command"], os.X_OK)
    assert entry["args"][-8:] == [
        *("mcp", "--config", str(tmp_path / "p.toml"), "--notebooks", str(tmp_path / "nb")),
        *("--no-install", "--egress", "@pip"),
    ]


def test_print_config_for_http(capsys: pytest.CaptureFixture[str]) -> None:
    """With the token that the server will want."""
    assert main(["mcp", "--http", "--print-config", "vscode"]) == 0
    entry = json.loads(capsys.readouterr().out)["servers"]["sandbox-kernel"]
    assert entry["url"] == "http://127.0.0.1:8808/mcp"
    assert entry["headers"] == {"Authorization": f"Bearer {read_token(None)}"}


def test_print_config_needs_a_sound_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed that would fail when the client starts it."""
    assert main(["mcp", "--image", "debian", "--print-config", "claude"]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert "image" in found.err
