"""Access tokens: one sandbox, some verbs, some minutes; for whoever should work in a sandbox and own nothing else.

    ct_<claims, base64url>.<HMAC-SHA256, base64url>

*Signed, not stored.* A service makes one per user and sandbox, perhaps hundreds a second; there is no row to write, to expire or to lose, and an archived
sandbox's tokens outlive a restart as it does. What a store would be for, ending them early, needs none: a token ends with its time, its sandbox (ids are never used again),
the key that made it (looked up at every use, so it never may more than that key does now), and all of them with the file `$CLOCHE_HOME/keys/tokens.key`.

A token makes no tokens and no links, neither lists nor creates sandboxes, and changes nothing that limits the one it is for (`guarding.BY_TOKEN`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import msgspec

from cloche import errors, model
from cloche.server import jwt, keys
from cloche.server.guarding import Principal

PREFIX = "ct_"
_MAX = 2048
_CONTEXT = b"cloche access token 1\0"


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    sandbox: str
    tenant: str
    scopes: tuple[str, ...]
    issuer: str
    """Who asked for it, as the journal names callers: `key:ci@red`, `jwt:alice@red`, `uid:1000`."""
    made_at: float
    expires_at: float


class AccessTokens:
    def __init__(self, home: str, known: keys.Keys, now: Callable[[], float] = time.time) -> None:
        self._known = known
        self._signing = keys.SigningKey(home, "tokens")
        self._now = now

    def issue(
        self, sandbox: str, tenant: str, scopes: tuple[str, ...], ttl_s: float, issuer: str
    ) -> model.AccessToken:
        now = self._now()
        claims = Claims(
            id=secrets.token_hex(6), sandbox=sandbox, tenant=tenant, scopes=scopes, issuer=issuer, made_at=now,
            expires_at=now + ttl_s,
        )  # fmt: skip
        data = msgspec.json.encode(claims)
        token = f"{PREFIX}{_encode(data)}.{_encode(_sign(self._signing.make(), data))}"
        return model.AccessToken(token=token, sandbox=sandbox, scopes=scopes, expires_at=claims.expires_at)

    def check(self, token: str) -> Principal:
        """Who shows it, or `token_invalid`, in the same words for every reason but its time."""
        claims = self._verified(token)
        scopes = self._of_issuer(claims) & set(claims.scopes)
        if claims.expires_at <= self._now():
            raise errors.error("token_expired", "the token's time is over", hint="get a new one")
        return Principal(
            f"token:{claims.id}", claims.tenant, frozenset(scopes), expires_at=claims.expires_at,
            sandbox=claims.sandbox, payer=_account(claims),
        )  # fmt: skip

    def _verified(self, token: str) -> Claims:
        head, _, tail = token.removeprefix(PREFIX).partition(".")
        key = self._signing.read()
        try:
            data, signature = _decode(head), _decode(tail)
        except (binascii.Error, ValueError):
            raise jwt.refused("it is not a token") from None
        if len(token) > _MAX or key is None or not hmac.compare_digest(_sign(key, data), signature):
            raise jwt.refused("the signature is not valid")
        return msgspec.json.decode(data, type=Claims)

    def _of_issuer(self, claims: Claims) -> set[str]:
        """The scopes of who made it, as they are now. Of others than keys there is nothing to look up: what was signed counts."""
        if not claims.issuer.startswith("key:"):
            return set(claims.scopes)
        try:
            key = self._known.named(_account(claims))
        except errors.ClocheError:
            raise jwt.refused("the key that made it is revoked or over") from None
        if key.created_at > claims.made_at or key.tenant not in ("", claims.tenant):
            raise jwt.refused("the key that made it was another one of that name")
        return set(claims.scopes) if "*" in key.scopes else set(key.scopes)


def _account(claims: Claims) -> str:
    """Its issuer as doors know callers: a key by its name, others as they are."""
    if not claims.issuer.startswith("key:"):
        return claims.issuer
    return claims.issuer.removeprefix("key:").partition("@")[0]


def _sign(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, _CONTEXT + data, hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    if not text.isascii():
        raise ValueError("not ASCII")
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
