"""Signed tokens of somebody else's: JSON Web Tokens, by the keys that their issuer publishes.

What a token says counts only after its signature, and the order is fixed: shape, algorithm, key, signature, times, issuer, audience, claims. All refusals
but one have the same words (`token_invalid`), so that nobody learns by trying how far they came; the reason stands in the audit log. That a token's
time is over is told, because only who holds a genuine one gets there.

* *The algorithm is the key's, not the token's.* Only asymmetric ones exist here, so there is no secret to be confused with a public key and nothing that
  means "unsigned". A key verifies the algorithms of its own type and curve, and the one that it names if it names one.
* *Nothing in a token says where keys are* (`jku`, `x5u`, `jwk` are not looked at); a `crit` that nobody here understands refuses it.
* *The keys are fetched apart from the checking*: `prepare` may wait for the network, `check` never does. A key that is not known is a reason to look again,
  once in `_RETRY_S` however many ask; who cannot fetch goes on with what there is, and says so in the log. A file is read again when it changes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import math
import os
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cloche import errors, settings
from cloche.server import keys
from cloche.server.guarding import Principal
from cloche.server.http.operations import SCOPES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

log = logging.getLogger("cloche.http")
MAX_TOKEN = 8192
_MAX_SET = 1 << 20
_MAX_KEYS = 200
_MAX_NAME = 200
_LEAST_RSA_BITS = 2048
_FETCH_S = 5.0
_RETRY_S = 10.0
_CURVES = {"ES256": ("P-256", 32), "ES384": ("P-384", 48), "ES512": ("P-521", 66)}
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


class Refused(Exception):
    """Why a token is not good: for the record, never for who sent it."""


class Verifier(NamedTuple):
    """One published key, and the algorithms that it may verify."""

    algorithms: frozenset[str]
    verify: Callable[[str, bytes, bytes], bool]
    """(algorithm, signed bytes, signature)"""


def looks_like(secret: str) -> bool:
    return secret.startswith("eyJ") and secret.count(".") == 2


class Tokens:
    """The tokens of one issuer, as the settings describe them."""

    def __init__(
        self,
        config: settings.Jwt,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._now = now
        self._published = Published(_source(config.jwks or ""), config.refresh_s, clock)

    async def prepare(self, token: str) -> None:
        """Have the keys at hand that `check` will want; waits only where there is something to wait for."""
        try:
            kid = _header(token)[1].get("kid")
        except Refused:
            return
        await self._published.look_for(kid if isinstance(kid, str) else None)

    def check(self, token: str) -> Principal:
        try:
            claims = self._verified(token)
            self._check_times(claims)
            return self._principal(claims)
        except Refused as why:
            raise refused(str(why)) from None

    def _verified(self, token: str) -> dict[str, Any]:
        signed, header, payload, signature = _header(token)
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS or algorithm not in self._config.algorithms:
            raise Refused(f"the algorithm {str(algorithm)[:20]!r} is not accepted")
        if "crit" in header:
            raise Refused("it has critical extensions")
        if str(header.get("typ", "JWT")).lower() not in ("jwt", "at+jwt", "application/at+jwt"):
            raise Refused(f"it is a {str(header.get('typ'))[:20]!r}")
        found = self._published.find(header.get("kid"), algorithm)
        if not any(key.verify(algorithm, signed, signature) for key in found):
            raise Refused("the signature is not valid")
        return _json(payload)

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        now, leeway = self._now(), self._config.leeway_s
        expires = _moment(claims, "exp")
        if expires is None:
            raise Refused("it has no end (exp)")
        for claim in ("nbf", "iat"):
            moment = _moment(claims, claim)
            if moment is not None and moment > now + leeway:
                raise Refused(f"its time has not come ({claim})")
        if claims.get("iss") != self._config.issuer:
            raise Refused("it is another issuer's")
        meant = claims.get("aud")
        audiences = [meant] if isinstance(meant, str) else meant if isinstance(meant, list) else []
        if not any(isinstance(one, str) and one in self._config.audience for one in audiences):
            raise Refused("it is meant for somebody else")
        if expires <= now - leeway:
            raise errors.error("token_expired", "the token's time is over", hint="get a new one")

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        config = self._config
        name = _claim(claims, config.name_claim)
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise Refused(f"it does not say whose it is ({config.name_claim})")
        tenant: Any = ""
        if config.tenant_claim is not None:
            tenant = _claim(claims, config.tenant_claim)
            if not isinstance(tenant, str) or not keys.TENANT.fullmatch(tenant):
                raise Refused(f"it names no tenant ({config.tenant_claim})")
        return Principal(
            f"jwt:{name}", tenant, frozenset(self._scopes(claims)), expires_at=_moment(claims, "exp")
        )

    def _scopes(self, claims: Mapping[str, Any]) -> Iterable[str]:
        """Scopes that are ours; those of others may stand among them. `*` comes by a role only."""
        config = self._config
        if config.scopes_claim is not None:
            for word in _words(_claim(claims, config.scopes_claim)):
                if word.startswith(config.scope_prefix) and word.removeprefix(config.scope_prefix) in SCOPES:
                    yield word.removeprefix(config.scope_prefix)
        if config.roles_claim is not None:
            for word in _words(_claim(claims, config.roles_claim)):
                yield from keys.ROLES.get(config.roles.get(word, "") if config.roles else word, ())


def refused(why: str) -> errors.ClocheError:
    problem = errors.error(
        "token_invalid", "the token is not accepted here", hint="get a new one from whoever gave you this one"
    )
    problem.record = why
    return problem


# ── the issuer's keys ──────────────────────────────────────────────────────────────────────────────


class Source(NamedTuple):
    path: str | None
    url: str | None
    loopback: bool = False


def _source(jwks: str) -> Source:
    """A file, or an address that nobody on the way can answer for."""
    if jwks.startswith("/"):
        return Source(jwks, None)
    parsed = urllib.parse.urlsplit(jwks)
    if parsed.scheme == "file" and parsed.path.startswith("/") and not parsed.netloc:
        return Source(parsed.path, None)
    loopback = _is_loopback(parsed.hostname or "")
    if parsed.hostname and (parsed.scheme == "https" or (parsed.scheme == "http" and loopback)):
        return Source(None, jwks, loopback)
    raise errors.error(
        "settings_invalid",
        f"jwt.jwks is {jwks[:200]!r}; keys come by https://, from a file, or by http:// from loopback",
        hint="what travels in the open can be changed on the way",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Published:
    """The issuer's key set: cached, fetched again when it is old or when a key is missing."""

    def __init__(self, source: Source, refresh_s: float, clock: Callable[[], float]) -> None:
        self._source = source
        self._refresh_s = refresh_s
        self._clock = clock
        self._keys: dict[str | None, tuple[Verifier, ...]] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._fetched_at = self._tried_at = -math.inf
        self._fetching: asyncio.Task[None] | None = None

    async def look_for(self, kid: str | None) -> None:
        if self._source.path is not None:
            self._read_file(self._source.path)
            return
        missing = self._keys is None or (kid is not None and kid not in self._keys)
        stale = self._clock() - self._fetched_at >= self._refresh_s
        if not missing and not stale:
            return
        if self._fetching is None and self._clock() - self._tried_at >= _RETRY_S:
            self._tried_at = self._clock()
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(), name="keys of the issuer")
        if missing and self._fetching is not None:
            await asyncio.shield(self._fetching)

    def find(self, kid: Any, algorithm: str) -> list[Verifier]:
        """The keys that a token may be signed with. One that names none is held against the only key there is, if it is one."""
        if self._keys is None:
            raise errors.error(
                "server_unavailable",
                "tokens cannot be checked now",
                hint="the server's log says why; try again",
            )
        if kid is None:
            every = [key for keys in self._keys.values() for key in keys]
            found = every if len(every) == 1 else []
        else:
            found = list(self._keys.get(kid, ())) if isinstance(kid, str) else []
        found = [key for key in found if algorithm in key.algorithms]
        if not found:
            raise Refused("there is no such key for its algorithm")
        return found

    async def _fetch(self) -> None:
        try:
            data = await asyncio.to_thread(_download, self._source)
            self._keys = _key_set(data)
            self._fetched_at = self._clock()
        except (OSError, ValueError, Refused) as problem:
            log.warning("the issuer's keys could not be fetched from %s: %s", self._source.url, problem)
        finally:
            self._fetching = None

    def _read_file(self, path: str) -> None:
        try:
            found = os.stat(path)
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            with open(path, "rb") as file:
                self._keys = _key_set(file.read(_MAX_SET + 1))
        except (OSError, ValueError, Refused) as problem:
            if self._clock() - self._tried_at >= _RETRY_S:
                self._tried_at = self._clock()
                log.warning("the issuer's keys could not be read from %s: %s", path, problem)


