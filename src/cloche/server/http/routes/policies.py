"""What a sandbox may touch, and the secrets that are put in for it."""

from __future__ import annotations

from typing import Any

from cloche import model, policy
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.routes.table import operation


class Change(wire.Body, frozen=True, kw_only=True):
    """Fields of the group `network`, each replaced as a whole."""

    network: dict[str, Any]


class PutSecret(wire.Body, frozen=True, kw_only=True):
    secret: model.Secret
    value: str
    """Sent once, kept encrypted, never shown again."""


class Secrets(wire.Answer, frozen=True, kw_only=True):
    secrets: tuple[model.SecretInfo, ...]


@operation("GET", "/v1/sandboxes/{sandbox}/policy", scope="sandboxes", errors="sandbox_not_found")
async def get_policy(call: Call, sandbox: str) -> policy.Merged:
    """The rules that hold for a sandbox now."""
    return await call.backend.get_policy(sandbox)


@operation(
    "PATCH", "/v1/sandboxes/{sandbox}/policy", scope="policies",
    errors="sandbox_not_found policy_invalid network_unavailable",
)  # fmt: skip
async def update_policy(call: Call, sandbox: str, body: Change) -> policy.Merged:
    """Change the network rules of a live sandbox; they hold when this answers. Ceilings bind here too."""
    return await call.backend.update_policy(sandbox, {"network": body.network})


@operation("GET", "/v1/secrets", scope="admin")
async def list_secrets(call: Call) -> Secrets:
    """The secrets that are stored, without their values."""
    return Secrets(secrets=tuple(await call.backend.secrets()))


@operation("PUT", "/v1/secrets", scope="admin", errors="secret_invalid secrets_locked")
async def put_secret(call: Call, body: PutSecret) -> model.SecretInfo:
    """Store a secret, or replace it."""
    return await call.backend.set_secret(body.secret, body.value.encode())


@operation("DELETE", "/v1/secrets/{name}", scope="admin", errors="secret_not_found")
async def delete_secret(call: Call, name: str) -> None:
    """Remove a secret."""
    await call.backend.remove_secret(name)
