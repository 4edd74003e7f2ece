"""The proxy process: accepts for all sandboxes, outside all of them. `python -m cloche.egress.proxy FD`.

    engine ──(one SEQPACKET socket, records.py)──► proxy ◄── listeners made inside each sandbox's network namespace

It holds nothing but sockets: no route, no address and no firewall rule of the host are changed for it, and it needs no
privilege (as root it gives it up). It reads what hostile programs send, so it is a process of its own with an empty
environment; it ends when its engine's socket closes. While it is away, connections wait in the listeners that the engine
also holds; there is no other way out of a sandbox, so nothing can fail open.

One loop, no thread but for name lookups. A connection is a `conversation.Conversation`; this module has the sandboxes, the
listeners, the stub resolver, the control socket and the records.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import resource
import signal
import socket
import ssl
import sys
from collections import OrderedDict, deque
from typing import Any

import msgspec

from cloche.egress import authority, conversation, credentials, dns, records, relay, upstream
from cloche.guest import wire
from cloche.linux import processes
from cloche.policy import rules

_ACCEPTS = 64
_NOBODY = 65534
_SWEEP_S = 5.0
_RETRY_ACCEPT_S = 0.2
_MINT_S = 10.0
_MOST_LEAVES = 512
_MOST_UNSENT_USES = 4096
_ANSWER_S = 3600.0  # the engine has a limit of its own, and always answers
_SEEN_S = 1.0  # how long a refused client waits for the engine to take note


class Sandbox:
    """What the proxy knows of a sandbox: its rules, its sockets, the names it was given, its connections."""

    def __init__(self, sandbox_id: str, policy: rules.RuleSet, limits: records.Limits) -> None:
        self.id = sandbox_id
        self.rules = policy
        self.credentials = credentials.Credentials()
        self.inspects = False
        self.sockets: list[socket.socket] = []
        self.table = dns.NameTable(first=random.randrange(1 << 17))
        self.conversations: set[conversation.Conversation] = set()
        self.lookups = asyncio.Semaphore(limits.lookups)
        self.ipv6 = True
        self.tokens = float(limits.records_per_s)
        self.counted_at = 0.0
        self.dropped = 0
        self.last_unknown: tuple[str, Any] = ("", None)


class Proxy:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        control: socket.socket,
        *,
        resolver: upstream.Resolver | None = None,
    ) -> None:
        self.loop = loop
        self.options = records.Options()
        self.dialler = upstream.Dialler(loop, resolver=resolver)
        self.ended = loop.create_future()
        self._resolver = resolver
        self._control = control
        self._sandboxes: dict[str, Sandbox] = {}
        self._unsent: deque[bytes] = deque()
        self._leaves: OrderedDict[str, tuple[ssl.SSLContext, float]] = OrderedDict()
        self._minting: dict[str, asyncio.Future[ssl.SSLContext]] = {}
        self._trust: ssl.SSLContext | None = None
        self._unseen: dict[int, asyncio.Future[None]] = {}
        self._refusals = 0
        self._asked: dict[int, asyncio.Future[tuple[bool, str]]] = {}
        control.setblocking(False)
        loop.add_reader(control, self._hear)
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    def close(self) -> None:
        self._sweeper.cancel()
        for sandbox in list(self._sandboxes.values()):
            self._detach(sandbox.id)
        relay.close(self.loop, self._control)
        self.dialler.close()
        if not self.ended.done():
            self.ended.set_result(None)

    # ── the engine ──────────────────────────────────────────────────────────────────────────────

    def _hear(self) -> None:
        try:
            received = wire.receive(self._control)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError):
            received = None
        if received is None:
            self.close()
            return
        message, fds = received
        sealed = fds.pop() if message.get("credentials") and fds else -1
        taken = [socket.socket(fileno=fd) for fd in fds]
        number = 0
        try:
            order = msgspec.convert(message, records.Order)
            number = order.id
            self._obey(order, taken, sealed)
        except Exception as problem:
            for one in taken:
                one.close()
            self._report(records.Report(failed=number, error=f"{type(problem).__name__}: {problem}"[:1000]))
        else:
            if order.op not in ("seen", "answer"):
                self._report(records.Report(done=number))
        finally:
            if sealed >= 0:
                os.close(sealed)

    def _obey(self, order: records.Order, fds: list[socket.socket], sealed: int) -> None:
        match order.op:
            case "configure":
                self._configure(order.options or records.Options())
            case "attach":
                self._attach(order, fds, sealed)
            case "leaf":
                self._take_leaf(order.host, order.leaf)
            case "rules":
                sandbox = self._sandboxes[order.sandbox]
                sandbox.rules = rules.RuleSet.from_builtins(order.rules)
                sandbox.inspects = order.inspects
                sandbox.credentials = _unsealed(sealed)
                for one in list(sandbox.conversations):
                    one.reconsider()
            case "detach":
                self._detach(order.sandbox)
            case "seen":
                self._saw(order.id)
            case "answer":
                waiting = self._asked.pop(order.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((order.allow, order.hint))

    def _configure(self, options: records.Options) -> None:
        parent = upstream.Parent.parse(options.parent) if options.parent else None
        self.options = options
        self._trust = None
        self.dialler.close()
        self.dialler = upstream.Dialler(
            self.loop, parent=parent, resolver=self._resolver, connect_s=options.limits.connect_s
        )

    def _attach(self, order: records.Order, fds: list[socket.socket], sealed: int) -> None:
        if len(fds) != len(order.sockets):
            raise ValueError(f"{len(order.sockets)} sockets were named and {len(fds)} came")
        policy = rules.RuleSet.from_builtins(order.rules)
        usable = _unsealed(sealed)
        self._detach(order.sandbox)
        sandbox = Sandbox(order.sandbox, policy, self.options.limits)
        sandbox.inspects, sandbox.credentials = order.inspects, usable
        self._sandboxes[order.sandbox] = sandbox
        for role, one in zip(order.sockets, fds, strict=True):
            one.setblocking(False)
            sandbox.sockets.append(one)
            if role == "dns":
                self.loop.add_reader(one, self._answer_names, sandbox, one)
            else:
                if role == "transparent":
                    sandbox.ipv6 = one.family == socket.AF_INET6
                self.loop.add_reader(one, self._accept, sandbox, one, role == "transparent")

    def _detach(self, sandbox_id: str) -> None:
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is None:
            return
        for one in sandbox.sockets:
            relay.close(self.loop, one)
        for talk in list(sandbox.conversations):
            talk.end(reset=True)

    def _report(self, report: records.Report) -> None:
        self._unsent.append(msgspec.json.encode(report))
        self._send()

    def _send(self) -> None:
        while self._unsent and self._control.fileno() >= 0:
            try:
                self._control.send(self._unsent[0])
            except (BlockingIOError, InterruptedError):
                self.loop.add_writer(self._control, self._send)
                return
            except OSError:
                self._unsent.clear()  # the engine is gone; `_hear` will see it
                return
            self._unsent.popleft()
        if self._control.fileno() >= 0:
            self.loop.remove_writer(self._control)

    def refuse(self, sandbox: Sandbox, record: records.Record) -> asyncio.Future[None] | None:
        """Tell the engine of a refusal; what is returned is done when it has taken note."""
        self._refusals += 1
        number = self._refusals
        if not self.record(sandbox, msgspec.structs.replace(record, id=number)):
            return None
        waiting = self._unseen[number] = self.loop.create_future()
        self.loop.call_later(_SEEN_S, self._saw, number)
        return waiting

    async def ask(self, ask: records.Ask) -> tuple[bool, str]:
        """Wait for somebody's word: whether it may be, and why not."""
        self._refusals += 1
        number = self._refusals
        waiting: asyncio.Future[tuple[bool, str]] = self.loop.create_future()
        self._asked[number] = waiting
        self._report(records.Report(ask=msgspec.structs.replace(ask, id=number)))
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await waiting
        except TimeoutError:
            return False, "nobody answered"
        finally:
            self._asked.pop(number, None)

    def _saw(self, number: int) -> None:
        waiting = self._unseen.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def record(self, sandbox: Sandbox, record: records.Record) -> bool:
        """Tell the engine, if it listens and the sandbox has not said too much already; whether it was told."""
        now = self.loop.time()
        most = self.options.limits.records_per_s
        sandbox.tokens = min(most, sandbox.tokens + (now - sandbox.counted_at) * most)
        sandbox.counted_at = now
        # Somebody inside could be noisy to hide that a secret was used: those records are not counted.
        is_use = record.stage == "credential" and record.verdict == "allow"
        if is_use and len(self._unsent) < _MOST_UNSENT_USES:
            sandbox.tokens += 1
        elif sandbox.tokens < 1 or len(self._unsent) > 64:
            sandbox.dropped += 1
            return False
        sandbox.tokens -= 1
        if sandbox.dropped:
            record = msgspec.structs.replace(record, dropped=sandbox.dropped)
            sandbox.dropped = 0
        self._report(records.Report(decision=record))
        return True

    # ── certificates ────────────────────────────────────────────────────────────────────────────

    @property
    def server_trust(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = authority.client_context(self.options.authorities)
        return self._trust

    async def leaf(self, host: str) -> ssl.SSLContext:
        """What to answer a client of `host` with. The engine signs it, once a day for a host."""
        known = self._leaves.get(host)
        if known is not None and known[1] > self.loop.time():
            self._leaves.move_to_end(host)
            return known[0]
        waiting = self._minting.get(host)
        if waiting is None:
            waiting = self._minting[host] = self.loop.create_future()
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._report(records.Report(mint=host))
        try:
            async with asyncio.timeout(_MINT_S):
                return await asyncio.shield(waiting)
        except TimeoutError:
            self._minting.pop(host, None)
            raise upstream.DialFailed("tls", f"no certificate for {host} could be had") from None

    def _take_leaf(self, host: str, leaf: str) -> None:
        waiting = self._minting.pop(host, None)
        if waiting is None or waiting.done():
            return
        if not leaf:
            waiting.set_exception(upstream.DialFailed("tls", f"no certificate for {host} could be had"))
            return
        made = authority.server_context(leaf)
        self._leaves[host] = made, self.loop.time() + authority.LEAF_RENEWED_S
        if len(self._leaves) > _MOST_LEAVES:
            self._leaves.popitem(last=False)
        waiting.set_result(made)

    # ── the sandboxes ───────────────────────────────────────────────────────────────────────────

    def _accept(self, sandbox: Sandbox, listener: socket.socket, transparent: bool) -> None:
        for _ in range(_ACCEPTS):  # and then it is another sandbox's turn
            try:
                client, peer = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._rest(sandbox, listener, transparent)
                return
            client.setblocking(False)
            if len(sandbox.conversations) >= self.options.limits.connections:
                self._turn_away(sandbox, client)
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            talk = conversation.Conversation(self, sandbox, client, _plain(peer))
            sandbox.conversations.add(talk)
            talk.start(transparent=transparent)

    def _rest(self, sandbox: Sandbox, listener: socket.socket, transparent: bool) -> None:
        """No descriptor is left: a ready listener would spin, so look again later."""
        self.loop.remove_reader(listener)

        def again() -> None:
            if listener.fileno() >= 0:
                self.loop.add_reader(listener, self._accept, sandbox, listener, transparent)

        self.loop.call_later(_RETRY_ACCEPT_S, again)

    def _turn_away(self, sandbox: Sandbox, client: socket.socket) -> None:
        relay.close(self.loop, client, reset=True)
        most = self.options.limits.connections
        self.record(
            sandbox,
            records.Record(
                sandbox=sandbox.id,
                verdict="deny",
                host="",
                port=0,
                protocol="tcp",
                reason="too_many_connections",
                source="limits.connections",
                hint=f"a sandbox has at most {most} connections at once",
            ),
        )

    def _answer_names(self, sandbox: Sandbox, one: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                packet, peer = one.recvfrom(dns.MAX_QUERY + 1)
            except OSError:
                return
            self._answer_name(sandbox, one, packet, peer)

    def _answer_name(
        self, sandbox: Sandbox, one: socket.socket, packet: bytes, peer: tuple[str, int]
    ) -> None:
        noted: list[asyncio.Future[None]] = []
        answer = dns.answer(
            packet, sandbox.table, lambda host: self._may(sandbox, host, peer, noted), ipv6=sandbox.ipv6
        )
        reply = answer.packet
        if reply is None:
            return
        if noted:
            noted[0].add_done_callback(lambda _: _send_datagram(one, reply, peer))
        else:
            _send_datagram(one, reply, peer)

    def _may(
        self, sandbox: Sandbox, host: str, peer: tuple[str, int], noted: list[asyncio.Future[None]]
    ) -> bool:
        decision = rules.could_allow(sandbox.rules, host)
        # Resolvers ask for two kinds of address, from one socket; it is one refusal.
        if not decision.allowed and (host, peer) != sandbox.last_unknown:
            sandbox.last_unknown = host, peer
            waiting = self.refuse(
                sandbox,
                records.Record(
                    sandbox=sandbox.id,
                    verdict="deny",
                    host=host,
                    port=0,
                    protocol="dns",
                    reason=decision.reason,
                    rule=str(decision.rule) if decision.rule else "",
                    source=decision.source,
                    hint=decision.hint[:1000],
                    peer=peer,
                ),
            )
            if waiting is not None:
                noted.append(waiting)
        return decision.allowed

    def _sweep(self) -> None:
        before = self.loop.time() - self.options.limits.idle_s
        for sandbox in self._sandboxes.values():
            for talk in list(sandbox.conversations):
                talk.end_if_idle(before)
        self._sweeper = self.loop.call_later(min(_SWEEP_S, self.options.limits.idle_s / 2), self._sweep)


def _unsealed(fd: int) -> credentials.Credentials:
    return credentials.unseal(fd) if fd >= 0 else credentials.Credentials()


def _plain(peer: tuple[Any, ...]) -> tuple[str, int]:
    """An address as the client's own socket has it: a listener for both families shows IPv4 ones as mapped."""
    return str(peer[0]).removeprefix("::ffff:"), int(peer[1])


def _send_datagram(one: socket.socket, packet: bytes, peer: tuple[str, int]) -> None:
    try:
        one.sendto(packet, peer)
    except OSError:
        pass  # it is a datagram: the client asks again


# ── the process ────────────────────────────────────────────────────────────────────────────────────


def give_up_privilege() -> None:
    """Nothing here needs it. Where the uid cannot be changed (a namespace with one), it is worth nothing anyway."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        try:
            # SAFETY: what is imported or opened later must be readable by nobody; all modules are loaded by now.
            # tests/egress/test_process.py::test_the_proxy_does_not_stay_root
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        except OSError:
            pass
    # SAFETY: this memory holds the values of secrets; no core dump, and no process of the same user, may read it.
    # Last, because a change of uid sets it anew. tests/egress/test_credentials.py::test_the_proxy_cannot_be_dumped
    processes.set_undumpable()


async def serve(control: socket.socket) -> None:
    proxy = Proxy(asyncio.get_running_loop(), control)
    try:
        await proxy.ended
    finally:
        proxy.close()


def load_lazy_modules() -> None:
    """What the standard library imports on first use, while files can still be read."""
    import encodings.idna
    import encodings.punycode

    encodings.idna.ToASCII("bücher")
    "bücher".encode("punycode")


def main(fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(
            number, signal.SIG_IGN
        )  # a terminal's Ctrl-C is the engine's: it closes our socket when it ends
    load_lazy_modules()
    control = socket.socket(fileno=fd)
    with asyncio.Runner() as runner:
        runner.get_loop()
        give_up_privilege()
        gc.freeze()
        runner.run(serve(control))
        os._exit(0)  # a name lookup that hangs in its thread would hold the process


if __name__ == "__main__":
    main(int(sys.argv[1]))
