"""What a sandbox may touch, and the secrets that are put in for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from cloche import errors, model, policy
from cloche.policy import explaining
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Stream, begun
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.reading import if_match
from cloche.server.http.routes.table import operation

_PATIENCE_S = 5.0  # for the first word of a stream


class Change(wire.Body, frozen=True, kw_only=True):
    """Fields of the group `network`, each replaced as a whole."""

    network: dict[str, Any]


class PutSecret(wire.Body, frozen=True, kw_only=True):
    secret: model.Secret
    value: str
    """Sent once, kept encrypted, never shown again."""


class Secrets(wire.Page, frozen=True, kw_only=True):
    secrets: tuple[model.SecretInfo, ...]


class Rule(wire.Body, frozen=True, kw_only=True):
    rule: str


class Answer(wire.Body, frozen=True, kw_only=True):
    answer: Literal["once", "sandbox", "deny"]
    """For this connection, for the sandbox's life, or no."""
    reason: str = ""


_SANDBOX = "sandbox_not_found sandbox_lost"
_POLICY = "policy_invalid profile_unknown mode_unknown host_path_refused policy_untrusted"


@operation(
    "GET",
    "/v1/sandboxes/{sandbox}/policy",
    scope="sandboxes",
    errors=_SANDBOX,
    version=policy.version,
    whole=True,
)
async def get_policy(call: Call, sandbox: str) -> policy.Merged:
    """The rules that hold for a sandbox now."""
    return await call.backend.get_policy(sandbox)


@operation(
    "PATCH", "/v1/sandboxes/{sandbox}/policy", scope="policies", matches=True, version=policy.version,
    errors=f"{_SANDBOX} policy_invalid network_unavailable version_conflict not_supported_by_driver",
    example={"network": {"mode": "rules", "allow": ["pypi.org"]}},
)  # fmt: skip
async def update_policy(call: Call, sandbox: str, body: Change) -> policy.Merged:
    """Change the network rules of a live sandbox; they hold when this answers. Ceilings bind here too."""
    seen = if_match(call.request.headers)
    return await call.backend.update_policy(sandbox, {"network": body.network}, seen)


@operation(
    "POST",
    "/v1/policies/check",
    scope="sandboxes",
    errors=_POLICY,
    example={"profile": "strict", "policy": {"network": {"mode": "rules", "allow": ["pypi.org"]}}},
)
async def check_policy(call: Call, body: wire.Rules) -> policy.Merged:
    """The rules that a sandbox would have, the operator's included; or what is wrong with them. Nothing is made."""
    return await call.backend.check_policy(body.spec(call.defaults))


@operation(
    "POST",
    "/v1/policies/explain",
    scope="sandboxes",
    errors=f"{_SANDBOX} {_POLICY}",
    example={"kind": "host", "target": "pypi.org:443", "profile": "moderate"},
)
async def explain_policy(call: Call, body: wire.Explain) -> explaining.Explanation:
    """Which rule decides about a host, a path, a variable or a secret, and where that rule stands."""
    if body.sandbox is not None and (body.profile or body.mode or body.policy):
        raise errors.error(
            "argument_invalid",
            "a policy is explained for a sandbox or for rules, and both are given",
            hint="leave out the sandbox, or profile, mode and policy",
            field="sandbox",
        )
    spec = body.spec(call.defaults) if body.sandbox is None else None
    return await call.backend.explain_policy(
        body.kind, body.target, body.sandbox, spec, body.write, body.method, body.path
    )


@operation(
    "POST", "/v1/policies/allow", scope="admin", errors="policy_invalid", example={"rule": "pypi.org:443"}
)
async def allow_always(call: Call, body: Rule) -> None:
    """Add a network rule to the policy file of the server's user; sandboxes to come have it."""
    await call.backend.allow_always(body.rule)


# ── asking ─────────────────────────────────────────────────────────────────────────────────────────