def _download(source: Source) -> bytes:
    """At most so much, in at most so long, from there and nowhere else."""
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    proxies = urllib.request.ProxyHandler({} if source.loopback else None)
    request = urllib.request.Request(str(source.url), headers={"Accept": "application/json"})  # noqa: S310 - see _source
    deadline = time.monotonic() + 2 * _FETCH_S
    with urllib.request.build_opener(Stay, proxies).open(request, timeout=_FETCH_S) as answer:
        if answer.status != 200:
            raise OSError(f"the answer is {answer.status}")
        data = b""
        while part := answer.read1(1 << 16):
            data += part
            if len(data) > _MAX_SET:
                raise OSError("the answer has more than 1 MiB")
            if time.monotonic() > deadline:
                raise OSError("the answer takes too long")
    return data


def _key_set(data: bytes) -> dict[str | None, tuple[Verifier, ...]]:
    if len(data) > _MAX_SET:
        raise Refused("it has more than 1 MiB")
    listed = _json(data).get("keys")
    if not isinstance(listed, list):
        raise Refused("it is not a key set")
    found: dict[str | None, tuple[Verifier, ...]] = {}
    for key in listed[:_MAX_KEYS]:
        if isinstance(key, dict) and (made := _verifier(key)) is not None:
            kid = key.get("kid")
            kid = kid if isinstance(kid, str) else None
            found[kid] = (*found.get(kid, ()), made)
    if not found:
        raise Refused("it has no key that could verify anything")
    return found


