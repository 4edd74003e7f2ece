"""Reaching a server: resolve, check, dial, in that order and on one value.

    pypi.org:443            every address is asked for here, each is checked, a checked one is dialled
    api.test:443            `resolve` names an address: that one is dialled
    host.cloche.internal:80 the host's loopback (the decision has required a rule with this very name)

A name is never looked up twice: the address that was judged is the one in `connect`, so a name service that changes its
mind in between (rebinding) changes nothing. Answers that are not public are dropped, the others are used; if none is left,
that is a refusal by policy and not a failure.

With a parent proxy the name is handed to it (CONNECT), because behind one names can often not be resolved at all: which
address it is then is the parent's business. Addresses that are not public, overrides and the host's loopback are dialled
directly also then.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures.thread import ThreadPoolExecutor
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from cloche.egress import http, relay
from cloche.policy import names, rules

Failure = Literal["refused", "timeout", "reset", "dns", "unreachable", "parent", "tls"]
Resolver = Callable[[str, int], Awaitable[list[str]]]
_FIRST_TRY_S = 4.0


class DialFailed(Exception):
    """The server could not be reached, for reasons that are not ours."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotAllowed(Exception):
    """No address of the host may be dialled."""

    def __init__(self, decision: rules.Decision) -> None:
        super().__init__(decision.hint)
        self.decision = decision


class Dialled(NamedTuple):
    socket: socket.socket
    address: str
    leftover: bytes = b""
    """What a parent proxy sent after its answer: the server's first bytes."""


class Parent(NamedTuple):
    host: str
    port: int
    authorization: str

    @classmethod
    def parse(cls, text: str) -> Parent:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError("a parent proxy is http://[user:password@]host:port")
        login = ""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            login = "Basic " + base64.b64encode(pair.encode()).decode()
        return cls(parts.hostname, parts.port or 3128, login)

    def __repr__(self) -> str:
        return f"Parent({self.host!r}, {self.port})"


class Dialler:
    """Dials for all sandboxes of a proxy."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        parent: Parent | None = None,
        resolver: Resolver | None = None,
        connect_s: float = 10,
    ) -> None:
        self._loop = loop
        self._parent = parent
        self._connect_s = connect_s
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="lookup")
        self._resolve = resolver or self._system_resolver

    async def dial(self, policy: rules.RuleSet, host: str, port: int, lookups: asyncio.Semaphore) -> Dialled:
        """A connected socket to a host that `rules.decide` allowed."""
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._dial(policy, host, port, lookups)
        except TimeoutError:
            raise DialFailed("timeout", f"{host}:{port} did not answer in {self._connect_s:g} s") from None

    async def _dial(self, policy: rules.RuleSet, host: str, port: int, lookups: asyncio.Semaphore) -> Dialled:
        pinned = rules.override(policy, host, port)
        if pinned is not None:
            decision = rules.check_address(policy, host, *pinned, pinned=True)
            if not decision.allowed:
                raise NotAllowed(decision)
            return await self._connect_any([pinned[0]], pinned[1], host)
        if self._parent is not None and self._is_for_parent(host):
            return await self._through(self._parent, host, port, lookups)
        addresses = await self._addresses(host, port, lookups)
        return await self._connect_any(checked(policy, host, port, addresses), port, host)

    def _is_for_parent(self, host: str) -> bool:
        if host == names.HOST_LOOPBACK:
            return False
        return not names.is_address(host) or names.facts(host)[1] == "public"

    async def _addresses(self, host: str, port: int, lookups: asyncio.Semaphore) -> list[str]:
        if host == names.HOST_LOOPBACK:
            return ["127.0.0.1", "::1"]
        if names.is_address(host):
            return [host]
        async with lookups:
            return await self._resolve(host, port)

    async def _system_resolver(self, host: str, port: int) -> list[str]:
        def look_up() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))

        try:
            return await self._loop.run_in_executor(self._threads, look_up)
        except (socket.gaierror, UnicodeError) as problem:
            raise DialFailed("dns", f"{host} could not be resolved: {problem}") from None

    async def _connect_any(self, addresses: list[str], port: int, host: str) -> Dialled:
        last: OSError = OSError(errno.EHOSTUNREACH, "no address")
        for place, address in enumerate(addresses):
            try:
                # The last address gets all the time there is; the first ones must leave some.
                limit = None if place == len(addresses) - 1 else _FIRST_TRY_S
                async with asyncio.timeout(limit):
                    return Dialled(await self._connect(address, port), address)
            except TimeoutError:
                last = OSError(errno.ETIMEDOUT, "timed out")
            except OSError as problem:
                last = problem
        raise DialFailed(failure_of(last), f"{host}:{port}: {last.strerror or last}")

    async def _connect(self, address: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(made, (address, port))
            return made
        except BaseException:
            relay.close(self._loop, made)
            raise

    async def _through(self, parent: Parent, host: str, port: int, lookups: asyncio.Semaphore) -> Dialled:
        try:
            addresses = await self._addresses(parent.host, parent.port, lookups)
            dialled = await self._connect_any(addresses, parent.port, "the parent proxy")
        except DialFailed as problem:
            raise DialFailed("parent", f"parent proxy: {problem}") from None
        try:
            return await self._ask_parent(dialled, parent, host, port)
        except BaseException:
            relay.close(self._loop, dialled.socket)
            raise

    async def _ask_parent(self, dialled: Dialled, parent: Parent, host: str, port: int) -> Dialled:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        login = f"Proxy-Authorization: {parent.authorization}\r\n" if parent.authorization else ""
        await self._loop.sock_sendall(
            dialled.socket, f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{login}\r\n".encode()
        )
        data = bytearray()
        while True:
            try:
                piece = await self._loop.sock_recv(dialled.socket, 65536)
                data += piece
                head = http.parse_response(data) if data else None
            except (OSError, http.BadRequest) as problem:
                raise DialFailed("parent", f"parent proxy: {problem}") from None
            if head is not None:
                break
            if not piece:
                raise DialFailed("parent", "the parent proxy closed the connection")
        if head.status != 200:
            raise DialFailed("parent", f"the parent proxy answered {head.status} for {where}")
        return Dialled(dialled.socket, "parent", bytes(data[head.size :]))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def checked(policy: rules.RuleSet, host: str, port: int, addresses: list[str]) -> list[str]:
    """The addresses that may be dialled; raises `NotAllowed` if there is none."""
    kept: list[str] = []
    refused: rules.Decision | None = None
    for address in addresses:
        decision = rules.check_address(policy, host, address, port)
        if decision.allowed:
            kept.append(address)
        else:
            refused = refused or decision
    if not kept and refused is not None:
        raise NotAllowed(refused)
    return kept


def failure_of(problem: OSError) -> Failure:
    match problem.errno:
        case errno.ECONNREFUSED:
            return "refused"
        case errno.ETIMEDOUT:
            return "timeout"
        case errno.ECONNRESET | errno.EPIPE | errno.ECONNABORTED:
            return "reset"
        case _:
            return "unreachable"