@operation(
    "GET",
    "/v1/sandboxes/{sandbox}/asks",
    scope="sandboxes",
    errors=f"{_SANDBOX} not_supported_by_driver",
    events={"ready": model.Question, "question": model.Question},
)
async def follow_asks(call: Call, sandbox: str) -> Stream[model.Question]:
    """Be asked about what a sandbox wants to reach and no rule decides, as server-sent events.

    `ready` comes first: from then on connections wait for an answer, each told as `question`. Whoever leaves is not asked any more,
    and what still waits is refused.
    """
    return Stream(await begun(_questions(call.backend.follow_asks(sandbox)), _PATIENCE_S), endless=True)


async def _questions(asked: AsyncIterator[model.Question]) -> AsyncIterator[Event]:
    async with aclosing(asked) as questions:  # type: ignore[type-var]
        async for question in questions:
            yield Event("question" if question.id else "ready", question)


@operation(
    "POST",
    "/v1/sandboxes/{sandbox}/asks/{question}",
    scope="sandboxes",
    errors=f"{_SANDBOX} question_not_found",
    example={"answer": "once"},
)
async def answer_ask(call: Call, sandbox: str, question: str, body: Answer) -> None:
    """Answer a question: for this connection, for the sandbox's life, or no."""
    await call.backend.answer_ask(sandbox, question, body.answer, body.reason)


# ── secrets ────────────────────────────────────────────────────────────────────────────────────────


def _secret_tag(info: model.SecretInfo) -> str:
    return info.version


@operation("GET", "/v1/secrets", scope="admin")
async def list_secrets(call: Call, *, limit: Limit = 100, cursor: Cursor | None = None) -> Secrets:
    """The secrets that are stored, by name and without their values."""
    found, more = page(await call.backend.secrets(), lambda info: (info.name,), limit, cursor)
    return Secrets(secrets=found, next_cursor=more)


@operation(
    "GET", "/v1/secrets/{name}", scope="admin", errors="secret_not_found", version=_secret_tag, whole=True
)
async def get_secret(call: Call, name: str) -> model.SecretInfo:
    """One secret, without its value."""
    for info in await call.backend.secrets():
        if info.name == name:
            return info
    raise errors.error("secret_not_found", f"there is no secret {name[:100]!r}", hint="list them")


@operation(
    "PUT", "/v1/secrets/{name}", scope="admin", matches=True, version=_secret_tag,
    errors="secret_invalid secrets_locked secrets_corrupt version_conflict",
    example={"secret": {"name": "github", "hosts": ["api.github.com"], "env": "GITHUB_TOKEN"}, "value": "ghp_example"},
)  # fmt: skip
async def put_secret(call: Call, name: str, body: PutSecret) -> model.SecretInfo:
    """Store a secret, or replace it; with `If-Match`, only that version of it. Sandboxes that run keep what they were given."""
    if body.secret.name != name:
        raise errors.error(
            "argument_invalid",
            f"the secret is called {body.secret.name[:100]!r}, the path {name[:100]!r}",
            hint="give both the same name",
            field="name",
        )
    value = body.value.encode("utf-8", "surrogateescape")
    return await call.backend.set_secret(body.secret, value, if_match(call.request.headers))


@operation(
    "DELETE",
    "/v1/secrets/{name}",
    scope="admin",
    matches=True,
    errors="secret_not_found secrets_corrupt version_conflict",
)
async def delete_secret(call: Call, name: str) -> None:
    """Remove a secret; with `If-Match`, only that version of it."""
    await call.backend.remove_secret(name, if_match(call.request.headers))


@operation("POST", "/v1/secret-keys/rotate", scope="admin", errors="secrets_locked secrets_corrupt")
async def rotate_secrets_key(call: Call) -> wire.Count:
    """Seal all values with a new key; how many there are."""
    return wire.Count(count=await call.backend.rotate_secrets_key())
