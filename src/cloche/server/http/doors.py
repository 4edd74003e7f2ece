"""Who calls, and whether they came in by a proper door.

* A request needs a key (`Authorization: Bearer`, `X-API-Key`; E2B's clients send the latter) or a token, and that a scope. What is refused
  here is said in the same words whether the thing asked for exists or not.
* *No web page drives a local server.* `Host` must be a name that this server goes by (loopback, the address that the connection came in on, or what the
  configuration names), which ends DNS rebinding; a request with an `Origin` is refused unless the configuration names that origin. Probes too.
* A `Principal` is made once per request, and is all that the rest of the house knows of the caller.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers

from cloche import errors, model
from cloche.server import hostpaths, jwt, keys, tokens
from cloche.server.guarding import Principal

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_OF_A_SANDBOX = re.compile(rf"[0-9]{{1,5}}-[a-z0-9]{{{model.ID_LENGTH}}}\.(.+)")
_MOST_GUESTS = 10_000


class Doors:
    def __init__(
        self,
        known: keys.Keys,
        *,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        foreign: jwt.Tokens | None = None,
        access: tokens.AccessTokens | None = None,
        host_paths: Sequence[str] = (),
        local: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        """`local`: the word of who came by the unix socket, see `connections.Local`."""
        self._keys = known
        self._local = local
        self._foreign = foreign
        self._access = access
        self._host_paths = tuple(host_paths)
        self._now = now
        named = {host.lower() for host in hosts}
        self._hosts = {"localhost", "127.0.0.1", "[::1]"} | {name for name in named if name[:1] != "*"}
        self._suffixes = (".localhost", *(name[1:] for name in named if name.startswith("*.")))
        self._any = "*" in named
        self._origins = set(origins)
        self._guests: OrderedDict[str, Principal] = OrderedDict()

    async def prepare(self, headers: Headers) -> None:
        """What may take a while, before anything is decided."""
        secret = _secret(headers)
        if self._foreign is not None and jwt.looks_like(secret):
            await self._foreign.prepare(secret)

    def check_name(self, headers: Headers, local: str = "") -> None:
        """`local`: the address that the connection came in on. A page that was loaded from there is ours."""
        given = headers.getlist("host")
        matched = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        if matched is None or not (self._goes_by(matched[1]) or _same_address(matched[1], local)):
            name = (matched[1] if matched else ", ".join(given))[:100]
            raise errors.error(
                "peer_refused",
                f"this server is not called {name!r}"
                if given
                else "the request does not say whom it is for (Host)",
                hint="add the name to server.hosts in the settings",
            )

    def _goes_by(self, name: str) -> bool:
        if self._any or name in self._hosts or name.endswith(self._suffixes):
            return True
        of_sandbox = _OF_A_SANDBOX.fullmatch(name)
        return of_sandbox is not None and of_sandbox[1] in self._hosts

    def check_origin(self, headers: Headers, own: str | None = None) -> None:
        """The page that it comes from, if it is one. By what name we are called was looked at before any face was asked. `own`: an
        origin that is accepted besides those of the settings; "*" is any."""
        origin = headers.get("origin")
        if origin is not None and own not in (origin, "*") and origin not in self._origins:
            raise errors.error(
                "peer_refused",
                f"requests from web pages of {origin[:100]!r} are not accepted",
                hint="add the origin to server.origins in the settings",
            )

    def principal(self, headers: Headers) -> Principal:
        secret = _secret(headers)
        if not secret:
            raise errors.error(
                "key_missing",
                "this request has no API key",
                hint="send `Authorization: Bearer cl_…`; `cloche serve` prints where the key is kept",
            )
        if self._local and hmac.compare_digest(secret.encode("utf-8", "replace"), self._local.encode()):
            return self._remembered(Principal(f"uid:{os.geteuid()}", "", frozenset("*"), host_paths=True))
        if self._foreign is not None and jwt.looks_like(secret):
            return self._remembered(self._placed(self._foreign.check(secret)))
        if self._access is not None and secret.startswith(tokens.PREFIX):
            return self._remembered(self._access.check(secret))
        return self._placed(_principal(self._keys.check(secret)))

    def _placed(self, caller: Principal) -> Principal:
        if not self._host_paths:
            return caller
        return caller._replace(directories=hostpaths.directories(self._host_paths, caller.tenant))

    def _remembered(self, guest: Principal) -> Principal:
        """So that `holder` knows who has no key."""
        self._guests[guest.known_as] = guest
        self._guests.move_to_end(guest.known_as)
        while len(self._guests) > _MOST_GUESTS:
            self._guests.popitem(last=False)
        return guest

    def holder(self, name: str) -> Principal:
        """Who goes by that name now; refused once the key is revoked or over, or the token is."""
        if ":" not in name:
            return self._placed(_principal(self._keys.named(name)))
        guest = self._guests.get(name)
        if guest is None or (guest.expires_at is not None and guest.expires_at <= self._now()):
            raise errors.error("token_expired", "the token's time is over", hint="get a new one")
        return guest


def name_of(headers: Headers) -> str:
    """The name that the server was called by, without a port; empty for what is no name."""
    matched = _HOST.fullmatch(headers.get("host", "").lower())
    return matched[1] if matched else ""


def _secret(headers: Headers) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")


def _principal(key: keys.Key) -> Principal:
    return Principal(key.name, key.tenant, frozenset(key.scopes), expires_at=key.expires_at)


def _same_address(name: str, local: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")) == ipaddress.ip_address(local)
    except ValueError:
        return False
