"""Preview links: who has one reaches one port of one sandbox, without a key, until it expires.

    http://8000-<sandbox>.localhost:7777/?cloche_link=<expiry>.<mac>

The mac is HMAC-SHA256 of sandbox, port and expiry with a key that is kept in `$CLOCHE_HOME/keys/links.key` (0600). Nothing else is kept, so
a link cannot be taken back by itself: it ends with its time, with its sandbox, and all of them with the key's file. Its life is therefore
bounded. A browser is given the same token as a cookie of that host name, so that the address it shows has none.
"""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from cloche import errors, model
from cloche.server import keys

NAME = "cloche_link"
LONGEST_S = 7 * 24 * 3600.0


class Links:
    def __init__(self, home: str, base: str, now: Callable[[], float] = time.time) -> None:
        """`base`: scheme, domain and port that names of sandboxes are put before, as `http://localhost:7777`."""
        self._signing = keys.SigningKey(home, "links")
        self._scheme, _, self._domain = base.partition("://")
        self._now = now

    def make(self, sandbox: str, port: int, ttl_s: float) -> model.LinkInfo:
        if not 1 <= ttl_s <= LONGEST_S:
            raise errors.error(
                "limit_invalid",
                f"ttl_s is {ttl_s:g}",
                hint=f"a link lives 1 to {LONGEST_S:.0f} seconds; it cannot be taken back",
                field="ttl_s",
            )
        expires = int(self._now() + ttl_s)
        token = self._token(sandbox, port, expires, make=True)
        url = f"{self._scheme}://{port}-{sandbox}.{self._domain}/?{NAME}={token}"
        return model.LinkInfo(url=url, expires_at=expires)

    def check(self, token: str, sandbox: str, port: int) -> float:
        """When it expires; `link_refused` for one that is not ours, not for this port, or over."""
        expires, _, _ = token.partition(".")
        known = expires.isascii() and expires.isdecimal() and len(expires) < 16
        made = self._token(sandbox, port, int(expires) if known else 0)
        if not hmac.compare_digest(made.encode(), token.encode("utf-8", "replace")):
            raise errors.error("link_refused", "this link does not lead here", hint="ask for a new one")
        if int(expires) <= self._now():
            raise errors.error("link_refused", "this link has expired", hint="ask for a new one")
        return float(expires)

    def cookie(self, token: str, expires: float, *, secure: bool) -> bytes:
        left = max(0, int(expires - self._now()))
        words = f"{NAME}={token}; Path=/; Max-Age={left}; HttpOnly; SameSite=Lax"
        return (words + "; Secure" if secure else words).encode()

    def _token(self, sandbox: str, port: int, expires: int, *, make: bool = False) -> str:
        key = self._signing.make() if make else self._signing.read()
        if key is None:
            raise errors.error("link_refused", "no link was ever made here", hint="ask for a new one")
        words = f"cloche preview link\0{sandbox}\0{port}\0{expires}".encode()
        mac = hmac.digest(key, words, "sha256")
        return f"{expires}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


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
