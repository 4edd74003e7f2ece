"""One live sandbox of this engine: its machine, its executions and contexts, and when it ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol

import msgspec

from cloche import errors, events, interfaces, model, policy, settings
from cloche.engine import contexts, execution
from cloche.lifecycle import expiry, suspending

_MOST_FINISHED = 200  # executions remembered after their end
_PATIENCE_S = 0.5


class Tunnel(Protocol):
    def fail(self, problem: errors.ClocheError) -> None: ...


class Wanted(NamedTuple):
    """A sandbox to be: its spec, and what the policy makes of it."""

    spec: model.SandboxSpec
    rules: policy.Merged
    layers: tuple[policy.Layer, ...]


_TRACE = "TRACEPARENT"


class Sandbox:
    def __init__(
        self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged, machine: interfaces.Machine,
        limits: settings.Limits, directory: str, clock: interfaces.Clock,
        interpreters: Mapping[str, interfaces.Interpreter], workspace: interfaces.Workspace | None = None,
    ) -> None:  # fmt: skip
        self.id = sandbox_id
        self.spec = spec
        self.asked = spec
        """The spec as its maker gave it."""
        self.rules = rules
        self.layers: tuple[policy.Layer, ...] = ()
        self.machine = machine
        self.created_at = clock.time()
        self.executions: OrderedDict[str, execution.Execution] = OrderedDict()
        self._unfinished: set[str] = set()
        self.contexts: dict[str, contexts.Context] = {}
        self.default_contexts: dict[str, str] = {}
        self.phase: model.Phase = "running"
        self.reason: str | None = None
        self.count = 0
        self.ready_s: float | None = None
        """Seconds from being asked for to being somebody's; None until that is known."""
        self.template_version = ""
        self.origin = spec
        """Its template as a spec, before anything was bound."""
        self.startup: list[str] = []
        """What its startup actions did."""
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.workspace = workspace
        self.granted: list[str] = []
        """What somebody who was asked has let it reach, as rules."""
        self.trust: str | None = None
        """Where the bundle stands that has our authority in it; None where nothing of its TLS is looked into."""
        self.snapshot = spec.snapshot
        """Whose files it has, and has changed since."""
        self.ladder = spec.ladder
        self._renewal: float | None = None
        """How long it lives from its waking on, where its time has suspended it."""
        self.resting = False
        """Whether a rung of the ladder is being taken."""
        self.revive: Callable[[Sandbox], Awaitable[None]] = _cannot_revive
        self.on_rest: Callable[[Sandbox], None] = lambda _: None
        """Called when a request that needed the sandbox is done."""
        self._asked = False
        self._changing = asyncio.Lock()
        self.rebinding = asyncio.Lock()  # held by whoever changes its rules
        self.own_ports: frozenset[int] = frozenset()
        """Ports inside that are ours: the entrances to its network. What comes there is taken for the sandbox, with what it may reach and
        the credentials that are put in for it, so nobody is led there from outside."""
        self.tunnels: set[Tunnel] = set()
        """Connections to ports of the machine; they end with it."""
        self._uses = 0
        self._writes = 0
        self._written = asyncio.Event()
        self._interpreters = interpreters
        self._limits = limits
        self._directory = directory
        self._clock = clock
        self._life = expiry.Life(
            since=clock.monotonic(), timeout_s=spec.timeout_s, idle_timeout_s=spec.idle_timeout_s
        )
        self._patience_s, self._looked_at = _PATIENCE_S, time.monotonic()
        machine.on_denial = self._denied

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    def touch(self) -> None:
        self._life = self._life._replace(last_used_at=self._clock.monotonic())

    def at(self, delay_s: float, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Do something after a while, if the sandbox is still there."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(delay_s, lambda: self._do(work())))

    def _do(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(work), name=f"sandbox {self.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def bind(self, spec: model.SandboxSpec, env: dict[str, str], files: dict[str, bytes]) -> None:
        """Become the sandbox of `spec`: what differs is bound in one message, and a new life begins."""
        new = {name: value for name, value in env.items() if self.spec.env.get(name) != value}
        limits = spec.resources if spec.resources != self.spec.resources else None
        if new or files or limits is not None:
            listed = [(path, data, None) for path, data in files.items()]
            await self.machine.bind(interfaces.Binding(new, listed, limits))
        if new:
            for context in self.contexts.values():
                await context.set_environment(new)
        self.spec, self.ladder = spec, spec.ladder
        self.created_at = self._clock.time()
        self._life = expiry.Life(
            since=self._clock.monotonic(), timeout_s=spec.timeout_s, idle_timeout_s=spec.idle_timeout_s
        )

    @property
    def life(self) -> expiry.Life:
        running = len(self._unfinished) + sum(1 for context in self.contexts.values() if context.busy)
        return self._life._replace(running=running + self._uses, paused=self._asked)

    @property
    def rest(self) -> suspending.Rest:
        return suspending.Rest(self.life, self.ladder, self.phase)

    def recall(self, info: model.SandboxInfo) -> None:
        """Go on with the life of a sandbox that another engine knew: created and ending when it was."""
        self.created_at, self.count, self._asked = info.created_at, info.executions, True
        left = None if info.expires_at is None else info.expires_at - self._clock.time()
        self._life = self._life._replace(
            since=self._clock.monotonic() - (info.timeout_s or 0) + (left or 0), timeout_s=info.timeout_s
        )
        if left is None and self.ladder.at_timeout != "delete":
            self._renewal = self.spec.timeout_s

    def extend(self, timeout_s: float | None) -> None:
        model.check_seconds("timeout_s", timeout_s)
        self._life = expiry.extend(self._life, self._clock.monotonic(), timeout_s)
        self._renewal = None

    def outlive(self) -> bool:
        """Whether the end of its time suspends it instead of ending it; its life is then without end, where policy allows that,
        and as long again where not."""
        if self.ladder.at_timeout == "delete" or self._renewal is not None:
            return False
        length = self._life.timeout_s
        try:
            policy.check_timeout(self.rules, None)
            left = None
        except errors.PolicyRefused:
            left = length
        self.extend(left)
        self._renewal = length
        return True

    @property
    def expires_at(self) -> float | None:
        if self._life.timeout_s is None:
            return None
        return self._clock.time() + (self._life.since + self._life.timeout_s - self._clock.monotonic())

    def info(self, *, server: str, owner: str) -> model.SandboxInfo:
        machine = self.machine
        return model.SandboxInfo(
            id=self.id, name=self.spec.name, phase=self.phase, template=self.spec.template, profile=self.spec.mode or self.spec.profile,
            created_at=self.created_at, expires_at=self.expires_at, timeout_s=self._life.timeout_s, idle_timeout_s=self.spec.idle_timeout_s,
            isolation=machine.isolation, limits=machine.limits, server=server, owner=owner, tenant=self.spec.tenant, labels=self.spec.labels,
            shown=machine.shown, warnings=machine.warnings, executions=self.count, reason=self.reason,
        )  # fmt: skip

    # ── executions ──────────────────────────────────────────────────────────────────────────────

    async def start(self, request: model.ExecRequest, *, to_end: bool = False) -> execution.Execution:
        """Start a command; with `to_end` the caller waits for its end, and may learn of its start as late as that."""
        request = self._completed(request)
        request.check()
        policy.check_environment(self.rules, request.env)
        if request.user == "root" and not self.rules.isolation.root_user:
            raise errors.error(
                "user_refused", "isolation.root_user of the policy does not allow user='root'",
                hint="act as user='user'; `cloche policy show` says who set it",
            )  # fmt: skip
        await self.wake()
        request = self._traced(request)
        made = execution.Execution(
            model.new_id(), request, self.machine, self._limits, self._directory, self.touch,
            together=to_end and not self._unfinished,  # else a denial might come before the pid it is known by
        )  # fmt: skip
        self._forget_finished()
        self.executions[made.id] = made
        self._unfinished.add(made.id)
        self.touch()
        try:
            await made.start()
        except BaseException:
            del self.executions[made.id]
            self._unfinished.discard(made.id)
            raise
        if made.running:
            made.result.add_done_callback(lambda _: self._unfinished.discard(made.id))
        else:
            self._unfinished.discard(made.id)
        self.count += 1
        return made

    def _completed(self, request: model.ExecRequest) -> model.ExecRequest:
        """What the template says where the request says nothing."""
        said: dict[str, Any] = {}
        if self.spec.cwd is not None and request.cwd is None:
            said["cwd"] = self.spec.cwd
        if self.spec.user != "user" and request.user == "user":
            said["user"] = self.spec.user
        return msgspec.structs.replace(request, **said) if said else request

    def _traced(self, request: model.ExecRequest) -> model.ExecRequest:
        """With its caller's trace in the environment, unless that was set, or the policy lets no such variable in."""
        asked = events.trace.get()
        if asked is None or _TRACE in request.env or _TRACE in self.spec.env:
            return request
        try:
            policy.check_environment(self.rules, (_TRACE,))
        except errors.PolicyRefused:
            return request
        return msgspec.structs.replace(request, env={**request.env, _TRACE: asked.parent})

    def execution(self, execution_id: str) -> execution.Execution:
        try:
            return self.executions[execution_id]
        except KeyError:
            raise errors.error(
                "execution_not_found", f"sandbox {self.id} has no execution {execution_id!r}",
                hint="list them; finished ones are kept for a while only",
            ) from None  # fmt: skip

    def _forget_finished(self) -> None:
        """Those that began long ago, and of the others all but the last. It runs with every start, so oldest first."""
        horizon = time.time() - self._limits.log_linger_s
        excess = len(self.executions) - len(self._unfinished) - _MOST_FINISHED
        forgotten = []
        for old in self.executions.values():
            if excess <= 0 and old.started_at >= horizon:
                break
            if not old.running:
                forgotten.append(old)
                excess -= 1
        for old in forgotten:
            old.close()
            del self.executions[old.id]

    def _denied(self, leader: int, denial: model.Denial) -> None:
        running = [e for e in self.executions.values() if e.running]
        owners = [e for e in running if e.pid == leader] or (running if len(running) == 1 else [])
        for owner in owners:
            owner.denied(denial)

    def connected(self, peer: tuple[str, int] | None, denial: model.Denial | None) -> str | None:
        """A process inside opened a connection: the execution it belongs to, if that can be told, gets the denial."""
        running = [e for e in self.executions.values() if e.running]
        busy = any(context.busy for context in self.contexts.values())
        if len(running) != 1 or busy:
            leader = self._leader_of(peer) if peer is not None and running else 0
            running = [e for e in running if leader and e.pid == leader]
        for owner in running:
            if denial is not None:
                owner.denied(denial)
            return owner.id
        return None

    def _leader_of(self, peer: tuple[str, int]) -> int:
        """Looking costs time that grows with the sandbox's processes: a hostile one may take a twentieth of ours."""
        now = time.monotonic()
        self._patience_s = min(_PATIENCE_S, self._patience_s + (now - self._looked_at) / 20)
        self._looked_at = now
        if self._patience_s <= 0:
            return 0
        leader = self.machine.leader_of(peer)
        self._patience_s -= time.monotonic() - now
        return leader

    def faulted(self, reason: str) -> None:
        """Something of ours failed that running commands may have needed."""
        for made in self.executions.values():
            if made.running:
                made.faulted(reason)

    # ── contexts ────────────────────────────────────────────────────────────────────────────────

    async def create_context(self, language: str, cwd: str | None) -> contexts.Context:
        language = contexts.language_of(language, self._interpreters)
        if cwd is not None:
            model.check_path(cwd)
        await self.wake()
        preload = self.spec.preload if language == "python" else ()
        made = contexts.Context(
            model.new_id(),
            language,
            self._interpreters[language],
            self.machine,
            cwd=cwd,
            preload=preload,
            env=self._threads(),
        )
        await made.start()
        self.contexts[made.id] = made
        self.touch()
        return made

    def _threads(self) -> dict[str, str]:
        """As many threads for a numeric library as it has processors, unless its maker said otherwise. Left alone it
        starts one for each of the host's, which wait for each other and keep a context from being forked."""
        said = {**self.spec.env}
        wanted = str(max(1, math.ceil(self.spec.resources.cpus)))
        return {name: wanted for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if name not in said}

    async def context(self, context_id: str | None, language: str) -> contexts.Context:
        """The context asked for, or the language's default one, made on first use."""
        if context_id is not None:
            if context_id not in self.contexts:
                raise errors.error("context_not_found", f"sandbox {self.id} has no context {context_id!r}")
            return self.contexts[context_id]
        default = self.default_contexts.get(contexts.language_of(language, self._interpreters))
        if default is not None and default in self.contexts:
            return self.contexts[default]
        made = await self.create_context(language, None)
        self.default_contexts[made.language] = made.id
        return made

    # ── using and changing ──────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def use(self, *, writing: bool = False, looking: bool = False) -> AsyncIterator[interfaces.Machine]:
        """The machine, awake, for a request that needs it. Who is `writing` files from outside keeps others from
        changing the sandbox as a whole meanwhile: the engine is not stopped when the sandbox stands still. Who only goes
        on `looking` is no use."""
        await self.wake()
        self._uses += not looking
        self._writes += writing
        self.touch()
        try:
            yield self.machine
        finally:
            self._uses -= not looking
            self._writes -= writing
            if not self._writes:
                self._written.set()
            self.touch()
            self.on_rest(self)

    def alone(self) -> asyncio.Lock:
        """Held by whoever changes the sandbox as a whole."""
        return self._changing

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Alone with the sandbox as a whole: requests that need it wait."""
        async with self._changing:
            while self._writes:
                self._written.clear()
                await self._written.wait()
            if self.phase in ("deleted", "lost"):
                raise errors.error("sandbox_lost", f"sandbox {self.id} has ended: {self.reason}")
            yield

    @asynccontextmanager
    async def still(self) -> AsyncIterator[interfaces.Machine]:
        """Within `change`: the machine, with everything in it standing still."""
        paused = self.phase == "paused"
        if not paused:
            await self.machine.pause()
        try:
            yield self.machine
        finally:
            if not paused:
                await self.machine.resume()

    def exchange(self, machine: interfaces.Machine) -> interfaces.Machine:
        """Within `change`: go on with another machine; the one before, to be killed."""
        before, self.machine = self.machine, machine
        self.own_ports = frozenset()
        self._cut(errors.error("connection_lost", f"the processes of sandbox {self.id} have ended"))
        machine.on_denial = self._denied
        for context in self.contexts.values():
            context.close()
        self.contexts.clear()
        self.default_contexts.clear()
        self.phase, self._asked = "running", False
        self.touch()
        return before

    async def pause(self, *, asked: bool = True) -> bool:
        """Let everything stand still; whether that is new."""
        async with self.change():
            if self.phase != "running" or not (asked or self._idle("pause")):
                self._asked = self._asked or (asked and self.phase == "paused")
                return False
            await self.machine.pause()
            self.phase, self._asked = "paused", asked
            return True

    def _idle(self, rung: suspending.Rung) -> bool:
        """Whether a rung is still due: somebody may have come since it was found to be."""
        return suspending.due(self.rest, self._clock.monotonic()) == rung

    async def put_away(
        self,
        keep: Callable[[interfaces.Machine], Awaitable[None]],
        absent: interfaces.Machine,
        *,
        asked: bool = True,
    ) -> interfaces.Machine | None:
        """Have the files kept, and go on without a machine: the one before, to be killed; None where that is not new."""
        async with self.change():
            if self.phase == "archived" or not (asked or self._idle("archive")):
                self._asked = self._asked or asked
                return None
            async with self.still() as machine:
                await keep(machine)
            self._asked = asked
            before = self.exchange(absent)
            self.phase = "archived"
            return before

    async def wake(self) -> None:
        """Whatever needs the sandbox wakes it."""
        if self.phase == "running" and not self._changing.locked():
            return
        async with self._changing:
            if self.phase == "paused":
                await self.machine.resume()
                self.phase = "running"
            elif self.phase == "archived":
                await self.revive(self)
            else:
                return
            self._asked = False
            self.touch()
            if self._renewal is not None:
                self.extend(self._renewal)
        self.on_rest(self)

    def _cut(self, problem: errors.ClocheError) -> None:
        for tunnel in list(self.tunnels):
            tunnel.fail(problem)

    def close(self) -> None:
        words = f"sandbox {self.id} has ended: {self.reason}"
        self._cut(errors.error("sandbox_lost", words, hint="create another"))
        for timer in self._timers:
            timer.cancel()
        for made in self.executions.values():
            made.close()
        for context in self.contexts.values():
            context.close()


async def _cannot_revive(sandbox: Sandbox) -> None:
    raise errors.error("sandbox_stopped", f"sandbox {sandbox.id} is archived", hint="resume it")


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    with suppress(errors.ClocheError):
        await work
