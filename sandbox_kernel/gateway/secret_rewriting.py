"""The Rewriting of a sandbox with secrets: puts them into requests, and takes them out of answers.

A placeholder is replaced only in a request to a host that its secret is bound to, in the places
that its declaration names, and over TLS unless it says otherwise. Nothing else that goes in or
comes back depends on a value: what an answer echoes is replaced by text of the same length.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sandbox_kernel.gateway import sigv4
from sandbox_kernel.gateway.audit import Sink, secret_event
from sandbox_kernel.gateway.framed_replacing import (
    FramedReplacer,
    grpc_header,
    websocket_header,
)
from sandbox_kernel.gateway.http_head import Headers
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.replacing import Replacements, Replacer
from sandbox_kernel.gateway.rewriting import (
    Filter,
    Follows,
    RewrittenRequest,
    RewrittenResponse,
)
from sandbox_kernel.gateway.secret_forms import (
    LONGEST_FORM,
    escape_for,
    in_url,
    shown_as,
    url_pattern,
)
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.secret_declarations import SecretDeclaration

_GRPC = re.compile(r"application/grpc(\+|;|$)")
_TOKEN = re.compile(r"(?<=X-Amz-Security-Token=)[^&]*")


@dataclass(frozen=True)
class HeldSecret:
    """A secret of one sandbox: what is declared, what the sandbox has, and what the host has."""

    declared: SecretDeclaration
    placeholder: str
    value: SecretValue | None
    problem: str = ""
    """Why there is no value."""
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", url_pattern(self.placeholder))

    @property
    def name(self) -> str:
        return self.declared.name

    def text(self) -> str:
        """The value, for a request. Refusal if there is none."""
        if self.value is None:
            raise Refusal(502, f"egress failed: {self.problem}")
        return self.value.reveal()


class SecretRewriting:
    """For one sandbox and its gateway, on one event loop."""

    def __init__(
        self, secrets: Iterable[HeldSecret], audit: Sink, sandbox: str | None = None
    ) -> None:
        self._secrets = tuple(one for one in secrets if not one.declared.expose)
        self._audit = audit
        self._sandbox = sandbox
        self._shown: dict[tuple[str, ...], Replacements] = {}

    def concerns(self, target: Target) -> bool:
        return any(one.declared.is_bound_to(target.host, target.port) for one in self._secrets)

    def request(
        self,
        target: Target,
        method: str,
        path_and_query: str,
        headers: Headers,
        *,
        secure: bool = False,
    ) -> RewrittenRequest:
        bound = [s for s in self._secrets if s.declared.is_bound_to(target.host, target.port)]
        change = _Change(target, bound, secure)
        if any(one.declared.knows(target.host) for one in self._secrets):
            headers = _without_encodings(headers)
        signed = self._signed(bound, path_and_query, headers)
        result = change.made(path_and_query, headers, signed)
        if signed is not None:
            result = self._sign(change, signed, method, result)
        self._record_kept(target, bound, result)
        return result

    def response(
        self,
        target: Target,
        headers: Headers,
        reason: str = "",
        *,
        follows: Follows = Follows.BODY,
    ) -> RewrittenResponse:
        known = [one for one in self._secrets if one.declared.knows(target.host)]
        shown = self._shown_by(known)
        if not shown:
            return RewrittenResponse(headers, reason=reason)
        if _is_encoded(headers):
            raise Refusal(
                502,
                f"the answer of {target} is compressed, so that a secret in it could not be found",
            )
        clean: Headers = tuple((name, _replaced(shown, value)) for name, value in headers)
        body = _filter(shown, headers, follows)
        return RewrittenResponse(clean, body, _replaced(shown, reason))

    def _shown_by(self, known: Sequence[HeldSecret]) -> Replacements:
        names = tuple(one.name for one in known)
        if names not in self._shown:
            pairs: dict[bytes, bytes] = {}
            longest = 0
            for one in known:
                if one.value is not None:
                    pairs.update(shown_as(one.value.reveal(), one.placeholder))
                    longest = max(longest, len(one.value))
            self._shown[names] = Replacements(pairs, hold=longest * LONGEST_FORM)
        return self._shown[names]

    def _signed(
        self, bound: Sequence[HeldSecret], path_and_query: str, headers: Headers
    ) -> _Pair | None:
        """The key pair with which a client has signed, by their placeholders."""
        keys = [one for one in bound if one.declared.sigv4]
        signed = sigv4.read_signed(path_and_query, headers) if keys else None
        if signed is None:
            return None
        for key in keys:
            for key_id in bound:
                if key_id.name == key.declared.sigv4 and key_id.placeholder == signed.key_id:
                    return _Pair(signed, key_id, key)
        return None

    def _sign(
        self, change: _Change, pair: _Pair, method: str, request: RewrittenRequest
    ) -> RewrittenRequest:
        change.use(pair.key_id)
        change.use(pair.key)
        assert pair.key_id.value is not None
        assert pair.key.value is not None
        signed_with = partial(
            sigv4.sign,
            *(pair.signed, pair.key_id.value, pair.key.value, method),
            *(request.path_and_query, request.headers, change.host_header()),
        )
        if sigv4.needs_body(pair.signed, request.headers):

            def sign(body: bytes) -> Headers:
                return signed_with(body)[1]

            return replace(request, sign=sign, body=None, secrets=change.used)
        path_and_query, headers = signed_with()
        return RewrittenRequest(path_and_query, headers, secrets=change.used)

    def _record_kept(
        self, target: Target, bound: Sequence[HeldSecret], result: RewrittenRequest
    ) -> None:
        """A placeholder that is still there was meant for another host, or another place."""
        if not self._secrets:
            return
        texts = [result.path_and_query, *(value for _, value in result.headers)]
        texts += [plain for value in texts if (plain := _basic(value)) is not None]
        for one in self._secrets:
            signing = result.sign is not None and one in bound  # its header is made later
            if not signing and any(one.placeholder in text for text in texts):
                why = "not there" if one in bound else "bound to other hosts"
                facts = {"host": target.host, "port": target.port, "reason": why}
                self._audit(secret_event("kept", one.name, sandbox=self._sandbox, **facts))


@dataclass(frozen=True)
class _Pair:
    signed: sigv4.Signed
    key_id: HeldSecret
    key: HeldSecret


class _Change:
    """What is put into one request."""

    def __init__(self, target: Target, bound: Sequence[HeldSecret], secure: bool) -> None:
        self._target = target
        self._bound = bound
        self._secure = secure
        self.used: list[str] = []

    def host_header(self) -> str:
        return self._target.host_header(443 if self._secure else 80)

    def use(self, secret: HeldSecret) -> str:
        """The value, which is about to be sent. Refusal if it may not be."""
        if not self._secure and not secret.declared.insecure:
            raise Refusal(
                403,
                f"egress denied: the secret {secret.name} is not sent over plain http to "
                f"{self._target} (use https)",
            )
        text = secret.text()
        if secret.name not in self.used:
            self.used.append(secret.name)
        return text

    def made(self, path_and_query: str, headers: Headers, signed: _Pair | None) -> RewrittenRequest:
        path, mark, query = path_and_query.partition("?")
        path = self._in_url(path, self._in("path"))
        if signed is not None and signed.signed.in_query:
            query = _TOKEN.sub(lambda found: self._in_url(found[0], self._in("header")), query)
        query = self._in_url(query, self._in("query"))
        changed: Headers = tuple(
            (name, value if signed and name == "authorization" else self._in_header(name, value))
            for name, value in headers
        )
        body = self._in_body(headers) if signed is None else None
        return RewrittenRequest(path + mark + query, changed, body, self.used)

    def _in(self, place: str) -> list[HeldSecret]:
        return [one for one in self._bound if one.declared.is_sent_in(place)]

    def _in_url(self, text: str, secrets: Iterable[HeldSecret]) -> str:
        for one in secrets:
            if one.pattern.search(text):
                value = in_url(self.use(one))
                text = one.pattern.sub(lambda _, value=value: value, text)  # type: ignore[misc]
        return text

    def _in_header(self, name: str, value: str) -> str:
        plain = _basic(value) if name == "authorization" else None
        if plain is not None:
            changed = self._in_text(plain, self._in("basic"))
            if changed != plain:
                return "Basic " + base64.b64encode(changed.encode("latin-1")).decode()
            return value
        return self._in_text(value, self._in("header"))

    def _in_text(self, text: str, secrets: Iterable[HeldSecret]) -> str:
        for one in secrets:
            if one.placeholder in text:
                text = text.replace(one.placeholder, self.use(one))
        return text

    def _in_body(self, headers: Headers) -> Filter | None:
        """A filter for the body, if secrets may be in it. It may turn out to have none, so a secret
        that may not be sent is only left as it is."""
        usable = [
            one
            for one in self._in("body")
            if one.value is not None and (self._secure or one.declared.insecure)
        ]
        if not usable:
            return None
        if _is_encoded(headers):
            raise Refusal(
                415, f"the body for {self._target} is compressed, and may need a secret in it"
            )
        escape = escape_for(next((v for n, v in headers if n == "content-type"), ""))
        names = {one.placeholder.encode(): one for one in usable}
        pairs = {needle: escape(one.text()).encode() for needle, one in names.items()}

        def used(needle: bytes) -> None:
            self.use(names[needle])

        return Replacer(Replacements(pairs), used)


def _replaced(replacements: Replacements, text: str) -> str:
    return replacements.in_whole(text.encode("latin-1")).decode("latin-1")


def _filter(shown: Replacements, headers: Headers, follows: Follows) -> Filter:
    if follows is Follows.WEBSOCKET:
        return FramedReplacer(shown, websocket_header)
    kinds = [value.strip().lower() for name, value in headers if name == "content-type"]
    if follows is Follows.HTTP_2_BODY and len(kinds) == 1 and _GRPC.match(kinds[0]):
        return FramedReplacer(shown, grpc_header)
    return Replacer(shown)


def _without_encodings(headers: Headers) -> Headers:
    """The headers without an offer of compression: what comes back must be readable."""
    left_out = ("accept-encoding", "grpc-accept-encoding", "sec-websocket-extensions")
    kept: Headers = tuple((name, value) for name, value in headers if name not in left_out)
    return (*kept, ("accept-encoding", "identity"))


def _is_encoded(headers: Headers) -> bool:
    codings = [value.strip().lower() for name, value in headers if name == "content-encoding"]
    return any(coding not in ("", "identity") for coding in codings)


def _basic(value: str) -> str | None:
    """What is inside ``Basic ...``; None if the value is none."""
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return None
