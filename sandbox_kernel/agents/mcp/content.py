"""What a cell put out, as MCP content: a line of status, text for the model, pictures, links.

The first block of an answer is JSON with the names that the next call needs. Small pictures follow
the text; the others are resources, and so is text that was cut.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from mcp_types import ContentBlock, ImageContent, ResourceLink, TextContent

from sandbox_kernel.agents.images import decoded, picture_of
from sandbox_kernel.agents.jobs import Job
from sandbox_kernel.agents.mcp.policy import Limits
from sandbox_kernel.agents.result import OutputPage, Result

Content = list[ContentBlock]
MOST_PICTURES = 8
"""Pictures in one answer; the others are links."""
SHOWN = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Kinds that clients take as pictures; SVG is a resource."""


def status(**facts: Any) -> TextContent:
    """The first block of an answer. Facts that are None are left out."""
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    return TextContent(type="text", text=json.dumps(known, ensure_ascii=False))


def text_block(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def ended(sandbox: str, result: Result, page: OutputPage, limits: Limits) -> Content:
    """The answer about a job that has ended, with its output from the page on."""
    head = status(
        sandbox=sandbox,
        job=result.job_id,
        status=result.status,
        execution_count=result.execution_count,
        seconds=round(result.duration, 3),
        cursor=page.cursor,
        dropped=page.dropped or None,
        why=result.why,
    )
    shown = replace(result, outputs=page.items)
    text = shown.text_for(limits.output_chars)
    return _answer(head, text, sandbox, result.job_id, page, limits)


def going_on(sandbox: str, job: Job, page: OutputPage, limits: Limits) -> Content:
    """The answer about a job that has not ended: what there is so far, and how to go on."""
    head = status(
        sandbox=sandbox,
        job=job.id,
        status=job.state,
        cursor=page.cursor,
        dropped=page.dropped or None,
        next="input" if job.prompt else "poll",
        prompt=job.prompt.prompt if job.prompt else None,
        why=job.why,
    )
    text = Result("ok", outputs=page.items, job_id=job.id).text_for(limits.output_chars)
    return _answer(head, text, sandbox, job.id, page, limits)


def _answer(
    head: TextContent, text: str, sandbox: str, job: str, page: OutputPage, limits: Limits
) -> Content:
    content: Content = [head]
    if text:
        content.append(text_block(text))
    where = f"sandbox://{sandbox}/jobs/{quote(job)}"
    if len(page.text) > limits.output_chars:
        content.append(link(f"{where}/text", "all of the text", "text/plain"))
    content += pictures(page.items, f"{where}/pictures", limits)
    return content


def pictures(items: Iterable[Mapping[str, Any]], where: str, limits: Limits) -> Content:
    """The pictures of outputs; those that are too large, too many or of a kind that clients do not
    show as links. They are named by their hash, which stays the same while output is added."""
    found: Content = []
    inline = 0
    for item in items:
        mime, value = picture_of(item.get("data"))
        data = decoded(mime, value)
        if not data:
            continue
        if mime in SHOWN and len(data) <= limits.image_bytes and inline < MOST_PICTURES:
            inline += 1
            encoded = base64.b64encode(data).decode()
            found.append(ImageContent(type="image", data=encoded, mime_type=mime))
        else:
            name = picture_name(data)
            found.append(link(f"{where}/{name}", name, mime, len(data)))
    return found


def link(uri: str, name: str, mime: str, size: int | None = None) -> ResourceLink:
    return ResourceLink(type="resource_link", uri=uri, name=name, mime_type=mime, size=size)


def picture_name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
