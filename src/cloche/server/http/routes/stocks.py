"""What waits: templates, pools and claims. A change may carry `If-Match` with the version or generation that was seen."""

from __future__ import annotations

import msgspec

from cloche import errors, stock
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.routes.table import operation


class Templates(wire.Answer, frozen=True, kw_only=True):
    templates: tuple[stock.TemplateInfo, ...]


class Pools(wire.Answer, frozen=True, kw_only=True):
    pools: tuple[stock.PoolInfo, ...]


class Claims(wire.Answer, frozen=True, kw_only=True):
    claims: tuple[stock.ClaimInfo, ...]


class Scale(wire.Body, frozen=True, kw_only=True):
    size: int


def if_match(call: Call) -> str | None:
    """The version that the caller has seen, without its quotes; `*` is any."""
    given = call.request.headers.get("if-match")
    return None if given in (None, "*") else str(given).strip().strip('"')


def _generation(call: Call) -> int | None:
    seen = if_match(call)
    if seen is not None and not seen.isdecimal():
        raise errors.error(
            "argument_invalid", f"If-Match {seen[:50]!r} is not a generation", field="If-Match"
        )
    return None if seen is None else int(seen)


@operation(
    "PUT", "/v1/templates/{name}", scope="admin", errors="template_invalid version_conflict field_refused"
)
async def put_template(call: Call, name: str, body: stock.TemplateSpec) -> stock.TemplateInfo:
    """Make or replace a template; with `If-Match`, only that version of it."""
    if body.name != name:
        raise errors.error(
            "argument_invalid", f"the body is called {body.name!r}, the path {name!r}", field="name"
        )
    return await call.backend.put_template(body, if_match(call))


@operation("GET", "/v1/templates", scope="pools")
async def list_templates(call: Call) -> Templates:
    """The templates, those that come with Cloche too."""
    return Templates(templates=tuple(await call.backend.templates()))


@operation("GET", "/v1/templates/{name}", scope="pools", errors="template_not_found")
async def get_template(call: Call, name: str) -> stock.TemplateInfo:
    """One template and its version."""
    return await call.backend.template(name)


@operation("DELETE", "/v1/templates/{name}", scope="admin", errors="template_not_found template_in_use")
async def delete_template(call: Call, name: str) -> None:
    """Delete a template that no pool uses."""
    await call.backend.delete_template(name)


@operation(
    "PUT", "/v1/pools/{name}", scope="admin", errors="pool_invalid template_not_found version_conflict"
)
async def put_pool(call: Call, name: str, body: stock.PoolSpec) -> stock.PoolInfo:
    """Make a pool; with `If-Match` and its generation, change it."""
    if body.name not in (None, name):
        raise errors.error(
            "argument_invalid", f"the body is called {body.name!r}, the path {name!r}", field="name"
        )
    return await call.backend.put_pool(msgspec.structs.replace(body, name=name), _generation(call))


@operation("GET", "/v1/pools", scope="pools")
async def list_pools(call: Call) -> Pools:
    """The pools: what is wanted, what is ready, how claims went."""
    return Pools(pools=tuple(await call.backend.pools()))


@operation("GET", "/v1/pools/{name}", scope="pools", errors="pool_not_found")
async def get_pool(call: Call, name: str) -> stock.PoolInfo:
    """One pool."""
    return await call.backend.pool(name)


@operation(
    "POST", "/v1/pools/{name}/scale", scope="admin", errors="pool_not_found pool_invalid version_conflict"
)
async def scale_pool(call: Call, name: str, body: Scale) -> stock.PoolInfo:
    """Want another number of ready members."""
    return await call.backend.scale_pool(name, body.size, _generation(call))


@operation("DELETE", "/v1/pools/{name}", scope="admin", errors="pool_not_found")
async def delete_pool(call: Call, name: str) -> None:
    """Delete a pool and the members that nobody has claimed."""
    await call.backend.delete_pool(name)


@operation(
    "POST", "/v1/claims", scope="pools", status=201,
    errors="pool_not_found template_not_found name_conflict sandbox_claimed wait_timeout capacity_exceeded",
)  # fmt: skip
async def create_claim(call: Call, body: stock.ClaimSpec) -> stock.ClaimInfo:
    """Claim a sandbox: a warm one if the pool has one that fits, else a cold one, and the claim says why."""
    return await call.backend.claim(msgspec.structs.replace(body, stay=True))


@operation("GET", "/v1/claims", scope="pools")
async def list_claims(call: Call) -> Claims:
    """The claims that are bound, and those that are kept after their end."""
    return Claims(claims=tuple(await call.backend.claims()))


@operation("GET", "/v1/claims/{name}", scope="pools", errors="claim_not_found")
async def get_claim(call: Call, name: str) -> stock.ClaimInfo:
    """One claim, by its name or its sandbox."""
    return await call.backend.claim_info(name)


@operation("DELETE", "/v1/claims/{name}", scope="pools", errors="claim_not_found")
async def release_claim(call: Call, name: str) -> None:
    """Give a claim up; its sandbox is destroyed, never used again."""
    await call.backend.release_claim(name)