def _verifier(key: dict[str, Any]) -> Verifier | None:
    """A key of the set; None for one that is not for this. One that is broken or weak is as good as absent."""
    if key.get("use", "sig") != "sig":
        return None
    if "key_ops" in key and "verify" not in _words(key["key_ops"]):
        return None
    try:
        made = {"RSA": _rsa, "EC": _elliptic, "OKP": _edwards}.get(str(key.get("kty")), _nothing)(key)
    except (ValueError, TypeError, KeyError, Refused):
        return None
    if made is not None and "alg" in key:
        made = made._replace(algorithms=made.algorithms & {str(key["alg"])})
    return made if made is not None and made.algorithms else None


def _nothing(key: dict[str, Any]) -> None:
    return None


def _rsa(key: dict[str, Any]) -> Verifier | None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    public = rsa.RSAPublicNumbers(_number(key["e"]), _number(key["n"])).public_key()
    if public.key_size < _LEAST_RSA_BITS:
        return None

    def verify(algorithm: str, signed: bytes, signature: bytes) -> bool:
        digest = _digest(algorithm)
        filled: padding.AsymmetricPadding = padding.PKCS1v15()
        if algorithm.startswith("PS"):
            filled = padding.PSS(padding.MGF1(digest), digest.digest_size)
        try:
            public.verify(signature, signed, filled, digest)
        except InvalidSignature:
            return False
        return True

    return Verifier(frozenset(name for name in ALGORITHMS if name[:2] in ("RS", "PS")), verify)


def _elliptic(key: dict[str, Any]) -> Verifier | None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    algorithm = next((name for name, (curve, _) in _CURVES.items() if curve == key.get("crv")), None)
    if algorithm is None:
        return None
    curves = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
    numbers = ec.EllipticCurvePublicNumbers(_number(key["x"]), _number(key["y"]), curves[algorithm])
    public, size = numbers.public_key(), _CURVES[algorithm][1]

    def verify(name: str, signed: bytes, signature: bytes) -> bool:
        if len(signature) != 2 * size:
            return False
        halves = (int.from_bytes(signature[:size], "big"), int.from_bytes(signature[size:], "big"))
        try:
            public.verify(encode_dss_signature(*halves), signed, ec.ECDSA(_digest(name)))
        except InvalidSignature:
            return False
        return True

    return Verifier(frozenset((algorithm,)), verify)


def _edwards(key: dict[str, Any]) -> Verifier | None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if key.get("crv") != "Ed25519":
        return None
    public = Ed25519PublicKey.from_public_bytes(_decode(key["x"]))

    def verify(algorithm: str, signed: bytes, signature: bytes) -> bool:
        try:
            public.verify(signature, signed)
        except InvalidSignature:
            return False
        return True

    return Verifier(frozenset(("EdDSA",)), verify)


def _digest(algorithm: str) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    return {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}[algorithm[2:]]


# ── reading ────────────────────────────────────────────────────────────────────────────────────────


def _header(token: str) -> tuple[bytes, dict[str, Any], bytes, bytes]:
    """(what is signed, the header, the payload, the signature)"""
    if len(token) > MAX_TOKEN or not token.isascii():
        raise Refused("it is too long, or not ASCII")
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        raise Refused("it does not have three parts")
    return (
        token.rpartition(".")[0].encode(),
        _json(_decode(parts[0])),
        _decode(parts[1]),
        _decode(parts[2]),
    )


def _decode(text: Any) -> bytes:
    """base64url without padding, and nothing else: other decoders skip what they do not know."""
    if not isinstance(text, str) or len(text) % 4 == 1:
        raise Refused("it is not base64url")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise Refused("it is not base64url") from None


def _json(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise Refused("it is not a JSON object") from None


def _number(text: Any) -> int:
    return int.from_bytes(_decode(text), "big")


def _moment(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{name} is not a time")
    return float(value)


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """By its whole name, dots included, else by way of the objects that it names."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _words(value: Any) -> list[str]:
    """A list, or words with spaces between them."""
    if isinstance(value, str):
        return value.split()
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []
