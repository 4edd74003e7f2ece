"""Sandboxes: create, look, extend, suspend, resume, delete."""

from __future__ import annotations

from cloche import errors, model
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.routes.table import operation

_MOST = 1000


@operation(
    "POST", "/v1/sandboxes", scope="sandboxes", status=201,
    errors="template_not_found name_conflict capacity_exceeded isolation_too_low host_path_refused",
)  # fmt: skip
async def create_sandbox(call: Call, body: wire.Create) -> model.SandboxInfo:
    """Create a sandbox.

    With a `name` it is idempotent: the same name and body is the same sandbox, another body is `name_conflict`. It stays until it is
    deleted or its time is up.
    """
    return await call.backend.create(call.spec(body))


@operation("GET", "/v1/sandboxes", scope="sandboxes")
async def list_sandboxes(
    call: Call, *, limit: int = 100, cursor: str | None = None, label: str | None = None
) -> wire.Sandboxes:
    """List live sandboxes, oldest first.

    `label` is `key=value`. `next_cursor` is null on the last page.
    """
    if not 1 <= limit <= _MOST:
        raise errors.error("limit_invalid", f"limit is {limit}; it must be 1 to {_MOST}", field="limit")
    key, separator, value = (label or "").partition("=")
    if label is not None and not separator:
        raise errors.error("argument_invalid", f"the label {label!r} is not key=value", field="label")
    chosen = [i for i in await call.backend.list() if label is None or i.labels.get(key) == value]
    chosen.sort(key=lambda info: (info.created_at, info.id))
    if cursor is not None:
        chosen = _after(chosen, cursor)
    page = tuple(chosen[:limit])
    more = f"{page[-1].created_at!r},{page[-1].id}" if len(chosen) > limit else None
    return wire.Sandboxes(sandboxes=page, next_cursor=more)


def _after(infos: list[model.SandboxInfo], cursor: str) -> list[model.SandboxInfo]:
    """What comes after a place in the list; the place itself may be gone by now."""
    time, _, id_ = cursor.partition(",")
    try:
        place = (float(time), id_)
    except ValueError:
        raise errors.error(
            "argument_invalid", f"{cursor[:50]!r} is not a cursor", hint="use next_cursor of the last page"
        ) from None
    return [info for info in infos if (info.created_at, info.id) > place]


@operation("GET", "/v1/sandboxes/{sandbox}", scope="sandboxes", errors="sandbox_not_found sandbox_lost")
async def get_sandbox(call: Call, sandbox: str) -> model.SandboxInfo:
    """Look at a sandbox, by id or name. Looking neither wakes it nor counts as use."""
    return await call.backend.info(sandbox)


@operation("DELETE", "/v1/sandboxes/{sandbox}", scope="sandboxes", errors="sandbox_not_found sandbox_lost")
async def delete_sandbox(call: Call, sandbox: str) -> None:
    """Delete a sandbox: afterwards nothing of it is left."""
    await call.backend.delete(sandbox)


@operation(
    "POST", "/v1/sandboxes/{sandbox}/extend", scope="sandboxes", errors="sandbox_not_found limit_invalid"
)
async def extend_sandbox(call: Call, sandbox: str, body: wire.Extend) -> model.SandboxInfo:
    """Give a sandbox a new life, from now on."""
    return await call.backend.extend(sandbox, body.timeout_s)


@operation("POST", "/v1/sandboxes/{sandbox}/suspend", scope="sandboxes", errors="sandbox_not_found")
async def suspend_sandbox(call: Call, sandbox: str, *, mode: str = "pause") -> model.SandboxInfo:
    """Suspend a sandbox: `pause` keeps its memory, `archive` its files only. Any request that needs it wakes it again."""
    return await call.backend.suspend(sandbox, mode)


@operation("POST", "/v1/sandboxes/{sandbox}/resume", scope="sandboxes", errors="sandbox_not_found")
async def resume_sandbox(call: Call, sandbox: str) -> model.SandboxInfo:
    """Resume a suspended sandbox."""
    return await call.backend.resume(sandbox)


@operation("GET", "/v1/sandboxes/{sandbox}/usage", scope="sandboxes", errors="sandbox_not_found")
async def get_usage(call: Call, sandbox: str) -> model.SandboxUsage:
    """What a sandbox costs now, and has cost."""
    return await call.backend.usage(sandbox)


class NewToken(wire.Body, frozen=True, kw_only=True):
    scopes: tuple[model.TokenScope, ...] = ("exec", "files")
    ttl_s: float = 900


@operation(
    "POST", "/v1/sandboxes/{sandbox}/tokens", scope="sandboxes", status=201,
    errors="sandbox_not_found limit_invalid",
)  # fmt: skip
async def create_token(call: Call, sandbox: str, body: NewToken) -> model.AccessToken:
    """Make a token for this sandbox alone.

    It opens this sandbox to whoever shows it as a key, for what `scopes` say and never more than the caller may, until it expires or the sandbox ends.
    It can make no other token, and neither list nor create sandboxes.
    """
    return await call.backend.create_token(sandbox, list(body.scopes), body.ttl_s)
