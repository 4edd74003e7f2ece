"""Templates, as far as they are read: which there are, by what names, and which versions.

E2B's `base` and `code-interpreter-v1` are our `base`. A version of ours is its content's hash; where E2B's clients want a build's UUID, it is
one made from that hash, so the same version is the same build. Every template has the tag `default`, and a snapshot its own tags.
"""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import Response

from cloche import errors, model, stock
from cloche.compat.e2b import calls, faults
from cloche.compat.e2b.calls import Call

OURS = {"base": "base", "code-interpreter-v1": "base"}
"""E2B's public templates that every sandbox here is: a shell, and contexts for code."""
ENVD_VERSION = "0.6.1"
"""The newest whose every feature is here: 0.6.2 brought metadata of files."""


async def list_all(call: Call) -> Response:
    return calls.page(call, await call.backend.templates(), _shown)


async def list_own(call: Call) -> Response:
    """Those that come with this server."""
    return calls.page(call, [info for info in await call.backend.templates() if info.builtin], _shown)


async def one(call: Call) -> Response:
    found = await _find(call, call.places["template"])
    if isinstance(found, stock.SnapshotInfo):
        raise faults.missing("the template of a snapshot")
    return faults.json({**_shown(found), "builds": [_build(found)]})


async def alias(call: Call) -> Response:
    named = call.places["alias"]
    if named in OURS:
        return faults.json({"templateID": OURS[named], "public": True})
    found = await _find(call, named)
    if isinstance(found, stock.SnapshotInfo):
        return faults.json({"templateID": found.id, "public": False})
    return faults.json({"templateID": found.spec.name, "public": found.builtin})


async def tags(call: Call) -> Response:
    found = await _find(call, call.places["template"])
    if isinstance(found, stock.SnapshotInfo):
        names, version = found.tags, found.id
    else:
        names, version = ("default",), found.version
    at = calls.time_of(found.created_at)
    return faults.json([{"tag": name, "buildID": _uuid(version), "createdAt": at} for name in names])


async def _find(call: Call, named: str) -> stock.TemplateInfo | stock.SnapshotInfo:
    try:
        return await call.backend.snapshot_info(named)
    except errors.NotFound:
        pass
    try:
        return await call.backend.template(OURS.get(named, named))
    except errors.NotFound as problem:
        raise faults.Fault(404, problem.message, name=problem.code) from None
    except errors.ClocheError as problem:
        if problem.code != "scope_missing":
            raise
        # E2B's clients take 403 for "there is one, and it is somebody else's".
        raise faults.Fault(401, problem.message, name=problem.code) from None


def _uuid(version: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, version))


def _limits(resources: model.Resources) -> dict[str, int]:
    return {
        "cpuCount": max(1, round(resources.cpus)),
        "memoryMB": int(resources.memory_mib),
        "diskSizeMB": int(resources.disk_mib),
    }


def _shown(info: stock.TemplateInfo) -> dict[str, Any]:
    name, at = info.spec.name, calls.time_of(info.created_at)
    names = [name, *(theirs for theirs, ours in OURS.items() if ours == name and theirs != name)]
    return {
        "templateID": name, "buildID": _uuid(info.version), **_limits(info.spec.resources), "public": info.builtin,
        "aliases": names, "names": names, "createdAt": at, "updatedAt": at, "createdBy": None, "lastSpawnedAt": None,
        "spawnCount": 0, "buildCount": 1, "envdVersion": ENVD_VERSION, "buildStatus": "ready",
        "isDefault": info.builtin, "description": info.spec.description,
    }  # fmt: skip


def _build(info: stock.TemplateInfo) -> dict[str, Any]:
    at = calls.time_of(info.created_at)
    return {
        "buildID": _uuid(info.version), "status": "ready", "createdAt": at, "updatedAt": at, "finishedAt": at,
        **_limits(info.spec.resources), "envdVersion": ENVD_VERSION,
    }  # fmt: skip
