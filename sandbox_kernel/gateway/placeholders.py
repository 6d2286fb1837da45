"""What stands for a secret in the sandbox: random, of the value's form, and with nothing of it."""

from __future__ import annotations

import re
import secrets
import string
import uuid

from sandbox_kernel.secret_declarations import PUBLIC_PREFIXES

_LEAST_RANDOM = 16
"""Random characters of a placeholder, at least: one for a shorter value is longer than it."""
_LETTERS = string.ascii_letters + string.digits
_ALPHABETS = (
    ("0123456789", string.digits),
    ("0123456789abcdef", string.digits + "abcdef"),
    ("0123456789ABCDEF", string.digits + "ABCDEF"),
    (string.ascii_lowercase + string.digits, string.ascii_lowercase + string.digits),
    (string.ascii_uppercase + string.digits, string.ascii_uppercase + string.digits),
)
"""The characters of a value, and those of its placeholder. All others get letters and digits, which
every encoding leaves as they are."""
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_FORM = re.compile(r"[\x21-\x7e]{16,65536}")


def placeholder_for(value: str) -> str:
    """A new one, as long as the value unless that is short. It begins like the value only where
    that is how all values of a well-known kind begin."""
    if _UUID.fullmatch(value):
        return str(uuid.uuid4())
    prefix = next((known for known in PUBLIC_PREFIXES if value.startswith(known)), "")
    rest = set(value[len(prefix) :])
    found = (letters for characters, letters in _ALPHABETS if rest <= set(characters))
    alphabet = next(found, _LETTERS)
    length = max(len(value) - len(prefix), _LEAST_RANDOM)
    return prefix + "".join(secrets.choice(alphabet) for _ in range(length))


def is_placeholder(text: object) -> bool:
    """Whether a text that was kept with a sandbox can be one."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None
