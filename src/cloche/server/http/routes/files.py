"""Files inside a sandbox. Relative paths mean `/workspace`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from cloche import model
from cloche.server.guarding import opened
from cloche.server.http import wire
from cloche.server.http.answering import Call, streamed
from cloche.server.http.operations import Event, Stream
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation

Depth = Annotated[int, msgspec.Meta(ge=1, le=100)]
Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
_CHANGES = ("create", "write", "remove", "rename", "chmod", "overflow")
_HERE = "/v1/sandboxes/{sandbox}/files"
_ERRORS = "sandbox_not_found sandbox_lost file_not_found permission_denied path_invalid"


@operation("GET", _HERE, scope="files", errors=f"{_ERRORS} is_directory not_regular_file")
async def read_file(call: Call, sandbox: str, *, path: str, user: str = "user") -> bytes:
    """Read a file, whole. It is sent as it is read, so that it may be of any size."""
    whole: bytes = await streamed(call.backend.read_file_stream(sandbox, path, user))
    return whole


@operation("PUT", _HERE, scope="files", errors=f"{_ERRORS} is_directory sandbox_disk_full")
async def write_file(
    call: Call, sandbox: str, body: bytes, *, path: str, user: str = "user", mode: Mode | None = None
) -> model.FileInfo:
    """Write a file, whole; directories on the way are made. `mode` is a number in base ten (420 is 0644)."""
    return await call.backend.write_file(sandbox, path, body, user, mode)


@operation("DELETE", _HERE, scope="files", errors=f"{_ERRORS} directory_not_empty")
async def remove_file(
    call: Call, sandbox: str, *, path: str, recursive: bool = False, user: str = "user"
) -> None:
    """Remove a file, or with `recursive` a directory."""
    await call.backend.remove_file(sandbox, path, recursive, user)


@operation("GET", _HERE + "/list", scope="files", errors=f"{_ERRORS} not_directory")
async def list_files(
    call: Call, sandbox: str, *, path: str = ".", depth: Depth = 1, user: str = "user", limit: Limit = 1000,
    cursor: Cursor | None = None,
) -> wire.Files:  # fmt: skip
    """List a directory, `depth` levels deep, by path."""
    files = await call.backend.list_files(sandbox, path, depth, user)
    found, more = page(files, lambda info: (info.path,), limit, cursor)
    return wire.Files(files=found, next_cursor=more)


@operation("GET", _HERE + "/stat", scope="files", errors=_ERRORS)
async def stat_file(call: Call, sandbox: str, *, path: str, user: str = "user") -> model.FileInfo:
    """What a file is."""
    return await call.backend.stat_file(sandbox, path, user)


@operation("POST", _HERE + "/move", scope="files", errors=f"{_ERRORS} file_exists")
async def move_file(call: Call, sandbox: str, body: wire.Move, *, user: str = "user") -> None:
    """Move a file or directory."""
    await call.backend.move_file(sandbox, body.path, body.target, body.overwrite, user)


@operation("POST", _HERE + "/directories", scope="files", errors=f"{_ERRORS} file_exists")
async def make_directory(
    call: Call, sandbox: str, body: wire.MakeDirectory, *, user: str = "user"
) -> wire.Made:
    """Make a directory and those above it; `made` is false where it was there."""
    return wire.Made(made=await call.backend.make_dir(sandbox, body.path, user))


@operation("GET", _HERE + "/tree", scope="files", errors=_ERRORS, media="application/x-tar")
async def download_tree(call: Call, sandbox: str, *, path: str = ".", user: str = "user") -> bytes:
    """A directory as a tar archive."""
    return await call.backend.download_tree(sandbox, path, user)


@operation(
    "PUT",
    _HERE + "/tree",
    scope="files",
    errors=f"{_ERRORS} not_directory sandbox_disk_full",
    media="application/x-tar",
)
async def upload_tree(
    call: Call, sandbox: str, body: bytes, *, path: str = ".", user: str = "user"
) -> wire.Count:
    """Unpack a tar archive into a directory; how many entries there were."""
    return wire.Count(count=await call.backend.upload_tree(sandbox, path, body, user))


@operation(
    "GET", _HERE + "/watch", scope="files", errors=_ERRORS, events=dict.fromkeys(_CHANGES, model.FileEvent)
)
async def watch_files(
    call: Call, sandbox: str, *, path: str = ".", recursive: bool = False, user: str = "user"
) -> Stream[model.FileEvent]:
    """Watch a directory, as server-sent events named after what happened."""
    watched = call.backend.watch_files(sandbox, path, recursive, user)
    await call.backend.stat_file(sandbox, path, user)
    return Stream(_events(await opened(watched)), endless=True)


async def _events(watched: AsyncIterator[model.FileEvent]) -> AsyncIterator[Event]:
    async for event in watched:
        yield Event(event.type, event)
