"""The engine's side of the proxy: start it, tell it of sandboxes, hear its decisions, and start it again when it dies.

    egress = EgressProcess(on_record=journal.network, on_fault=log)
    await egress.attach("k3", capture.sockets, RuleSet.make(allow=["pypi.org"]))     starts the process if need be
    await egress.update("k3", RuleSet.make(allow=[]))                                and connections end that it allowed
    await egress.detach("k3"); await egress.aclose()

The engine keeps a duplicate of every listener. When the process ends, sandboxes have no network: their connections wait in
the listeners' queues. A new process is started at once (after 0.1, 0.2, … 10 s if it does not stay up) and gets every
listener with its *current* rules. `on_fault` is told each time, and with "" when one has them all again, so that what failed meanwhile is an infrastructure
error and not the command's. `attach` and `update` return when the proxy has obeyed; while it is away they wait for it.

What the process says is taken as an attacker's words (records.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.egress import authority, records
from cloche.guest import wire
from cloche.policy import names, rules

_PROGRAM = "import sys; sys.path[:0] = {path!r}; from cloche.egress.proxy import main; main(3)"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_STEADY_S = 5.0  # one that lived so long is started again at once
_ANSWER_S = 15.0
_MAX_RULES = 2 * 1024 * 1024

_decoder = msgspec.json.Decoder(records.Report)


class _Attached(NamedTuple):
    roles: tuple[str, ...]
    fds: tuple[int, ...]
    rules: Any
    inspects: bool = False
    credentials: int = -1
    """Our duplicate of the sealed memory file: the values are not in this process."""

    def close(self) -> None:
        wire.close_all(self.fds)
        if self.credentials >= 0:
            os.close(self.credentials)


class Spawned(NamedTuple):
    link: socket.socket
    pid: int


def spawn() -> Spawned:
    """Start a proxy process: an empty environment, no terminal, one socket as descriptor 3."""
    here, there = wire.pair()
    ours = str(Path(__file__).resolve().parent.parent.parent)
    theirs = str(Path(str(msgspec.__file__)).resolve().parent.parent)
    program = _PROGRAM.format(path=[ours, theirs])
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, there.fileno(), 3),
    ]
    if there.fileno() == 3:
        there.set_inheritable(True)  # dup2 onto itself keeps close-on-exec
    try:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-c", program], {}, file_actions=actions)
    except OSError:
        here.close()
        raise
    finally:
        there.close()
    return Spawned(here, pid)


class EgressProcess:
    """One proxy for all sandboxes of an engine. Use it from one loop; closing twice is harmless."""

    def __init__(
        self,
        *,
        options: records.Options | None = None,
        on_record: Callable[[records.Record], None] = lambda record: None,
        on_fault: Callable[[str], None] = lambda reason: None,
        on_ask: Callable[[records.Ask], Awaitable[tuple[bool, str]]] | None = None,
        start: Callable[[], Spawned] = spawn,
    ) -> None:
        self._options = options or records.Options()
        self._on_record = on_record
        self._on_fault = on_fault
        self._on_ask = on_ask
        self._spawn = start
        self._attached: dict[str, _Attached] = {}
        self._link: socket.socket | None = None
        self._pid = 0
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        self._told: set[str] = set()
        self._pause = 0.0
        self._started = 0.0
        self._ready: asyncio.Future[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._authority: asyncio.Task[authority.Authority] | None = None
        self._signing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._faulty = False

    @property
    def pid(self) -> int:
        """The process that runs now; 0 while there is none."""
        return self._pid

    async def __aenter__(self) -> EgressProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Have a process that answers. Also done by the first `attach`."""
        if self._closed:
            raise errors.error("internal_error", "the egress process was closed")
        if self._ready is None:
            self._launch()
        assert self._ready is not None
        await asyncio.shield(self._ready)

    async def certificate(self) -> str:
        """The authority's certificate, PEM: what a sandbox must trust before `inspects` can be true for it."""
        return (await self._authority_made()).certificate

    async def attach(
        self,
        sandbox: str,
        sockets: Sequence[tuple[str, socket.socket | int]],
        policy: rules.RuleSet,
        *,
        inspects: bool = False,
        credentials: int | None = None,
    ) -> None:
        """Serve a sandbox's listeners (role, socket). The sockets are duplicated; the caller closes his own.

        `inspects` says that our certificate is trusted inside, so that TLS may be ended where a rule or a credential asks
        for it. `credentials` is a sealed memory file (credentials.seal); it is duplicated too, and needs `inspects`.
        """
        if sandbox in self._attached:
            await self.detach(sandbox)
        described = _described(policy)
        fds = tuple(os.dup(one if isinstance(one, int) else one.fileno()) for _, one in sockets)
        known = _Attached(
            tuple(role for role, _ in sockets), fds, described, inspects, _duplicate(credentials)
        )
        self._attached[sandbox] = known
        try:
            await self.start()
            if sandbox not in self._told:  # a process that was started just now has heard of it already
                await self._tell_attached(sandbox, known)
        except BaseException:
            if self._attached.get(sandbox) is known:
                del self._attached[sandbox]
                known.close()
            raise

    async def update(
        self,
        sandbox: str,
        policy: rules.RuleSet,
        *,
        inspects: bool | None = None,
        credentials: int | None = None,
    ) -> None:
        """New rules for a running sandbox; connections that they refuse have ended when this returns. What is not given
        stays as it is."""
        known = self._attached.get(sandbox)
        if known is None:
            raise errors.error("sandbox_not_found", f"sandbox {sandbox!r} has no network to set rules for")
        known = known._replace(
            rules=_described(policy), inspects=known.inspects if inspects is None else inspects
        )
        if credentials is not None:
            if known.credentials >= 0:
                os.close(known.credentials)
            known = known._replace(credentials=_duplicate(credentials))
        self._attached[sandbox] = known
        await self.start()
        known = self._attached.get(sandbox, known)
        await self._tell({"op": "rules", "sandbox": sandbox, **_permissions(known)}, _sealed(known))

    async def detach(self, sandbox: str) -> None:
        """Forget a sandbox: its listeners and connections are closed. One that is not there is no error."""
        known = self._attached.pop(sandbox, None)
        if known is None:
            return
        known.close()
        self._told.discard(sandbox)
        if self._link is not None:
            try:
                await self._tell({"op": "detach", "sandbox": sandbox})
            except errors.ClocheError:
                pass  # it died, and with it what was to be closed

    async def aclose(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._drop("the egress process was closed")
        if self._authority is not None:
            await asyncio.gather(self._authority, *self._signing, return_exceptions=True)
        for known in self._attached.values():
            known.close()
        self._attached.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.cancel()

    # ── its life ────────────────────────────────────────────────────────────────────────────────

    def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._ready is None or self._ready.done():
            self._ready = loop.create_future()
            self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._starting = loop.create_task(self._start_until_up(), name="egress start")

    async def _start_until_up(self) -> None:
        """Start a process, however often it takes. Only the very first failure, when nobody runs yet, is an error."""
        while not self._closed:
            await asyncio.sleep(self._pause)
            try:
                await self._start_once()
            except (OSError, errors.ClocheError) as problem:
                self._drop(str(problem))
                self._fault(f"the egress process did not start: {problem}")
                self._fail_waiters(problem)
                self._wait_longer()
                continue
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
            if self._faulty:
                self._faulty = False
                self._on_fault("")
            return

    def _wait_longer(self) -> None:
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def _fail_waiters(self, problem: Exception) -> None:
        """Who waits now learns that there is no network; who comes later waits for the next attempt."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                errors.error(
                    "network_unavailable",
                    f"the process that carries the network could not be started: {problem}",
                    hint="see cloche doctor",
                )
            )
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _start_once(self) -> None:
        self._link, self._pid = self._spawn()
        self._link.setblocking(False)
        self._told.clear()
        self._started = asyncio.get_running_loop().time()
        asyncio.get_running_loop().add_reader(self._link, self._hear, self._link)
        await self._tell({"op": "configure", "options": msgspec.to_builtins(self._options)})
        for sandbox, known in list(self._attached.items()):
            await self._tell_attached(sandbox, known)

    def _lost(self) -> None:
        """The process ended by itself: everything attached is without network until the next one has it."""
        self._drop("the egress process ended")
        if self._closed:
            return
        if asyncio.get_running_loop().time() - self._started < _STEADY_S:
            self._wait_longer()
        else:
            self._pause = 0.0
        self._fault("the egress process ended; sandboxes have no network until it is back")
        if self._starting is None or self._starting.done():
            self._launch()

    def _fault(self, reason: str) -> None:
        self._faulty = True
        self._on_fault(reason)

    def _drop(self, why: str) -> None:
        link, pid = self._link, self._pid
        self._link, self._pid = None, 0
        if link is not None:
            asyncio.get_running_loop().remove_reader(link)
            asyncio.get_running_loop().remove_writer(link)
            link.close()
        if pid:
            _end(pid)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(errors.error("network_unavailable", why))

    # ── talking ─────────────────────────────────────────────────────────────────────────────────

    async def _tell_attached(self, sandbox: str, known: _Attached) -> None:
        self._told.add(sandbox)
        order = {
            "op": "attach", "sandbox": sandbox, "sockets": list(known.roles), **_permissions(known),
        }  # fmt: skip
        await self._tell(order, (*known.fds, *_sealed(known)))

    async def _tell(self, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send an order and wait until it is obeyed."""
        loop = asyncio.get_running_loop()
        link = self._link
        if link is None:
            raise errors.error("network_unavailable", "the egress process is not running")
        self._number += 1
        number = self._number
        answer = self._answers[number] = loop.create_future()
        try:
            while True:
                try:
                    wire.send(link, {**order, "id": number}, list(fds))
                    break
                except BlockingIOError:
                    await _writable(loop, link)
                except OSError as problem:
                    raise errors.error(
                        "network_unavailable", f"the egress process is gone: {problem}"
                    ) from None
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await answer
            except TimeoutError:
                raise errors.error("network_unavailable", "the egress process does not answer") from None
        finally:
            self._answers.pop(number, None)

    def _hear(self, link: socket.socket) -> None:
        try:
            body, fds = wire.receive_raw(link)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            body, fds = b"", []
        wire.close_all(fds)
        if not body:
            self._lost()
            return
        try:
            report = _decoder.decode(body)
        except msgspec.MsgspecError:
            self._lost()  # it does not speak our language: whoever it is, it is replaced
            return
        self._take(report)

    def _take(self, report: records.Report) -> None:
        if report.decision is not None:
            try:
                self._on_record(report.decision)
            finally:
                self._saw(report.decision.id)
            return
        if report.ask is not None:
            self._spawn_task(self._answer(report.ask), "ask")
            return
        if report.mint:
            self._spawn_task(self._mint(report.mint), "sign")
            return
        answer = self._answers.get(report.done if report.done is not None else report.failed or 0)
        if answer is None or answer.done():
            return
        if report.done is not None:
            answer.set_result(None)
        else:
            answer.set_exception(
                errors.error("internal_error", f"the egress process refused an order: {report.error}")
            )

    def _spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._signing.add(task)
        task.add_done_callback(self._signing.discard)

    async def _answer(self, ask: records.Ask) -> None:
        link, allow, why = self._link, False, "nobody can be asked here"
        if self._on_ask is not None and ask.sandbox in self._attached:
            allow, why = await self._on_ask(ask)
        if link is not None and link is self._link:  # another process knows nothing of the question
            with suppress(OSError):
                wire.send(link, {"op": "answer", "id": ask.id, "allow": allow, "hint": why[:1000]})

    def _saw(self, number: int) -> None:
        if number and self._link is not None:
            try:
                wire.send(self._link, {"op": "seen", "id": number})
            except OSError:
                pass  # it is full or gone: the proxy waits a moment only

    # ── signing ─────────────────────────────────────────────────────────────────────────────────

    async def _authority_made(self) -> authority.Authority:
        if self._authority is None:
            # In a thread: to import what makes certificates takes a while.
            making = asyncio.to_thread(authority.Authority)
            self._authority = asyncio.get_running_loop().create_task(making, name="authority")
        return await asyncio.shield(self._authority)

    async def _mint(self, host: str) -> None:
        """Answer a proxy that needs a certificate. Whatever host it names: sandboxes alone believe it."""
        leaf = ""
        try:
            if host == names.canonical(host):
                made = await self._authority_made()
                leaf = await asyncio.to_thread(made.leaf, host)
        except Exception:
            leaf = ""  # the client is told that there is none; everything else goes on
        try:
            await self._tell({"op": "leaf", "host": host[:255], "leaf": leaf})
        except errors.ClocheError:
            pass  # it died; the next one will ask again


def _permissions(known: _Attached) -> dict[str, Any]:
    return {"rules": known.rules, "inspects": known.inspects, "credentials": known.credentials >= 0}


def _sealed(known: _Attached) -> tuple[int, ...]:
    return (known.credentials,) if known.credentials >= 0 else ()


def _duplicate(fd: int | None) -> int:
    return -1 if fd is None else os.dup(fd)


def _described(policy: rules.RuleSet) -> Any:
    """Rules as they are sent. Too many would not fit a frame, and the proxy would end over it, for all sandboxes."""
    if len(msgspec.json.encode(policy)) > _MAX_RULES:
        raise errors.error(
            "policy_invalid", "the network rules are longer than 2 MiB", hint="use wildcards or networks"
        )
    return policy.to_builtins()


async def _writable(loop: asyncio.AbstractEventLoop, link: socket.socket) -> None:
    ready = loop.create_future()
    loop.add_writer(link, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        if link.fileno() >= 0:
            loop.remove_writer(link)


def _end(pid: int) -> None:
    """End and reap a process of ours. It has nothing to save, so it is not asked."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
