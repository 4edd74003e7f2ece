"""What waits: templates, pools and claims. A change may carry `If-Match` with the version or generation that was seen."""

from __future__ import annotations

import msgspec

from cloche import errors, stock
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Number, Seconds
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.reading import if_match
from cloche.server.http.routes.table import operation


class Templates(wire.Page, frozen=True, kw_only=True):
    templates: tuple[stock.TemplateInfo, ...]


class Pools(wire.Page, frozen=True, kw_only=True):
    pools: tuple[stock.PoolInfo, ...]


class Claims(wire.Page, frozen=True, kw_only=True):
    claims: tuple[stock.ClaimInfo, ...]


class Scale(wire.Body, frozen=True, kw_only=True):
    size: Number


def _generation(call: Call) -> int | None:
    seen = if_match(call.request.headers)
    if seen is not None and not (seen.isdecimal() and len(seen) < 16):
        raise errors.error(
            "argument_invalid",
            f"If-Match {seen[:50]!r} is not a generation",
            hint="send the ETag of the pool",
            field="If-Match",
        )
    return None if seen is None else int(seen)


def _template_tag(info: stock.TemplateInfo) -> str:
    return info.version


def _pool_tag(info: stock.PoolInfo) -> str:
    return str(info.generation)


@operation(
    "PUT", "/v1/templates/{name}", scope="admin", matches=True, version=_template_tag,
    errors="template_invalid name_invalid version_conflict field_refused policy_invalid profile_unknown limit_invalid host_path_refused",
)  # fmt: skip
async def put_template(call: Call, name: str, body: stock.TemplateSpec) -> stock.TemplateInfo:
    """Make or replace a template; with `If-Match`, only that version of it."""
    if body.name != name:
        raise errors.error(
            "argument_invalid", f"the body is called {body.name!r}, the path {name!r}", field="name"
        )
    return await call.backend.put_template(body, if_match(call.request.headers))


@operation("GET", "/v1/templates", scope="pools")
async def list_templates(call: Call, *, limit: Limit = 100, cursor: Cursor | None = None) -> Templates:
    """The templates by name, those that come with Cloche too."""
    found, more = page(await call.backend.templates(), lambda info: (info.spec.name,), limit, cursor)
    return Templates(templates=found, next_cursor=more)


@operation("GET", "/v1/templates/{name}", scope="pools", errors="template_not_found", version=_template_tag)
async def get_template(call: Call, name: str) -> stock.TemplateInfo:
    """One template and its version."""
    return await call.backend.template(name)


@operation(
    "DELETE", "/v1/templates/{name}", scope="admin", matches=True,
    errors="template_not_found template_in_use version_conflict",
)  # fmt: skip
async def delete_template(call: Call, name: str) -> None:
    """Delete a template that no pool uses; with `If-Match`, only that version of it."""
    await call.backend.delete_template(name, if_match(call.request.headers))


@operation(
    "PUT", "/v1/pools/{name}", scope="admin", matches=True, version=_pool_tag,
    errors="pool_invalid name_invalid name_conflict template_not_found version_conflict limit_invalid",
)  # fmt: skip
async def put_pool(call: Call, name: str, body: stock.PoolSpec) -> stock.PoolInfo:
    """Make a pool; with `If-Match` and its generation, change it."""
    if body.name not in (None, name):
        raise errors.error(
            "argument_invalid", f"the body is called {body.name!r}, the path {name!r}", field="name"
        )
    return await call.backend.put_pool(msgspec.structs.replace(body, name=name), _generation(call))


@operation("GET", "/v1/pools", scope="pools")
async def list_pools(call: Call, *, limit: Limit = 100, cursor: Cursor | None = None) -> Pools:
    """The pools by name: what is wanted, what is ready, how claims went."""
    found, more = page(await call.backend.pools(), lambda info: (info.name,), limit, cursor)
    return Pools(pools=found, next_cursor=more)


@operation("GET", "/v1/pools/{name}", scope="pools", errors="pool_not_found", version=_pool_tag)
async def get_pool(call: Call, name: str) -> stock.PoolInfo:
    """One pool. Its ETag is its generation, which changes with what is wanted and not with what is ready."""
    return await call.backend.pool(name)


@operation(
    "GET", "/v1/pools/{name}/wait", scope="pools", errors="pool_not_found wait_timeout limit_invalid",
    version=_pool_tag,
)  # fmt: skip
async def wait_pool(
    call: Call, name: str, *, ready: Number | None = None, timeout_s: Seconds = 60
) -> stock.PoolInfo:
    """Wait until so many members are ready; left out, as many as are wanted."""
    return await call.backend.wait_pool(name, ready, timeout_s)


@operation(
    "POST", "/v1/pools/{name}/scale", scope="admin", matches=True, version=_pool_tag,
    errors="pool_not_found pool_invalid version_conflict",
)  # fmt: skip
async def scale_pool(call: Call, name: str, body: Scale) -> stock.PoolInfo:
    """Want another number of ready members."""
    return await call.backend.scale_pool(name, body.size, _generation(call))


@operation(
    "DELETE", "/v1/pools/{name}", scope="admin", matches=True, errors="pool_not_found version_conflict"
)
async def delete_pool(call: Call, name: str) -> None:
    """Delete a pool and the members that nobody has claimed; with `If-Match`, only that generation of it."""
    await call.backend.delete_pool(name, _generation(call))


@operation(
    "POST", "/v1/claims", scope="pools", status=201,
    errors="pool_not_found template_not_found name_conflict sandbox_claimed wait_timeout capacity_exceeded",
)  # fmt: skip
async def create_claim(call: Call, body: stock.ClaimSpec) -> stock.ClaimInfo:
    """Claim a sandbox: a warm one if the pool has one that fits, else a cold one, and the claim says why."""
    return await call.backend.claim(msgspec.structs.replace(body, stay=True))


@operation("GET", "/v1/claims", scope="pools")
async def list_claims(call: Call, *, limit: Limit = 100, cursor: Cursor | None = None) -> Claims:
    """The claims that are bound, and those that are kept after their end; oldest first."""
    found, more = page(await call.backend.claims(), lambda info: (info.created_at, info.name), limit, cursor)
    return Claims(claims=found, next_cursor=more)


@operation("GET", "/v1/claims/{name}", scope="pools", errors="claim_not_found")
async def get_claim(call: Call, name: str) -> stock.ClaimInfo:
    """One claim, by its name or its sandbox."""
    return await call.backend.claim_info(name)


@operation("DELETE", "/v1/claims/{name}", scope="pools", errors="claim_not_found")
async def release_claim(call: Call, name: str) -> None:
    """Give a claim up; its sandbox is destroyed, never used again."""
    await call.backend.release_claim(name)
