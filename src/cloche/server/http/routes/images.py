"""Images: the roots that are unpacked here. All of it is the operator's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from cloche import model
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Stream, begun
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation

_EVENTS = dict.fromkeys(("step", "log", "done"), model.ImageProgress)
_REFERENCE = "image_reference_invalid host_path_refused"
_FETCH = "image_not_found image_registry_failed image_auth_required image_invalid image_digest_mismatch image_too_large image_layer_refused image_tool_missing disk_full"


class Images(wire.Page, frozen=True, kw_only=True):
    images: tuple[model.ImageInfo, ...]


class Pull(wire.Body, frozen=True, kw_only=True):
    reference: str
    """`docker://registry.example/name:tag`, for instance; not a path of the server's host."""


class Build(wire.Body, frozen=True, kw_only=True):
    recipe: dict[str, Any]
    """`from` and `steps`, as docs/guides/images.md says; without `copy`, whose files would be the server's."""


@operation("GET", "/v1/images", scope="admin")
async def list_images(call: Call, *, limit: Limit = 100, cursor: Cursor | None = None) -> Images:
    """The images that are unpacked here, oldest first."""
    found, more = page(
        await call.backend.images(), lambda info: (info.created_at, info.digest), limit, cursor
    )
    return Images(images=found, next_cursor=more)


@operation("GET", "/v1/images/find", scope="admin", errors=f"{_REFERENCE} image_not_found")
async def find_image(call: Call, *, reference: str) -> model.ImageInfo:
    """One image that is here, by reference or digest."""
    return await call.backend.image(reference)


@operation("DELETE", "/v1/images", scope="admin", errors=f"{_REFERENCE} image_not_found image_in_use")
async def remove_image(call: Call, *, reference: str) -> None:
    """Remove an image that no sandbox is made of."""
    await call.backend.remove_image(reference)


@operation(
    "POST",
    "/v1/images/pull",
    scope="admin",
    errors=f"{_REFERENCE} {_FETCH}",
    events=_EVENTS,
    example={"reference": "docker://registry.example/library/debian:12"},
)
async def pull_image(call: Call, body: Pull) -> Stream[model.ImageProgress]:
    """Fetch what a reference means now, as server-sent events: `step`, `log`, and `done` with the image."""
    return Stream(await begun(_told(call.backend.pull_image(body.reference)), _PATIENCE_S))


@operation(
    "POST",
    "/v1/images/build",
    scope="admin",
    errors=f"{_REFERENCE} {_FETCH} recipe_invalid recipe_step_failed needs_subuids",
    events=_EVENTS,
    example={"recipe": {"from": "host", "steps": [{"run": "echo built > /opt/built"}]}},
)
async def build_image(call: Call, body: Build) -> Stream[model.ImageProgress]:
    """Make the image of a recipe, as server-sent events: `step`, `log`, and `done` with the image."""
    return Stream(await begun(_told(call.backend.build_image(body.recipe, "")), _PATIENCE_S))


_PATIENCE_S = 5.0  # for the first word of a stream: what is refused by then is an answer


async def _told(progress: AsyncIterator[model.ImageProgress]) -> AsyncIterator[Event]:
    async with aclosing(progress) as words:  # type: ignore[type-var]
        async for word in words:
            yield Event(word.kind, word)


@operation("POST", "/v1/images/collect", scope="admin")
async def collect_images(call: Call) -> Images:
    """Remove half-made images, and beyond the size limit the least recently used; those that went."""
    return Images(images=tuple(await call.backend.gc_images()))
