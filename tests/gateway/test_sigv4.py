"""Requests to AWS that are signed again: as botocore signs them with the real key."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import botocore.auth
import botocore.session
import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth, SigV4Auth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.gateway import sigv4
from sandbox_kernel.gateway.http_head import Headers
from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.secret_values import SecretValue

REAL = ("AKIAREALREALREALREAL", "real/secret+key0123456789real/secret+key")
FAKE = ("AKIAFAKEFAKEFAKEFAKE", "FAKE0123456789FAKE0123456789FAKE01234567")
DATE = "20240102T030405Z"


def request(method: str, url: str, body: bytes = b"", **headers: str) -> Any:
    made = AWSRequest(method, url, headers={k.replace("_", "-"): v for k, v in headers.items()})
    made.data = body
    made.context.update({"payload_signing_enabled": True})
    return made


def signed(make: type, made: Any, keys: tuple[str, str], token: str | None = None) -> Any:
    service = "s3" if "S3" in make.__name__ else "dynamodb"
    auth = make(Credentials(*keys, token), service, "eu-central-1")
    made.context["timestamp"] = DATE
    auth.add_auth(made)
    return made


def parts(made: Any) -> tuple[str, str, Headers]:
    """Host, path with query, and headers as the gateway reads them."""
    prepared = made if isinstance(made, AWSPreparedRequest) else made.prepare()
    host, _, rest = prepared.url.partition("://")[2].partition("/")
    found = [
        (k.lower(), v.decode() if isinstance(v, bytes) else v) for k, v in prepared.headers.items()
    ]
    return host, "/" + rest, tuple((k, v) for k, v in found if k not in ("content-length", "host"))


def again(made: Any, method: str, body: bytes = b"") -> tuple[str, Headers]:
    host, path, headers = parts(made)
    found = sigv4.read_signed(path, headers)
    assert found is not None
    assert found.key_id == FAKE[0]
    real = SecretValue(REAL[0]), SecretValue(REAL[1])
    return sigv4.sign(found, *real, method, path, headers, host, body)


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = datetime.datetime.strptime(DATE, "%Y%m%dT%H%M%SZ")  # noqa: DTZ007
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: moment)


NO_SCOPE = "AWS4-HMAC-SHA256 Credential=x/y, SignedHeaders=host, Signature="
URLS = [
    "https://bucket.s3.example/",
    "https://bucket.s3.example/a%20key/with%2Bplus/~tilde",
    "https://bucket.s3.example/?list-type=2&prefix=a%2Fb&delimiter=%2F&empty=",
    "https://bucket.s3.example:9000/x//y?versionId=1&acl",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("token", [None, "session/token+=="])
def test_s3(url: str, token: str | None) -> None:
    """Header signatures of S3, with digests of bodies in a header."""
    for method, body in (("GET", b""), ("PUT", b"data")):
        ours = again(signed(S3SigV4Auth, request(method, url, body), FAKE, token), method)
        theirs = parts(signed(S3SigV4Auth, request(method, url, body), REAL, token))[1:]
        assert ours == theirs


def test_other_services() -> None:
    """Their signature is over a digest of the body that is in no header."""
    body = b'{"TableName": "x"}'
    url = "https://dynamodb.example/a%20b/../c/?z=1&a=%C3%A9"
    headers = {
        "X_Amz_Target": "DynamoDB.Scan  spaced",
        "Content_Type": "application/x-amz-json-1.0",
    }
    fake = signed(SigV4Auth, request("POST", url, body, **headers), FAKE)
    _, path, found = parts(fake)
    assert sigv4.needs_body(sigv4.read_signed(path, found), found)  # type: ignore[arg-type]
    theirs = parts(signed(SigV4Auth, request("POST", url, body, **headers), REAL))[1:]
    assert again(fake, "POST", body) == theirs


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("s3", "list_objects_v2", {"Bucket": "some-bucket", "Prefix": "a b/ü+&=~*'(!)", "MaxKeys": 1}),
    ("s3", "head_object", {"Bucket": "some-bucket", "Key": "x//y/./../z %2F é+&=~*'(!)$@,:;"}),
    ("s3", "put_object", {"Bucket": "some-bucket", "Key": "k", "Metadata": {"a": " two   words "}}),
    ("s3tables", "list_namespaces", {"tableBucketARN": "arn:aws:s3tables:x:012345678901:bucket/b"}),
    ("s3control", "get_access_point", {"AccountId": "012345678901", "Name": "some-point"}),
    ("lambda", "invoke", {"FunctionName": "arn:aws:lambda:x:012345678901:function:f:v"}),
    ("bedrock-runtime", "invoke_model", {"modelId": "some.model-v2:1", "body": b"{}"}),
    ("iot-data", "publish", {"topic": "a/b c/+//é", "payload": b"data"}),
    ("glacier", "list_jobs", {"vaultName": "v ä", "accountId": "-"}),
    ("sts", "get_caller_identity", {}),
    ("sqs", "send_message", {"QueueUrl": "https://sqs.example/1/q", "MessageBody": "é &=+"}),
]


@pytest.mark.parametrize("call", CALLS, ids=[f"{service}-{name}" for service, name, _ in CALLS])
def test_as_the_clients_of_services_sign(
    call: tuple[str, str, dict[str, Any]],
) -> None:
    """Paths and queries of all kinds, as botocore's clients send them."""
    service, name, arguments = call

    def sent(keys: tuple[str, str]) -> Any:
        found: list[Any] = []
        client = botocore.session.get_session().create_client(
            *(service, "eu-central-1"),
            aws_access_key_id=keys[0],
            aws_secret_access_key=keys[1],
            endpoint_url=f"https://{service}.example",
        )

        def keep(request: Any, **_: Any) -> AWSResponse:
            found.append(request)
            return AWSResponse(request.url, 400, {}, None)

        client.meta.events.register("before-send", keep)
        with contextlib.suppress(Exception):  # of an answer that is none
            getattr(client, name)(**arguments)
        return found[0]

    fake, real = sent(FAKE), sent(REAL)
    body = fake.body.encode() if isinstance(fake.body, str) else fake.body
    path, headers = again(fake, fake.method, body if isinstance(body, bytes) else b"")
    assert path == parts(real)[1]
    assert dict(headers)["authorization"] == dict(parts(real)[2])["authorization"]


@pytest.mark.parametrize("url", URLS)
def test_presigned(url: str) -> None:
    ours, _ = again(signed(S3SigV4QueryAuth, request("GET", url), FAKE), "GET")
    theirs = parts(signed(S3SigV4QueryAuth, request("GET", url), REAL))[1]
    assert sorted(ours.partition("?")[2].split("&")) == sorted(theirs.partition("?")[2].split("&"))


def test_an_unsigned_payload() -> None:
    fake = signed(S3SigV4Auth, request("PUT", URLS[0], b"x"), FAKE)
    fake.headers.replace_header("X-Amz-Content-SHA256", sigv4.UNSIGNED)
    _, headers = again(fake, "PUT")
    assert ("x-amz-content-sha256", sigv4.UNSIGNED) in headers


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "one by one"),
        (
            "x-amz-content-sha256",
            "some text",
            r"no digest \(chunks that are signed one by one\?\)$",
        ),
        ("x-amz-date", "yesterday", "X-Amz-Date"),
        ("authorization", "AWS4-ECDSA-P256-SHA256 Credential=x", "Authorization"),
        (
            "authorization",
            "AWS4-HMAC-SHA256 Credential=x/20240102/r/s3/aws4_request, SignedHeaders=x-amz-date, "
            "Signature=" + "0" * 64,
            "host is not signed",
        ),
        (
            "authorization",
            "AWS4-HMAC-SHA256 Credential=x/y, SignedHeaders=host, Signature=" + "0" * 64,
            "region",
        ),
    ],
)
def test_what_cannot_be_signed_again_is_refused(name: str, value: str, why: str) -> None:
    host, path, headers = parts(signed(S3SigV4Auth, request("PUT", URLS[0], b"x"), FAKE))
    headers = tuple((k, value if k == name else v) for k, v in headers)
    real = SecretValue(REAL[0]), SecretValue(REAL[1])

    def read_and_sign() -> None:
        found = sigv4.read_signed(path, headers)
        assert found is not None
        sigv4.sign(found, *real, "PUT", path, headers, host)

    with pytest.raises(Refusal, match=why):
        read_and_sign()


@given(st.text(max_size=80), st.text(max_size=200))
def test_anything_is_read_or_refused(query: str, authorization: str) -> None:
    for value in (authorization, "AWS4-HMAC-SHA256 " + authorization):
        try:
            found = sigv4.read_signed(f"/x?{query}", (("authorization", value),))
        except Refusal:
            continue
        assert found is None or found.names
