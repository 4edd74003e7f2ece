"""What E2B's clients refer to later and our nouns have no word for, per sandbox and in memory: it ends with the sandbox.

Tokens are here too. An access token is made for one sandbox and one key, and stands for that key as it is when the token is shown.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from starlette.requests import Request

from cloche import errors, interfaces, settings
from cloche.compat.e2b import faults, network

Kind = Literal["access", "traffic"]
_MOST_EVENTS = 10_000
_MOST_WORDS = 10_000
_MOST_SAMPLES = 1000
_WORDS_S = 24 * 3600.0


class Place(NamedTuple):
    """One request of the data plane: who asks what of which sandbox."""

    request: Request
    backend: interfaces.Backend
    sandbox: str
    held: Held
    config: settings.Settings


class Watcher:
    """Changes that a client will ask for; beyond a bound the oldest are dropped, as a client that never asks wants none."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.task: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Held:
    """What is remembered of one sandbox."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[Kind, str], str] = {}
        """(kind, token) → the name of the key."""
        self.processes: dict[str, dict[str, Any]] = {}
        """Execution → the process as its client described it (`config`, `tag`)."""
        self.watchers: dict[str, Watcher] = {}
        self.contexts: dict[str, str] = {}
        """Language → the context that code without one runs in."""
        self.queues: dict[str, asyncio.Lock] = {}
        """Language → who makes its context; the others wait."""
        self.timeout_s = 300.0
        """How long it was last given to live, for when traffic wakes it."""
        self.network: network.Config | None = None
        """Its network as a client said it."""
        self.samples: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self.usage: tuple[float, float] | None = None
        """When the processor time was last told, and how much it was (ms)."""

    def close(self) -> None:
        for watcher in self.watchers.values():
            watcher.close()


class State:
    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._held: dict[str, Held] = {}
        self._made: OrderedDict[tuple[str, str], tuple[bytes, float, asyncio.Future[str]]] = OrderedDict()

    async def once(self, key: str, word: str, body: bytes, make: Callable[[], Awaitable[str]]) -> str:
        """The sandbox that a key made with this idempotency word: another one only for another word, or after a failure."""
        digest, now = hashlib.sha256(body).digest(), time.monotonic()
        while self._made and (
            len(self._made) > _MOST_WORDS or now - next(iter(self._made.values()))[1] > _WORDS_S
        ):
            self._made.popitem(last=False)
        known = self._made.get((key, word))
        if known is not None:
            if known[0] != digest:
                raise faults.Fault(
                    409, "this Idempotency-Key was used for another request", name="name_conflict"
                )
            return await asyncio.shield(known[2])
        making: asyncio.Future[str] = asyncio.ensure_future(make())
        self._made[key, word] = digest, now, making
        try:
            return await asyncio.shield(making)
        except errors.ClocheError:
            self._made.pop((key, word), None)
            raise

    def of(self, sandbox: str) -> Held:
        return self._held.setdefault(sandbox, Held())

    def known(self, sandbox: str) -> Held | None:
        return self._held.get(sandbox)

    def forget(self, sandbox: str) -> None:
        held = self._held.pop(sandbox, None)
        if held is not None:
            held.close()

    def ids(self) -> list[str]:
        return list(self._held)

    def next_ids(self, most: int) -> list[str]:
        """Some of them: those that were not asked for longest, which go to the end of the line."""
        found = list(itertools.islice(self._held, most))
        for sandbox in found:
            self._held[sandbox] = self._held.pop(sandbox)
        return found

    def issue(self, sandbox: str, key: str, kind: Kind) -> str:
        """The token of a sandbox for a key: the same one every time, while this server runs."""
        words = f"{kind}:{sandbox}:{key}".encode()
        token = hmac.new(self._secret, words, hashlib.sha256).hexdigest()
        self.of(sandbox).tokens[kind, token] = key
        return token

    def holder(self, sandbox: str, token: str, kinds: tuple[Kind, ...]) -> str | None:
        """The key that a token stands for, None for a token that is not this sandbox's."""
        held = self.known(sandbox)
        found = None
        for (kind, known), key in (held.tokens if held else {}).items():
            if hmac.compare_digest(known.encode(), token.encode()) and kind in kinds:
                found = key
        return found

    def signer(
        self, candidates: list[str], path: str, operation: str, user: str, signature: str, expiration: str
    ) -> tuple[str, str] | None:
        """(sandbox, key) of a signed address; None if nobody signed it or its time is over."""
        if expiration and not (
            expiration.isascii() and expiration.isdigit() and int(expiration) > time.time()
        ):
            return None
        found = None
        for sandbox in candidates:
            held = self.known(sandbox)
            for (kind, token), key in (held.tokens if held else {}).items():
                if kind == "access" and hmac.compare_digest(
                    sign(path, operation, user, token, expiration).encode(), signature.encode()
                ):
                    found = sandbox, key
        return found


def sign(path: str, operation: str, user: str, token: str, expiration: str) -> str:
    words = f"{path}:{operation}:{user}:{token}" + (f":{expiration}" if expiration else "")
    digest = hashlib.sha256(words.encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()
