"""``sandbox-kernel policy``: what egress rules mean, and those of sandboxes that run."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli.commands import live_policy, policy_learn
from sandbox_kernel.cli.options import Commands, add_command, add_group
from sandbox_kernel.untrusted_text import printable


def add(commands: Commands) -> None:
    below = add_group(commands, "policy", about)
    parser = add_command(below, "check", check)
    parser.add_argument("file", metavar="FILE", help="JSON, or one rule a line with # for comments")
    parser.add_argument("url", metavar="URL", help="a URL, or HOST:PORT")
    parser.add_argument("--method", default="GET", metavar="M", help="default: GET")
    live_policy.add(below)
    policy_learn.add(below)


def about(arguments: argparse.Namespace) -> None:
    """Look at egress policies: which hosts may be reached, and how; and change a running sandbox's.

    examples:
      sandbox-kernel policy set kernel-1a2b +data.example
      sandbox-kernel policy check rules.txt https://data.example/v1/table
      sandbox-kernel policy learn analysis.ipynb > rules.txt
    """


def check(arguments: argparse.Namespace) -> int:
    """Say whether a policy lets a request out, which rule decides, and why.

    Nothing is sent. What the gateway cannot read (HOST:PORT, and without the extra 'gateway'
    https) is decided by host and port alone. Exit codes: 0 allowed, 1 denied, 2 the policy is
    wrong.

    examples:
      sandbox-kernel policy check rules.txt https://data.example/v1/table
      sandbox-kernel policy check rules.json http://data.example/upload --method POST
      sandbox-kernel policy check rules.txt db.example:5432
    """
    from sandbox_kernel.gateway.decisions import judge_connection, judge_request, reads_requests
    from sandbox_kernel.gateway.names import NameRefused, read_authority, read_url
    from sandbox_kernel.gateway.policy_file import read_policy_file
    from sandbox_kernel.gateway.presets import expand
    from sandbox_kernel.gateway.tls import extra

    policy = expand(read_policy_file(arguments.file)).policy
    url = arguments.url.partition("#")[0]
    try:
        if "://" in url:
            scheme, target, path = read_url(url)
        else:
            scheme, target, path = "", read_authority(url, None), "/"
    except NameRefused as refusal:
        print(f"deny: {refusal}")
        return 1
    plain = scheme in ("http", "ws")
    # As a sandbox's gateway does: it ends TLS for hosts whose rules look at requests.
    reads = scheme in ("https", "wss") and reads_requests(policy, target) and extra.installed()
    if plain or reads:
        method = arguments.method.upper()
        decision = judge_request(policy, target, method, path.partition("?")[0])
    else:
        decision = judge_connection(policy, target)
    if decision.allowed:
        print(f"allow: {target} ({printable(decision.reason)})")
        return 0
    print(f"deny: {printable(decision.denial(target).removeprefix('egress denied: '))}")
    return 1
