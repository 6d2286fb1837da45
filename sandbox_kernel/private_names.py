"""Names of files that no sandbox is shown of a notebook's folder, whatever a setting says.

The one list for copies (``workspace/imports.py``) and for mounts (``sandboxes/local``).
"""

from __future__ import annotations

HIDDEN = ".*"
KEYS = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "*.keystore", "*.jks", "*.ppk", "*.gpg"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials.json", "client_secret*.json", "service-account*.json", "service_account*.json"),
)
"""Private keys and passwords, as patterns for a name, in lower case."""
