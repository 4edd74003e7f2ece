"""Who calls, and whether they came in by a proper door.

* A request needs a key (`Authorization: Bearer`, `X-API-Key`; E2B's clients send the latter), and the key a scope. What is refused
  here is said in the same words whether the thing asked for exists or not.
* *No web page drives a local server.* `Host` must be a name that this server goes by (loopback, its address, or what the configuration
  names), which ends DNS rebinding; a request with an `Origin` is refused unless the configuration names that origin. Probes too.
* A `Principal` is made once per request, and is all that the rest of the house knows of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers

from cloche import errors
from cloche.server import keys
from cloche.server.guarding import Principal


class Doors:
    def __init__(self, known: keys.Keys, *, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._keys = known
        self._hosts = {"localhost", "127.0.0.1", "[::1]", *hosts}
        self._origins = set(origins)

    def check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in self._hosts and not name.endswith(".localhost"):
            raise errors.error(
                "peer_refused",
                f"this server is not called {name[:100]!r}",
                hint="add the name to server.hosts in the settings",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            raise errors.error(
                "peer_refused",
                f"requests from web pages of {origin[:100]!r} are not accepted",
                hint="add the origin to server.origins in the settings",
            )

    def principal(self, headers: Headers) -> Principal:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        secret = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not secret:
            raise errors.error(
                "key_missing",
                "this request has no API key",
                hint="send `Authorization: Bearer cl_…`; `cloche serve` prints where the key is kept",
            )
        return _principal(self._keys.check(secret))

    def holder(self, name: str) -> Principal:
        """Who a key of that name stands for now; `key_refused` once it is revoked or over."""
        return _principal(self._keys.named(name))


def _principal(key: keys.Key) -> Principal:
    return Principal(key.name, key.tenant, frozenset(key.scopes))
