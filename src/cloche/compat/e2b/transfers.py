"""`/files`: bytes in and out, plain or as the parts of a form.

A form's body is taken apart by hand: the parts are bytes between boundaries with a few header lines, and a library would bring its own
idea of where to keep them. Bodies are bounded by `server.max_upload_mib` and held in memory while they are written.
"""

from __future__ import annotations

import email.message
import email.utils
import posixpath
import zlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.responses import Response

from cloche import errors
from cloche.compat.e2b import connect, faults, guests
from cloche.compat.e2b.state import Place


class Part(NamedTuple):
    name: str
    filename: str
    data: bytes


async def read(place: Place) -> Response:
    query = place.request.query_params
    path, user = (
        guests.path_of(query.get("path")),
        guests.user_of(place.request.headers, query.get("username")),
    )
    info = await place.backend.stat_file(place.sandbox, path, user)
    if info.type == "directory":
        raise faults.Fault(400, f"path is a directory: {path}")
    pieces = place.backend.read_file_stream(place.sandbox, path, user)
    first = await anext(pieces, b"")  # what is refused is refused before the answer begins
    name = posixpath.basename(path).encode("ascii", "replace").decode().replace('"', "_")
    # Packed for who asks for nothing else: most programs' libraries offer it unasked, and would pay for it.
    packed = place.request.headers.get("accept-encoding", "").strip() == "gzip"
    body = _after(first, pieces)
    made = connect.Stream(
        _pack(body) if packed else body, place.config.server.write_timeout_s, "application/octet-stream"
    )
    made.headers["Content-Disposition"] = f'inline; filename="{name}"'
    if packed:
        made.headers["Content-Encoding"] = "gzip"
    return made


async def _pack(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    async for piece in pieces:
        some = packer.compress(piece)
        if some:
            yield some
    yield packer.flush()


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in pieces:
        yield piece


async def write(place: Place) -> Response:
    query = place.request.query_params
    user = guests.user_of(place.request.headers, query.get("username"))
    most = place.config.server.max_upload_mib << 20
    body = await connect.read_all(place.request, most)
    if place.request.headers.get("content-encoding", "") == "gzip":
        body = _inflate(body, most)
    kind = place.request.headers.get("content-type", "")
    if kind.startswith("multipart/form-data"):
        files = [part for part in parts(kind, body) if part.name == "file"]
        named = query.get("path")
        if named and len(files) > 1:
            raise faults.Fault(400, "the query has a path for one file, and the form has several")
        given = [(named or part.filename, part.data) for part in files]
    elif kind.startswith("application/octet-stream") or not kind:
        given = [(query.get("path") or "", body)]
    else:
        raise faults.Fault(400, f"{kind[:100]!r} is neither multipart/form-data nor application/octet-stream")
    if not given or not all(path for path, _ in given):
        raise faults.Fault(400, "a file has no path")
    return faults.json([await _write(place, guests.path_of(path), data, user) for path, data in given])


async def _write(place: Place, path: str, data: bytes, user: str) -> dict[str, Any]:
    try:
        await place.backend.write_file(place.sandbox, path, data, user)
    except errors.ClocheError as problem:
        if problem.code == "sandbox_disk_full":
            raise faults.Fault(507, problem.message, name=problem.code) from None
        raise
    return {"name": posixpath.basename(path), "type": "file", "path": path}


def _inflate(body: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj(31)
    try:
        data = unpacker.decompress(body, most + 1)
    except zlib.error:
        raise faults.Fault(400, "the body is not gzip") from None
    if len(data) > most or not unpacker.eof:
        raise faults.Fault(413 if len(data) > most else 400, "the unpacked body is too large, or cut off")
    return data


def parts(content_type: str, body: bytes) -> list[Part]:
    """The parts of a form, in their order."""
    boundary = _parameters(content_type).get("boundary", "").encode("latin-1", "replace")
    if not boundary:
        raise faults.Fault(400, "the form has no boundary")
    marker = b"\r\n--" + boundary
    pieces = (b"\r\n" + body).split(marker)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise faults.Fault(400, "the form is cut off")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    head, blank, data = piece.partition(b"\r\n\r\n")
    if not blank:
        raise faults.Fault(400, "a part of the form has no header")
    for line in head.split(b"\r\n"):
        field, _, value = line.decode("utf-8", "surrogateescape").partition(":")
        if field.strip().lower() == "content-disposition":
            found = _parameters(value.strip())
            return Part(found.get("name", ""), found.get("filename", ""), data)
    raise faults.Fault(400, "a part of the form has no name")


def _parameters(value: str) -> dict[str, str]:
    message = email.message.Message()
    message["content-type"] = value
    found: dict[str, str] = {}
    for name, parameter in message.get_params(failobj=[])[1:]:
        # RFC 2231 makes it (charset, language, value); the library's types do not say so.
        found[name.lower()] = email.utils.collapse_rfc2231_value(parameter)
    return found
