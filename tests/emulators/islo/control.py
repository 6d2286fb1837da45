"""The control plane: ``islo/custom/auth.py`` and ``islo/gateway_profiles/raw_client.py`` of 0.3.20.

A session token is good for ``cookie_max_age`` seconds, or until it is withdrawn
(``POST /_emulator/tokens/withdraw``). A profile that a sandbox uses cannot be deleted (assumed;
integrations delete the sandbox first). A new rule without a priority gets the next one (assumed).
"""

from __future__ import annotations

import secrets
import time
import uuid

from ..http import Handler, Request, Response, Server
from ..service import Refused
from .state import Profile, Service

_PROFILE = "/gateway/profiles/([^/]+)"


def authorized(service: Service, handler: Handler) -> Handler:
    """For all routes: a session token that is good, a body of bearable size, errors as JSON."""

    async def checked(request: Request) -> Response | None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            if service.tokens.get(token, 0.0) < time.monotonic():
                raise Refused(401, "AUTH_REQUIRED", "the session token is not valid")
            upload = request.path.endswith("/files")
            if len(request.body) > service.settings.max_body and not upload:
                raise Refused(413, "INVALID_REQUEST", "the request is too large")
            return await handler(request)
        except Refused as refused:
            body = {"code": refused.code, "message": refused.message}
            return Response(refused.status, body)

    return checked


class ControlPlane:
    """Adds its routes to a server."""

    def __init__(self, service: Service, server: Server) -> None:
        self._service = service
        server.route("POST", "/auth/token", self._exchange)  # exchange_access_key
        for method, pattern, handler in (
            ("GET", "/gateway/profiles", self._list),  # list_gateway_profiles
            ("POST", "/gateway/profiles", self._create),  # create_gateway_profile
            ("GET", _PROFILE, self._get),  # get_gateway_profile
            ("DELETE", _PROFILE, self._delete),  # delete_gateway_profile
            ("POST", f"{_PROFILE}/rules", self._add_rule),  # create_gateway_rule
        ):
            server.route(method, pattern, authorized(service, handler))
        server.route("POST", "/_emulator/settings", self._settings)
        server.route("POST", "/_emulator/tokens/withdraw", self._withdraw)
        server.route("GET", "/_emulator/state", self._state)
        server.route("POST", "/_emulator/reset", self._reset)
        server.route("POST", "/_emulator/sandboxes/([^/]+)/status", self._set_status)

    async def _exchange(self, request: Request) -> Response:
        if request.json().get("access_key") != self._service.api_key:
            return Response(401, {"detail": "the access key is not valid"})
        token = secrets.token_urlsafe(24)
        seconds = self._service.settings.token_seconds
        self._service.tokens[token] = time.monotonic() + seconds
        return Response(200, {"session_token": token, "cookie_max_age": seconds})

    # --- gateway profiles

    def _found(self, request: Request) -> Profile:
        profile = self._service.profiles.get(request.match[1])
        if profile is None:
            raise Refused(404, "RESOURCE_NOT_FOUND", "no such gateway profile")
        return profile

    async def _list(self, request: Request) -> Response:
        return Response(200, [profile.as_json() for profile in self._service.profiles.values()])

    async def _create(self, request: Request) -> Response:
        asked = request.json()
        if any(p.request["name"] == asked["name"] for p in self._service.profiles.values()):
            raise Refused(409, "INVALID_REQUEST", "the name is taken")
        if self._service.settings.keep_network:
            asked = {**asked, "internet_enabled": True}
        profile = Profile(asked)
        self._service.profiles[profile.id] = profile
        self._service.order.append(f"+profile {asked['name']}")
        return Response(201, profile.as_json())

    async def _get(self, request: Request) -> Response:
        return Response(200, self._found(request).as_json())

    async def _delete(self, request: Request) -> Response:
        profile = self._found(request)
        users = [
            sandbox.name
            for sandbox in self._service.sandboxes.values()
            if sandbox.request.get("gateway_profile") == profile.id
        ]
        if users:
            raise Refused(409, "INVALID_REQUEST", f"the profile is used by {users[0]}")
        del self._service.profiles[profile.id]
        self._service.order.append(f"-profile {profile.request['name']}")
        return Response(204)

    async def _add_rule(self, request: Request) -> Response:
        profile, asked = self._found(request), request.json()
        if not asked.get("host_pattern"):
            raise Refused(422, "VALIDATION_ERROR", "host_pattern is required")
        rule = {
            "id": str(uuid.uuid4()),
            "host_pattern": asked["host_pattern"],
            "path_pattern": asked.get("path_pattern"),
            "methods": asked.get("methods"),
            "action": asked.get("action") or "allow",
            "rate_limit_rpm": asked.get("rate_limit_rpm"),
            "priority": asked.get("priority", len(profile.rules)),
        }
        profile.rules.append(rule)
        return Response(201, rule)

    # --- for tests

    async def _settings(self, request: Request) -> Response:
        for key, value in request.json().items():
            setattr(self._service.settings, key, value)
        return Response(204)

    async def _withdraw(self, request: Request) -> Response:
        self._service.tokens.clear()
        return Response(204)

    async def _state(self, request: Request) -> Response:
        return Response(
            200,
            {
                "sandboxes": [
                    {**sandbox.as_json(), "request": dict(sandbox.request)}
                    for sandbox in self._service.sandboxes.values()
                ],
                "profiles": [p.as_json() for p in self._service.profiles.values()],
                "order": self._service.order,
            },
        )

    async def _reset(self, request: Request) -> Response:
        """Delete everything; the names of what there was."""
        left = [sandbox.name for sandbox in self._service.sandboxes.values()]
        left += [str(profile.request["name"]) for profile in self._service.profiles.values()]
        for sandbox in list(self._service.sandboxes.values()):
            await self._service.delete(sandbox)
        self._service.profiles.clear()
        self._service.order.clear()
        return Response(200, left)

    async def _set_status(self, request: Request) -> Response:
        """Anything: also what the SDK does not know."""
        self._service.find(request.match[1]).status = request.json()
        return Response(204)
