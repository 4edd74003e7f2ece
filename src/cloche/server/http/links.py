"""Preview links: who has one reaches one port of one sandbox, without a key, until it expires.

    http://8000-<sandbox>.localhost:7777/?cloche_link=<expiry>.<made at>.<by whom>.<mac>

The mac is HMAC-SHA256 of these, the sandbox and the port with a key that is kept in `$CLOCHE_HOME/keys/links.key` (0600). Nothing else is kept, so
a link cannot be taken back by itself: it ends with its time, its sandbox, the API key that made it, and all of them with the file. Its life is
therefore bounded. A browser is given the same token as a cookie of that host name, so that the address it shows has none.
"""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple

from cloche import errors, model
from cloche.server import keys

NAME = "cloche_link"
LONGEST_S = 7 * 24 * 3600.0
_MAX = 2048


class Links:
    def __init__(self, home: str, base: str, known: keys.Keys, now: Callable[[], float] = time.time) -> None:
        """`base`: scheme, domain and port that names of sandboxes are put before, as `http://localhost:7777`."""
        self._signing = keys.SigningKey(home, "links")
        self._scheme, _, self._domain = base.partition("://")
        self._known = known
        self._now = now

    def make(self, sandbox: str, port: int, ttl_s: float, issuer: str) -> model.LinkInfo:
        """`issuer`: who asks for it, as the journal names callers: `key:ci@red`, `jwt:alice`, `uid:1000`."""
        if not 1 <= ttl_s <= LONGEST_S:
            raise errors.error(
                "limit_invalid",
                f"ttl_s is {ttl_s:g}",
                hint=f"a link lives 1 to {LONGEST_S:.0f} seconds; it cannot be taken back by itself",
                field="ttl_s",
            )
        now = self._now()
        expires = int(now + ttl_s)
        claims = f"{expires}.{int(now * 1000) + 1}.{_encode(issuer.encode())}"
        token = f"{claims}.{_sign(self._signing.make(), sandbox, port, claims)}"
        return model.LinkInfo(
            url=f"{self._scheme}://{port}-{sandbox}.{self._domain}/?{NAME}={token}", expires_at=expires
        )

    def check(self, token: str, sandbox: str, port: int) -> Shown:
        """`link_refused` for one that is not ours, not for this port, over, or of a key that is not there any more."""
        claims, _, signature = token.rpartition(".")
        key = self._signing.read()
        if (
            key is None
            or len(token) > _MAX
            or not hmac.compare_digest(
                _sign(key, sandbox, port, claims).encode(), signature.encode("utf-8", "replace")
            )
        ):
            raise _refused("this link does not lead here")
        expires, made_ms, issuer = claims.split(".")
        if int(expires) <= self._now():
            raise _refused("this link has expired")
        return Shown(token, float(expires), self._payer(_decode(issuer), int(made_ms)))

    def _payer(self, issuer: str, made_ms: int) -> str:
        """Who made it, as doors name callers. A key must still be there, be the same one, and may still reach ports."""
        who = issuer.partition("@")[0]
        if not who.startswith("key:"):
            return who
        name = who.removeprefix("key:")
        try:
            key = self._known.named(name)
        except errors.ClocheError:
            raise _refused("the key that made this link is revoked or over") from None
        if key.created_at * 1000 > made_ms or not {"*", "ports"} & set(key.scopes):
            raise _refused("the key that made this link was another one of that name, or may no more")
        return name

    def cookie(self, shown: Shown, *, secure: bool) -> bytes:
        left = max(0, int(shown.expires_at - self._now()))
        words = f"{NAME}={shown.token}; Path=/; Max-Age={left}; HttpOnly; SameSite=Lax"
        return (words + "; Secure" if secure else words).encode()


class Shown(NamedTuple):
    """A link that is good."""

    token: str
    expires_at: float
    payer: str


def _refused(why: str) -> errors.ClocheError:
    return errors.error("link_refused", why, hint="ask for a new one")


def _sign(key: bytes, sandbox: str, port: int, claims: str) -> str:
    words = f"cloche preview link\0{sandbox}\0{port}\0{claims}".encode("utf-8", "replace")
    return _encode(hmac.digest(key, words, "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> str:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()


def of_cookies(header: str) -> list[str]:
    """The tokens in a `Cookie` header; a page of a neighbour may have put its own beside ours."""
    found = []
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == NAME:
            found.append(value.strip('"'))
    return found


def without_cookie(header: str) -> str:
    """The header as the sandbox may see it."""
    return "; ".join(
        part.strip() for part in header.split(";") if part.strip().partition("=")[0].strip() != NAME
    )


def own_cookie(header: str) -> str | None:
    """A `Set-Cookie` of the sandbox, kept to its own host name; None for one that would replace ours or is none."""
    name, _, rest = header.partition(";")
    if name.partition("=")[0].strip() in (NAME, "") or "=" not in name:
        return None
    try:
        SimpleCookie(name)
    except CookieError:
        return None
    kept = [part for part in rest.split(";") if part.strip().partition("=")[0].strip().lower() != "domain"]
    return ";".join([name, *kept]) if rest else name


def without_token(query: bytes) -> tuple[bytes, str | None]:
    """The query as the sandbox may see it, byte for byte, and the token that was in it."""
    mark = NAME.encode() + b"="
    parts = query.split(b"&")
    tokens = [part[len(mark) :].decode("latin-1") for part in parts if part.startswith(mark)]
    return b"&".join(part for part in parts if not part.startswith(mark)), tokens[-1] if tokens else None


def base_url(domain: str, port: int, *, scheme: str = "http") -> str:
    """`server.domain` as the beginning of addresses: with a scheme it stands as it is, else this server's port is added."""
    if "://" in domain:
        return domain.rstrip("/")
    return f"{scheme}://{domain}:{port}"
