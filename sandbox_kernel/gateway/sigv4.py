"""Signs requests to AWS again (Signature Version 4): a client has signed with placeholders, and the
gateway signs the same request with the real key. No I/O.

The request keeps its date, region and service. Chunks that are signed one by one cannot be signed
again, and are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import posixpath
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from sandbox_kernel.gateway.http_head import Headers
from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.secret_values import SecretValue

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
_LIKE_S3 = ("s3", "s3-object-lambda", "s3-outposts", "s3express")
"""Services whose paths are signed as they are; all others sign them encoded once more."""
_NOT_BY_CHUNK = (UNSIGNED, "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_HEADER = re.compile(
    rf"{ALGORITHM} +Credential=(?P<credential>[^, ]+) *, *"
    r"SignedHeaders=(?P<headers>[a-z0-9;._-]+) *, *Signature=(?P<signature>[0-9a-f]{64})"
)
_SCOPE = re.compile(
    r"(?P<date>\d{8})/(?P<region>[\w-]+)/(?P<service>[\w-]+)/aws4_request", re.ASCII
)
_DATE = re.compile(r"\d{8}T\d{6}Z", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}")


def _refused(why: str) -> Refusal:
    return Refusal(400, f"a request to AWS that cannot be signed again: {why}")


@dataclass(frozen=True)
class Signed:
    """What a client has signed, and how."""

    key_id: str
    date: str
    region: str
    service: str
    names: tuple[str, ...]
    in_query: bool

    @property
    def scope(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def read_signed(path_and_query: str, headers: Headers) -> Signed | None:
    """What is signed in a request; None if nothing is. Refusal."""
    given = [value for name, value in headers if name == "authorization"]
    if len(given) == 1 and given[0].startswith("AWS4-"):
        found = _HEADER.fullmatch(given[0])
        if found is None:
            raise _refused("its Authorization is not of AWS4-HMAC-SHA256")
        return _signed(found["credential"], found["headers"], in_query=False)
    query = dict(_pairs(path_and_query.partition("?")[2]))
    if query.get("X-Amz-Algorithm", "").startswith("AWS4-"):
        if query["X-Amz-Algorithm"] != ALGORITHM:
            raise _refused("it is not signed with AWS4-HMAC-SHA256")
        names = query.get("X-Amz-SignedHeaders", "")
        return _signed(query.get("X-Amz-Credential", ""), names, in_query=True)
    return None


def _signed(credential: str, names: str, *, in_query: bool) -> Signed:
    key_id, _, scope = credential.partition("/")
    found = _SCOPE.fullmatch(scope)
    if found is None:
        raise _refused("its credential has no date, region and service")
    words = tuple(sorted({*names.split(";")} - {""}))
    if "host" not in words:
        # Whoever runs a host that the key is bound to could show it to another one.
        raise _refused("its host is not signed")
    return Signed(key_id, found["date"], found["region"], found["service"], words, in_query)


def needs_body(signed: Signed, headers: Headers) -> bool:
    """Whether the signature is over a digest of the body that no header has."""
    return not signed.in_query and not any(name == "x-amz-content-sha256" for name, _ in headers)


def sign(
    signed: Signed,
    key_id: SecretValue,
    key: SecretValue,
    method: str,
    path_and_query: str,
    headers: Headers,
    host: str,
    body: bytes = b"",
) -> tuple[str, Headers]:
    """The request with a new signature: path with query, and headers. Refusal."""
    path, _, query = path_and_query.partition("?")
    credential = f"{key_id.reveal()}/{signed.scope}"
    present = [("host", host), *headers]
    names = tuple(n for n in signed.names if any(n == name for name, _ in present))
    pairs = [(n, v) for n, v in _pairs(query) if n != "X-Amz-Signature"]
    if signed.in_query:
        changed = {"X-Amz-Credential": credential, "X-Amz-SignedHeaders": ";".join(names)}
        pairs = [(n, changed.get(n, v)) for n, v in pairs]
    date = _date(signed, pairs, headers)
    canonical = "\n".join(
        (
            method,
            _canonical_path(signed.service, path),
            _written(sorted((_quoted(n), _quoted(v)) for n, v in pairs)),
            *(f"{name}:{_joined(present, name)}" for name in names),
            "",
            ";".join(names),
            _payload(signed, headers, body),
        )
    )
    digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    text = f"{ALGORITHM}\n{date}\n{signed.scope}\n{digest}"
    signature = _hmac(_signing_key(key, signed), text).hex()
    if signed.in_query:
        quoted = [(_quoted(n), _quoted(v)) for n, v in (*pairs, ("X-Amz-Signature", signature))]
        return f"{path}?{_written(quoted)}", headers
    header = (
        f"{ALGORITHM} Credential={credential}, SignedHeaders={';'.join(names)}, "
        f"Signature={signature}"
    )
    return path_and_query, tuple(
        (name, header if name == "authorization" else value) for name, value in headers
    )


def _date(signed: Signed, pairs: list[tuple[str, str]], headers: Headers) -> str:
    where = pairs if signed.in_query else headers
    found = [value for name, value in where if name.lower() == "x-amz-date"]
    if len(found) != 1 or not _DATE.fullmatch(found[0]):
        raise _refused("it has no X-Amz-Date")
    return found[0]


def _payload(signed: Signed, headers: Headers, body: bytes) -> str:
    given = [value for name, value in headers if name == "x-amz-content-sha256"]
    if len(given) > 1:
        raise _refused("it has two digests of its body")
    if given and not signed.in_query:
        if given[0] not in _NOT_BY_CHUNK and not _HASH.fullmatch(given[0]):
            # Not which: a secret may have been put into that header.
            raise _refused("x-amz-content-sha256 is no digest (chunks that are signed one by one?)")
        return given[0]
    if signed.in_query and signed.service in _LIKE_S3:
        return UNSIGNED
    return hashlib.sha256(body).hexdigest()


def _canonical_path(service: str, path: str) -> str:
    if service in _LIKE_S3:
        return quote(unquote(path, "latin-1"), safe="/~", encoding="latin-1") or "/"
    normal = posixpath.normpath(path).replace("//", "/")
    normal += "/" if path.endswith("/") and normal != "/" else ""
    return quote(normal, safe="/~", encoding="latin-1")


def _pairs(query: str) -> list[tuple[str, str]]:
    parts = (part.partition("=") for part in query.split("&") if part)
    return [(unquote(name, "latin-1"), unquote(value, "latin-1")) for name, _, value in parts]


def _written(pairs: list[tuple[str, str]]) -> str:
    return "&".join(f"{name}={value}" for name, value in pairs)


def _quoted(text: str) -> str:
    return quote(text, safe="~", encoding="latin-1")


def _joined(headers: list[tuple[str, str]], name: str) -> str:
    return ",".join(" ".join(value.split()) for key, value in headers if key == name)


def _signing_key(key: SecretValue, signed: Signed) -> bytes:
    made = f"AWS4{key.reveal()}".encode()
    for part in (signed.date, signed.region, signed.service, "aws4_request"):
        made = _hmac(made, part)
    return made


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
