"""The server's certificate, which may change while it runs.

A context is made anew for each pair of files and takes over whole, at a handshake: one that was loaded into a context in use could leave it with a certificate and
another's key. Whether the files changed is looked at when somebody connects, once a second at most; a pair that cannot be used keeps the one before in use, and
the log says so once. Renewing in two steps is fine: between them the pair does not match, and after the second it does.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable

from cloche import errors

log = logging.getLogger("cloche.http")
_EVERY_S = 1.0
_Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    def __init__(self, cert: str, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = (cert, key)
        self._clock = clock
        self._looked_at = clock()
        try:
            self._stamp = self._stamps()
            self._current = self._load()
        except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
            raise errors.error(
                "settings_invalid",
                f"the certificate {cert!r} and its key {key!r} cannot be used: {_why(problem)}",
                hint="both are PEM files: the chain, the server's own certificate first, and a key without a passphrase",
            ) from None
        self.context = self._load()
        """For who listens. Each handshake goes on with what is current then, whether or not the client names a host."""
        self.context.sni_callback = self._hand_over

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        self.look_again()
        connection.context = self._current

    def look_again(self) -> None:
        """Take over what the files have become."""
        now = self._clock()
        if now - self._looked_at < _EVERY_S:
            return
        self._looked_at = now
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._current = self._load()
            log.info("the certificate was renewed from %s", self._files[0])
        except (OSError, ValueError) as problem:
            if isinstance(problem, FileNotFoundError):
                self._stamp = ()
            log.warning("the certificate before stays in use: %s cannot: %s", self._files[0], _why(problem))

    def _stamps(self) -> _Stamp:
        found = [os.stat(path) for path in self._files]
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._files, password=_no_passphrase)
        return context


def _no_passphrase() -> str:
    """Instead of asking on a terminal."""
    raise ValueError("the key has a passphrase")


def _why(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or getattr(problem, "reason", None) or str(problem)
