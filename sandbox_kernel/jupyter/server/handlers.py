"""REST: ``GET /sandbox-kernel/api/adoption`` lists the kernels that the server tried to adopt."""

from __future__ import annotations

import json

from jupyter_server.base.handlers import APIHandler
from tornado import web

from sandbox_kernel.jupyter.server.adoption import Outcome


class AdoptionHandler(APIHandler):
    def initialize(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    @web.authenticated
    def get(self) -> None:
        self.finish(json.dumps([outcome.to_dict() for outcome in self._outcomes]))
