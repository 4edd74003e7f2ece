"""The use cases. `Engine` is the one object that every face talks to; it sees vocabulary and interfaces only.

One engine lives in one event loop, in the calling process, in the keeper, or in a server. Memory is the working copy;
the store is the truth after a restart, when every sandbox of a dead engine is `lost`.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cloche import errors, events, interfaces, model, policy, settings
from cloche.engine import (
    asking,
    execution,
    files,
    imaging,
    journal,
    network,
    placement,
    reaping,
    refusals,
    sandboxes,
)
from cloche.engine import contexts as code_contexts
from cloche.lifecycle import suspending

if TYPE_CHECKING:
    from cloche import stock
    from cloche.engine import archiving, quotas, snapshots, stocking
    from cloche.engine import volumes as volume_shelf
    from cloche.measures import Measures

SUSPENSIONS = ("pause", "hibernate", "archive")
_MOST_FORKS = 1000
_MOST_AHEAD = 2 * len(os.sched_getaffinity(0))
_EXERCISE_S = 5.0
_MOST_LOST = 1000  # ended sandboxes remembered, so that their users are told what happened


def _no_memory(rule: str) -> None:
    raise errors.error(
        "not_supported_by_driver",
        "this engine has no policy file to write to",
        hint="use one that wiring made",
    )


def _no_secrets() -> interfaces.Secrets:
    raise errors.error("secrets_locked", "this engine keeps no secrets", hint="use one that wiring made")


# What a tenant may reach at most: all that is public. The host's loopback and its networks are the operator's to give.
_TENANTS = policy.Policy(network={"mode": "open"}, source="the ceiling of tenants")


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


@refusals.recorded
class Engine(interfaces.Backend):
    def __init__(
        self,
        config: settings.Settings,
        store: interfaces.Store,
        drivers: Sequence[tuple[str, Callable[[], interfaces.Driver]]],
        *,
        owner: str,
        interpreters: Mapping[str, interfaces.Interpreter],
        workspaces: interfaces.Workspaces,
        egress: Callable[[], interfaces.Egress],
        remember: Callable[[str], None] | None = None,
        webhook: asking.Ask | None = None,
        images: interfaces.ImageSource | None = None,
        secrets: Callable[[], interfaces.Secrets] | None = None,
        policies: Callable[[str | None], policy.Sources],
        where: str = "in process",
        clock: interfaces.Clock | None = None,
        audit: interfaces.Audit | None = None,
        measures: Measures | None = None,
        warm: int = 0,
    ) -> None:
        self.where = where
        self.owner = owner
        self.settings = config
        self._clock = clock or SystemClock()
        self._interpreters = interpreters
        self._secrets = secrets or _no_secrets
        self._remember = remember or _no_memory
        self._workspaces = workspaces
        self._imaging = imaging.Imaging(self, images)
        self._policies = policies
        self._placement = placement.Placement(drivers)
        self._sandboxes: dict[str, sandboxes.Sandbox] = {}
        self._names: dict[str, str] = {}
        self._coming: dict[str, asyncio.Event] = {}
        self._ended: dict[str, tuple[str, str]] = {}
        """Sandboxes that were, by id: why they ended, and whose they were."""
        self._reports: dict[str, model.WorkspaceReport] = {}
        self._creating = 0
        self._store = store
        self._audit = audit
        self._measures = measures
        self._journal = journal.Journal(store, audit, measures)
        self._networks = network.Networks(
            egress,
            self._secrets,
            asking.Asks(timeout_s=config.network.ask_timeout_s, webhook=webhook),
            self._journal,
            self._clock,
            measures,
        )
        self._reaper = reaping.Reaper(
            self._clock, lambda: list(self._sandboxes.values()), self._expire, self._rest
        )
        self._guesses = warm
        # What is made ahead of need is made by few at a time: more would be done no sooner, and claims would wait for it.
        self._forge = asyncio.Semaphore(_MOST_AHEAD)
        self._stocked: stocking.Stock | None = None
        self.make_link: Callable[[str, int, float, str], model.LinkInfo] | None = None
        """Makes preview links (sandbox, port, seconds, by whom); whoever serves them sets it."""
        self.make_token: Callable[[str, str, tuple[str, ...], float, str], model.AccessToken] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._swept = False
        self._closed = False

    # ── sandboxes ───────────────────────────────────────────────────────────────────────────────

    async def create(
        self, spec: model.SandboxSpec, *, image: interfaces.Image | None = None
    ) -> model.SandboxInfo:
        """A running sandbox. An `image` that the caller holds stands for the spec's, for a step of a build."""
        asked, begun = spec, time.perf_counter()
        spec = await self._accept(spec)
        start = None
        if spec.snapshot is not None:
            start = await self._shelf.find(spec.snapshot)
            spec = self._shelf.inherit(spec, start)
            spec.check()
        wanted = self._judge(spec, await self._settle(spec))
        spec = wanted.spec
        if spec.full_name is not None and spec.full_name not in self._names:
            self._adopt(spec.full_name)
        if spec.volumes and spec.full_name not in self._names:
            await self._volumes.check(spec.volumes)
        besides = await self._besides(spec.tenant)
        while spec.full_name is not None and spec.full_name in self._names:
            if spec.full_name not in self._coming:
                return self._same(asked)
            await self._coming[spec.full_name].wait()  # whoever asks for the same at once gets the same
        self._check_capacity()
        # A step of a build is the engine's own.
        with self._admit(spec.tenant, spec.resources, besides) if image is None else nullcontext():
            made = await self._create(sandbox_id := model.new_id(), asked, wanted, start, image)
        await self._publish(made)
        made.ready_s = time.perf_counter() - begun
        if self._measures is not None:
            self._measures.created["cold" if made.id == sandbox_id else "warm"].observe(made.ready_s)
        if self._guesses and image is None:
            self._stock.guesses.used(wanted)
        return made.info(server=self.where, owner=self.owner)

    async def _create(
        self,
        sandbox_id: str,
        asked: model.SandboxSpec,
        wanted: sandboxes.Wanted,
        start: stock.SnapshotInfo | None,
        image: interfaces.Image | None,
    ) -> sandboxes.Sandbox:
        """One more among the live; its name is taken from the first step on."""
        name = wanted.spec.full_name
        if name is not None:
            self._names[name] = sandbox_id
            self._coming[name] = asyncio.Event()
        self._creating += 1
        try:
            made = await self._obtain(sandbox_id, wanted, start, image)
            made.asked = asked
            self._sandboxes[made.id] = made
        except BaseException:
            self._names.pop(name or "", None)
            raise
        finally:
            self._creating -= 1
            if name is not None:
                self._coming.pop(name).set()
        return made

    # ── quotas ──────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _quotas(self) -> quotas.Quotas | None:
        """None without any: then nobody pays for them."""
        if self.settings.quotas == settings.Quotas():
            return None
        from cloche.engine import quotas

        def held(tenant: str) -> Iterator[quotas.Amounts]:
            for found in self._sandboxes.values():
                if found.spec.tenant == tenant:
                    yield quotas.of(found.spec.resources, archived=found.phase == "archived")

        return quotas.Quotas(self.settings.quotas, held, self._clock.monotonic)

    async def _besides(self, tenant: str) -> builtins.list[tuple[str, model.Resources]]:
        """What counts for a tenant and is not among the live: sandboxes that earlier engines archived."""
        if self._quotas is None:
            return []
        left = await asyncio.to_thread(self._archive.orphans)
        return [(info.id, spec.resources) for info, spec in left if spec.tenant == tenant]

    def _admit(
        self,
        tenant: str,
        resources: model.Resources,
        besides: Sequence[tuple[str, model.Resources]],
        *,
        waking: bool = False,
    ) -> AbstractContextManager[None]:
        """Room for one more among its tenant's, for as long as it is being made."""
        if self._quotas is None:
            return nullcontext()
        from cloche.engine import quotas

        left = [quotas.of(kept, archived=True) for id_, kept in besides if id_ not in self._sandboxes]
        wanted = quotas.waking(resources) if waking else quotas.of(resources)
        return self._quotas.admit(tenant, wanted, besides=left)

    async def _check_quota(self, spec: model.SandboxSpec, count: int) -> None:
        """Whether there is room for so many, before anything is done for them."""
        if self._quotas is not None:
            from cloche.engine import quotas

            left = await self._besides(spec.tenant)
            kept = [quotas.of(resources, archived=True) for _, resources in left]
            self._quotas.check(spec.tenant, quotas.of(spec.resources), times=count, besides=kept)

    def _judge(
        self, spec: model.SandboxSpec, settled: tuple[tuple[policy.Layer, ...], policy.Merged] | None = None
    ) -> sandboxes.Wanted:
        """What the policy makes of a spec; raises what it refuses, before anything is made."""
        layers = settled[0] if settled is not None else self._layers(spec)
        rules = settled[1] if settled is not None else policy.resolve(layers)
        spec = policy.bound(rules, spec)
        policy.check_secrets(rules, spec.secrets)
        self._networks.check(rules.network)
        return sandboxes.Wanted(spec, rules, layers)

    async def _obtain(
        self,
        sandbox_id: str,
        wanted: sandboxes.Wanted,
        start: stock.SnapshotInfo | None,
        image: interfaces.Image | None,
    ) -> sandboxes.Sandbox:
        """One that waits and can take on all that is wanted, else a new one."""
        begun = time.perf_counter()
        waits = image is None and start is None
        pooled = self._stocked.take(wanted) if waits and self._stocked is not None else None
        found = pooled
        if found is None and waits and self._guesses:
            found = self._stock.guesses.take(wanted)
        if found is None:
            return await self._build(wanted, sandbox_id, start=start, image=image)
        try:
            await self._bind(found, wanted, {})
        except (errors.NotSupported, errors.SandboxLost):
            await self._discard(found, "it could not be bound")
            return await self._build(wanted, sandbox_id)
        except BaseException:
            await self._discard(found, "it could not be bound")
            raise
        if wanted.spec.full_name is not None:
            self._names[wanted.spec.full_name] = found.id
        if pooled is not None:
            self._stock.served(wanted.spec.template, (time.perf_counter() - begun) * 1000)
        return found

    async def _build(
        self, wanted: sandboxes.Wanted, sandbox_id: str = "", *, start: stock.SnapshotInfo | None = None,
        image: interfaces.Image | None = None, ahead: bool = False,
    ) -> sandboxes.Sandbox:  # fmt: skip
        """A sandbox that is ready for use and that nobody knows of yet. `ahead` of need, its contexts run already."""
        spec, rules, layers = wanted
        sandbox_id = sandbox_id or model.new_id()
        lent = await self._lend(sandbox_id, spec, rules)
        given = None
        try:
            given = await self._networks.bind(spec, rules, sandbox_id)
            kept = None if start is None else self._shelf.place(start.id)
            bound = msgspec.structs.replace(spec, env={**given.env, **spec.env})
            async with self._forge if ahead else nullcontext():
                machine = await self._make_machine(bound, rules, lent, kept, image)
            made = self._known(sandbox_id, spec, rules, machine, lent)
            made.layers = layers
            try:
                await self._get_ready(made, given, ahead=ahead)
            except BaseException:
                await self._discard(made, "it could not be got ready")
                raise
        except BaseException:
            if lent is not None:
                await asyncio.to_thread(lent.finish)
            raise
        finally:
            if given is not None:
                given.close()
        return made

    async def _lend(
        self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged
    ) -> interfaces.Workspace | None:
        """What of the host it is shown."""
        if spec.workspace is not None:
            return await asyncio.to_thread(
                self._workspaces.open,
                spec.workspace,
                rules=rules,
                sandbox_id=sandbox_id,
                overlay=spec.overlay,
                path=spec.path,
            )
        if rules.files.read or rules.files.write:
            return await asyncio.to_thread(self._workspaces.show, rules=rules)
        return None

    async def _get_ready(self, made: sandboxes.Sandbox, given: network.Bound, *, ahead: bool) -> None:
        await self._connect(made, given)
        if made.spec.volumes:
            await self._volumes.attach(made, made.spec.volumes)
        if ahead and self.settings.guest.prestart_contexts:
            for language in made.spec.contexts:
                await made.context(None, language)
        if made.spec.startup and made.spec.snapshot is None:  # a snapshot has what they did
            from cloche.engine import startup

            await startup.perform(made, self._clock)
        if ahead and made.phase == "running":
            await _exercise(made.machine)
            if made.rules.network.mode == "off":
                await self._networks.prepare(made.machine)

    async def _bind(self, made: sandboxes.Sandbox, wanted: sandboxes.Wanted, files: dict[str, bytes]) -> None:
        """Give a sandbox that waited everything in which it differs from what is wanted."""
        spec, rules, layers = wanted
        more = {path: mount for path, mount in spec.volumes.items() if path not in made.spec.volumes}
        if more:
            await self._volumes.check(more)
        given = await self._networks.bind(spec, rules, made.id)
        await made.wake()
        before, made.rules, made.layers = made.rules.network, rules, layers
        work = [made.bind(spec, {**given.env, **spec.env}, files)]
        if rules.network != before or given.credentials is not None:
            work.append(self._networks.rebind(made, given))
        if more:
            work.append(self._volumes.attach(made, more))
        try:
            await asyncio.gather(*work)
        finally:
            given.close()
        if rules.network.mode == "off":
            self._networks.forgo(made.machine)

    async def _publish(self, made: sandboxes.Sandbox) -> None:
        """From now on it is somebody's."""
        spec, machine = made.spec, made.machine
        self._sandboxes[made.id] = made
        if self._audit is not None and self._audit.problem is not None:
            machine.warnings = (*machine.warnings, self._audit.problem)
        self._follow(made)
        self._reaper.look_again(made)
        self._journal.append(
            events.Created(
                sandbox=made.id,
                time=made.created_at,
                actor=self._actor,
                name=spec.name,
                template=spec.template,
                profile=spec.profile,
                isolation=machine.isolation.level,
                driver=machine.isolation.driver,
            )
        )
        if spec.stay:
            try:
                info = made.info(server=self.where, owner=self.owner)
                await asyncio.to_thread(self._store.put_sandbox, info)
            except BaseException:
                # There is no record of it to bring up to date.
                made.spec = msgspec.structs.replace(spec, stay=False)
                await self._end(made, "failed", "it could not be recorded")
                raise
        if not self._swept:
            self._swept = True
            self._spawn(self._sweep_quietly(), "sweep")

    async def _discard(self, made: sandboxes.Sandbox, words: str) -> None:
        """End a sandbox that nobody knows of."""
        made.phase = "deleted"
        self._sandboxes.pop(made.id, None)
        self._networks.forgo(made.machine)
        await made.machine.kill(words)
        self._let_go(made)
        made.close()
        await self._networks.detach(made)
        if made.workspace is not None:
            await asyncio.to_thread(made.workspace.finish)

    def warm_up(self, spec: model.SandboxSpec) -> None:
        """Have a sandbox of this shape made before anybody asks for it."""
        spec.check()
        if self._guesses:
            self._stock.guesses.used(self._judge(spec))

    async def _accept(self, spec: model.SandboxSpec) -> model.SandboxSpec:
        """The spec with what it leaves to its template."""
        if self._closed:
            raise errors.error("server_unavailable", "this engine is closed")
        spec.check()
        if spec.template == "base":  # it says nothing; and most commands end here
            return spec
        from cloche.engine import templates

        return templates.settle(spec, (await self._stock.templates.get(spec.template)).spec)

    async def _settle(self, spec: model.SandboxSpec) -> tuple[tuple[policy.Layer, ...], policy.Merged]:
        """The layers of a sandbox and what they come to."""
        if spec.workspace is None:
            layers = self._layers(spec)
            return layers, policy.resolve(layers)
        # A repository may bring a policy that takes a while to read.
        layers = await asyncio.to_thread(self._layers, spec)
        return layers, await asyncio.to_thread(policy.resolve, layers)

    def _layers(self, spec: model.SandboxSpec) -> tuple[policy.Layer, ...]:
        """All that says what this sandbox may touch: files are read anew, and one that cannot be read refuses it."""
        default = spec.mode is not None and spec.profile == model.SandboxSpec().profile
        sources = self._policies(spec.workspace)
        if spec.tenant:
            sources = sources._replace(ceilings=(*sources.ceilings, _TENANTS))
        layers = policy.stack(
            profile=None if default else spec.profile,
            mode=spec.mode,
            sources=sources,
            arguments=policy.Policy(**spec.policy) if spec.policy else None,
        )
        return layers

    def _same(self, spec: model.SandboxSpec) -> model.SandboxInfo:
        found = self._sandboxes.get(self._names[spec.full_name or ""])
        if found is None or found.asked != spec:
            raise errors.error(
                "name_conflict",
                f"the name {spec.full_name!r} is taken by a sandbox that was asked for differently",
                hint="delete it, or choose another name",
            )
        return found.info(server=self.where, owner=self.owner)

    def _check_capacity(self, wanted: int = 1) -> None:
        limit = self.settings.limits.max_sandboxes
        waiting = self._stocked.held if self._stocked is not None else 0
        if len(self._sandboxes) + self._creating + waiting + wanted > limit:
            raise errors.error(
                "capacity_exceeded",
                f"{limit} sandboxes are live, which is this engine's limit",
                hint="delete some, or raise limits.max_sandboxes",
            )

    async def _make_machine(
        self, spec: model.SandboxSpec, rules: policy.Merged, lent: interfaces.Workspace | None = None,
        kept: str | None = None, image: interfaces.Image | None = None,
    ) -> interfaces.Machine:  # fmt: skip
        minimum = max(spec.minimum_isolation, rules.isolation.minimum, key=model.LEVELS.index)
        async with self._imaging.of(spec, image) as use:
            driver = await self._placement.choose(minimum, spec.driver)
            exposure = lent.exposure if lent is not None else None
            if kept is not None:
                return use(await driver.restore(kept, model.new_id(), spec, rules, exposure, use.image))
            return use(await driver.create(model.new_id(), spec, rules, exposure, use.image))

    def _follow(self, sandbox: sandboxes.Sandbox) -> None:
        """Learn of its machine's end."""
        machine = sandbox.machine
        machine.ended.add_done_callback(lambda future: self._machine_ended(sandbox, machine, future))

    async def _connect(self, made: sandboxes.Sandbox, given: network.Bound) -> None:
        """Its network, if its rules give it one; without it the sandbox is not made."""
        if made.rules.network.mode == "off":
            self._networks.forgo(made.machine)
        else:
            await self._networks.attach(made, given)

    def _find(self, sandbox: str) -> sandboxes.Sandbox:
        found = self._sandboxes.get(sandbox) or self._sandboxes.get(self._names.get(sandbox, ""))
        if found is not None:
            return found
        if sandbox in self._ended:
            words, tenant = self._ended[sandbox]
            problem = errors.error(
                "sandbox_lost", f"sandbox {sandbox} has ended: {words}", hint="create another"
            )
            problem._tenant = tenant  # type: ignore[attr-defined]  # for guards: others must not learn of it
            raise problem
        adopted = self._adopt(sandbox)
        if adopted is not None:
            return adopted
        raise errors.error(
            "sandbox_not_found", f"there is no sandbox {sandbox!r}", hint="`cloche list` shows what is there"
        )

    async def cool(self) -> None:
        """End the sandboxes that wait for nobody yet."""
        if self._stocked is not None:
            await self._stocked.guesses.close()

    def machine_of(self, sandbox: str) -> interfaces.Machine:
        return self._find(sandbox).machine

    async def info(self, sandbox: str) -> model.SandboxInfo:
        return self._find(sandbox).info(server=self.where, owner=self.owner)

    async def list(self) -> builtins.list[model.SandboxInfo]:
        live = [s.info(server=self.where, owner=self.owner) for s in self._sandboxes.values()]
        return live + [info for info, _ in await asyncio.to_thread(self._archive.orphans)]

    async def delete(self, sandbox: str) -> None:
        await self._end(self._find(sandbox), "asked", "deleted")

    def _overlaid(self, sandbox: str) -> tuple[interfaces.Workspace, str]:
        found = self._find(sandbox)
        if found.workspace is None or found.machine.upper_fd < 0:
            raise errors.error(
                "argument_invalid",
                f"sandbox {found.id} has no overlaid workspace",
                hint="create it with workspace=… and overlay=True",
            )
        return found.workspace, f"/proc/self/fd/{found.machine.upper_fd}/."

    async def diff(self, sandbox: str) -> builtins.list[model.FileChange]:
        lent, upper = self._overlaid(sandbox)
        return await asyncio.to_thread(lent.diff, upper)

    async def apply(self, sandbox: str, paths: builtins.list[str] | None = None) -> builtins.list[str]:
        lent, upper = self._overlaid(sandbox)
        applied = await asyncio.to_thread(lent.apply, upper, paths)
        self._files_changed(sandbox, "applied", applied[0] if applied else "", count=len(applied))
        return applied

    async def workspace_report(self, sandbox: str) -> model.WorkspaceReport:
        """What a sandbox that has ended did to its workspace's control files."""
        if sandbox in self._reports:
            return self._reports[sandbox]
        self._find(sandbox)
        raise errors.error("sandbox_not_found", f"sandbox {sandbox} has not ended, or had no workspace")

    async def extend(self, sandbox: str, timeout_s: float | None) -> model.SandboxInfo:
        found = self._find(sandbox)
        policy.check_timeout(found.rules, timeout_s)
        found.extend(timeout_s)
        self._reaper.look_again(found)
        if found.phase == "archived":
            info = found.info(server=self.where, owner=self.owner)
            await asyncio.to_thread(self._store.put_sandbox, info, found.spec)
        self._journal.append(
            events.Extended(
                sandbox=found.id, time=self._clock.time(), actor=self._actor, expires_at=found.expires_at
            )
        )
        return found.info(server=self.where, owner=self.owner)

    async def get_policy(self, sandbox: str) -> policy.Merged:
        return self._find(sandbox).rules

    async def check_policy(self, spec: model.SandboxSpec) -> policy.Merged:
        return policy.resolve(await asyncio.to_thread(self._layers, spec))

    async def explain_policy(
        self, kind: Literal["host", "path", "env", "secret"], target: str, sandbox: str | None = None,
        spec: model.SandboxSpec | None = None, write: bool = False, method: str | None = None, path: str | None = None,
    ) -> policy.explaining.Explanation:  # fmt: skip
        from cloche.policy import explaining

        if (sandbox is None) == (spec is None):
            raise errors.error("argument_invalid", "a policy is explained for a sandbox or for a spec")
        layers = self._find(sandbox).layers if sandbox is not None else ()
        if spec is not None:
            layers = await asyncio.to_thread(self._layers, spec)
        question = explaining.question(kind, target, write=write, method=method, below=path)
        return explaining.explain(layers, question)

    async def update_policy(
        self, sandbox: str, change: dict[str, Any], if_version: str | None = None
    ) -> policy.Merged:
        """Bind other network rules to a live sandbox. What is not a rule of the network is settled at creation."""
        found = self._find(sandbox)
        async with found.rebinding:
            if if_version is not None and policy.version(found.rules) != if_version:
                raise errors.error(
                    "version_conflict",
                    f"the policy of sandbox {found.id} is not the one that was seen",
                    hint="look at it again, and change that one",
                )
            return await self._update_policy(found, change)

    async def _update_policy(self, found: sandboxes.Sandbox, change: dict[str, Any]) -> policy.Merged:
        fixed = sorted(set(change) - {"network"})
        if fixed:
            raise errors.error(
                "argument_invalid",
                f"{fixed[0]!r} of a live sandbox's policy cannot be changed; only 'network' can",
                hint="create another sandbox",
            )
        before = found.rules.network
        layers = policy.rebound(found.layers, policy.check(change))
        await self._networks.update(found, policy.resolve(layers).network)
        found.layers = layers
        self._journal.append(
            events.PolicyChanged(
                sandbox=found.id,
                time=self._clock.time(),
                actor=self._actor,
                change="updated",
                target="network",
                summary=network.difference(before, found.rules.network),
            )
        )
        return found.rules

    def follow_asks(self, sandbox: str) -> AsyncIterator[model.Question]:
        return self._networks.follow_asks(self._find(sandbox))

    async def answer_ask(
        self, sandbox: str, question: str, answer: Literal["once", "sandbox", "deny"], reason: str = ""
    ) -> None:
        found = self._find(sandbox)
        asked = self._networks.asks.answer(found.id, question, answer, reason)
        self._journal.append(
            events.Decided(
                sandbox=found.id,
                time=self._clock.time(),
                actor=self._actor,
                verdict="deny" if answer == "deny" else "allow",
                operation="answer",
                target=asked.target,
                rule=asked.rule,
                source=f"answer of {self._actor}",
                reason=answer,
                execution=asked.execution,
            )
        )

    async def allow_always(self, rule: str) -> None:
        self._networks.check(policy.Network(mode="rules", allow=(rule,)))
        await asyncio.to_thread(self._remember, rule)
        self._journal.append(
            events.PolicyChanged(
                sandbox=None,
                time=self._clock.time(),
                actor=self._actor,
                change="updated",
                target="the user's policy",
                summary=(f"+allow {rule}",),
            )
        )

    async def suspend(self, sandbox: str, mode: str = "pause") -> model.SandboxInfo:
        found = self._find(sandbox)
        if mode not in SUSPENSIONS:
            raise errors.error(
                "argument_invalid", f"the mode is {mode!r}", hint=f"use one of {', '.join(SUSPENSIONS)}"
            )
        if mode == "hibernate":
            raise errors.error(
                "not_supported_by_driver",
                f"the driver {found.machine.isolation.driver!r} cannot keep a sandbox's memory on disk",
                hint="use mode='pause' (memory stays where it is) or mode='archive' (files only)",
            )
        await self._suspend(found, mode)
        return found.info(server=self.where, owner=self.owner)

    async def _suspend(self, found: sandboxes.Sandbox, mode: str, *, asked: bool = True) -> None:
        now = self._clock.time
        if mode == "pause":
            if found.phase == "archived":
                raise errors.error(
                    "sandbox_stopped",
                    f"sandbox {found.id} is archived, and has no memory to keep",
                    hint="resume it first",
                )
            if await found.pause(asked=asked):
                self._journal.append(events.Paused(sandbox=found.id, time=now(), actor=self._actor))
        elif await self._put_away(found, asked=asked):
            self._journal.append(events.Archived(sandbox=found.id, time=now(), actor=self._actor))

    def _rest(self, found: sandboxes.Sandbox, rung: suspending.Rung) -> None:
        """A rung of a sandbox's ladder has come."""
        found.resting = True
        self._spawn(self._suspend_idle(found, rung), f"{rung} {found.id}")

    async def _suspend_idle(self, found: sandboxes.Sandbox, rung: suspending.Rung) -> None:
        try:
            await self._suspend(found, rung, asked=False)
        except errors.ClocheError as problem:
            # It would be tried again at once, for ever: better said once.
            found.ladder = model.Ladder()
            said = f"it is not suspended when idle: {problem.message}"
            found.machine.warnings = (*found.machine.warnings, said)
        finally:
            found.resting = False
            self._reaper.look_again(found)

    async def _suspend_expired(self, found: sandboxes.Sandbox) -> None:
        rung = found.ladder.at_timeout
        try:
            if found.phase == "running" or rung == "archive":
                await self._suspend(found, rung)
        except errors.ClocheError as problem:
            await self._end(
                found, "expired", f"its time was up, and it could not be suspended: {problem.message}"
            )

    # ── archived ones ───────────────────────────────────────────────────────────────────────────

    @cached_property
    def _archive(self) -> archiving.Archive:
        from cloche.engine import archiving

        return archiving.Archive(self._directory, self._store, self.owner, reaping.owner_lives)

    async def _put_away(self, found: sandboxes.Sandbox, *, asked: bool) -> bool:
        from cloche.engine import archiving

        self._keepable(found.id)
        archive = self._archive

        async def keep(machine: interfaces.Machine) -> None:
            info = found.info(server=self.where, owner=self.owner)
            await archive.keep(machine, msgspec.structs.replace(info, phase="archived"), found.spec)

        before = await found.put_away(keep, archiving.Absent(found.machine), asked=asked)
        if before is None:
            return False
        found.revive = self._revive
        await self._networks.detach(found)
        await before.kill("the sandbox was archived")
        self._let_go(found)
        return True

    async def _revive(self, found: sandboxes.Sandbox) -> None:
        """A machine for an archived sandbox, with its files."""
        with self._admit(found.spec.tenant, found.spec.resources, (), waking=True):
            await self._renew(found, self._archive.place(found.id), "the sandbox was archived")
        await self._unarchive(found)
        self._journal.append(events.Resumed(sandbox=found.id, time=self._clock.time(), actor=self._actor))

    async def _unarchive(self, found: sandboxes.Sandbox) -> None:
        """It lives: what was kept of it is not needed any more."""
        info = found.info(server=self.where, owner=self.owner)
        await asyncio.to_thread(self._store.put_sandbox, info, found.spec)
        await self._archive.forget(found.id)

    def _adopt(self, sandbox: str) -> sandboxes.Sandbox | None:
        """An archived sandbox that its engine left behind."""
        from cloche.engine import archiving

        taken = self._archive.adopt(sandbox) if not self._closed else None
        if taken is None:
            return None
        info, spec = taken
        layers = self._layers(spec)
        found = self._known(info.id, spec, policy.resolve(layers), archiving.Absent(info))
        found.layers = layers
        found.recall(info)
        found.phase = "archived"
        self._sandboxes[found.id] = found
        if spec.full_name is not None:
            self._names[spec.full_name] = found.id
        self._reaper.look_again(found)
        return found

    def _known(
        self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged, machine: interfaces.Machine,
        lent: interfaces.Workspace | None = None,
    ) -> sandboxes.Sandbox:  # fmt: skip
        made = sandboxes.Sandbox(
            sandbox_id, spec, rules, machine, self.settings.limits, self._directory, self._clock, self._interpreters,
            lent,
        )  # fmt: skip
        made.revive = self._revive
        made.on_rest = self._reaper.look_again
        return made

    async def _sweep_archive(self) -> builtins.list[str]:
        """Files that no row speaks of, and archived sandboxes whose time came while nobody looked."""
        swept = await asyncio.to_thread(self._archive.sweep)
        for info, _ in await asyncio.to_thread(self._archive.orphans):
            if info.expires_at is not None and info.expires_at <= self._clock.time():
                found = self._adopt(info.id)
                if found is not None:
                    await self._end(found, "expired", "its time was up")
                    swept.append(info.id)
        return swept

    async def resume(self, sandbox: str) -> model.SandboxInfo:
        found = self._find(sandbox)
        paused = found.phase == "paused"
        await found.wake()
        if paused:
            self._journal.append(events.Resumed(sandbox=found.id, time=self._clock.time(), actor=self._actor))
        return found.info(server=self.where, owner=self.owner)

    # ── snapshots ───────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _shelf(self) -> snapshots.Shelf:
        from cloche.engine import snapshots

        return snapshots.Shelf(self._directory, self._store, self._clock, self.owner, reaping.owner_lives)

    def _keepable(self, sandbox: str) -> sandboxes.Sandbox:
        found = self._find(sandbox)
        if found.workspace is not None:
            raise errors.error(
                "argument_invalid",
                f"sandbox {found.id} works in a workspace, whose files belong to the host and are in no snapshot",
                hint="copy what you need into a sandbox without one; `diff` and `apply` work with overlay=True",
            )
        return found

    async def snapshot(
        self, sandbox: str, name: str | None = None, tags: builtins.list[str] | None = None
    ) -> stock.SnapshotInfo:
        found = self._keepable(sandbox)
        await self._shelf.check_name(name, tags or (), found.spec.tenant)
        info = await self._keep(found, name, tuple(tags or ()))
        self._journal.append(
            events.SnapshotMade(
                sandbox=found.id,
                time=info.created_at,
                actor=self._actor,
                snapshot=info.id,
                name=name,
                size=info.size_bytes,
            )
        )
        return info

    async def _keep(
        self, found: sandboxes.Sandbox, name: str | None = None, tags: tuple[str, ...] = ()
    ) -> stock.SnapshotInfo:
        if found.phase == "archived":
            await found.wake()
        async with found.change(), found.still() as machine:
            return await self._shelf.keep(
                machine, name=name, tags=tags, sandbox=found.id, parent=found.snapshot, spec=found.spec
            )

    async def restore(self, sandbox: str, snapshot: str) -> model.SandboxInfo:
        found = self._keepable(sandbox)
        info = await self._shelf.find(snapshot)
        async with found.change():
            archived = found.phase == "archived"
            room = self._admit(found.spec.tenant, found.spec.resources, (), waking=True)
            with room if archived else nullcontext():
                await self._renew(found, self._shelf.place(info.id), f"it was set back to snapshot {info.id}")
            found.snapshot = info.id
            if archived:
                await self._unarchive(found)
        self._reaper.look_again(found)
        self._journal.append(
            events.SnapshotRestored(
                sandbox=found.id, time=self._clock.time(), actor=self._actor, snapshot=info.id
            )
        )
        return found.info(server=self.where, owner=self.owner)

    async def _renew(self, found: sandboxes.Sandbox, kept: str, reason: str) -> None:
        """Another machine for a sandbox, with files that were kept. The one before ends when the new one is there; if an
        archived sandbox cannot get all that it had, it stays archived."""
        given = await self._networks.bind(found.spec, found.rules, found.id)
        try:
            spec = msgspec.structs.replace(found.spec, env={**given.env, **found.spec.env})
            machine = await self._make_machine(spec, found.rules, None, kept)
            if found.phase == "lost":  # meanwhile
                await machine.kill("the sandbox was lost")
                raise errors.error("sandbox_lost", f"sandbox {found.id} has ended: {found.reason}")
            archived = found.phase == "archived"
            before = found.exchange(machine)
            await before.kill(reason)
            await self._networks.detach(found)
            self._let_go(found)
            try:
                await self._connect(found, given)
                if found.spec.volumes:
                    await self._volumes.attach(found, found.spec.volumes)
            except BaseException:
                if archived:
                    found.exchange(before)
                    found.phase = "archived"
                    self._let_go(found)
                    await self._networks.detach(found)
                await machine.kill("it could not get all that it had")
                if not archived:
                    self._follow(found)  # it is lost
                raise
            self._follow(found)
        finally:
            given.close()

    async def fork(self, sandbox: str, count: int = 1) -> builtins.list[model.SandboxInfo]:
        found = self._keepable(sandbox)
        if not 1 <= count <= _MOST_FORKS:
            raise errors.error(
                "limit_invalid", f"count is {count}; it must be 1 to {_MOST_FORKS}", field="count"
            )
        self._check_capacity(count)
        await self._check_quota(found.spec, count)
        info = await self._keep(found)
        spec = msgspec.structs.replace(found.spec, name=None, snapshot=info.id)
        try:
            made = await self._create_all(spec, count)
        finally:
            await self._shelf.delete(info.id)
        self._journal.append(
            events.Forked(
                sandbox=found.id,
                time=self._clock.time(),
                actor=self._actor,
                children=tuple(m.id for m in made),
            )
        )
        return made

    async def _create_all(self, spec: model.SandboxSpec, count: int) -> builtins.list[model.SandboxInfo]:
        """All of them, or none."""
        done = await asyncio.gather(*(self.create(spec) for _ in range(count)), return_exceptions=True)
        made = [info for info in done if not isinstance(info, BaseException)]
        problems = [problem for problem in done if isinstance(problem, BaseException)]
        if problems:
            for info in made:
                with suppress(errors.ClocheError):
                    await self._end(
                        self._find(info.id), "failed", "another one of its kind could not be made"
                    )
            raise problems[0]
        return made

    async def snapshots(self, tag: str | None = None) -> builtins.list[stock.SnapshotInfo]:
        return await self._shelf.list(tag)

    async def snapshot_info(self, snapshot: str) -> stock.SnapshotInfo:
        return await self._shelf.find(snapshot)

    async def delete_snapshot(self, snapshot: str) -> None:
        info = await self._shelf.delete(snapshot)
        self._journal.append(
            events.SnapshotDeleted(
                sandbox=info.sandbox, time=self._clock.time(), actor=self._actor, snapshot=info.id
            )
        )

    async def diff_snapshots(self, snapshot: str, other: str) -> builtins.list[model.FileChange]:
        one, two = await self._shelf.find(snapshot), await self._shelf.find(other)
        driver = await self._placement.choose(one.spec.minimum_isolation, one.spec.driver)
        return await driver.compare(self._shelf.place(one.id), self._shelf.place(two.id))

    # ── volumes ─────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _volumes(self) -> volume_shelf.Volumes:
        from cloche.engine import volumes as volume_shelf

        return volume_shelf.Volumes(
            self._directory, self._store, self._clock, self.owner, reaping.owner_lives
        )

    def _let_go(self, sandbox: sandboxes.Sandbox) -> None:
        """Its volumes are free again."""
        if "_volumes" in self.__dict__:  # most engines never have any
            self._volumes.detach(sandbox.id)

    async def _keeper_of_volumes(self) -> interfaces.Driver:
        return await self._placement.choose("process")  # the strongest there is

    async def create_volume(self, spec: stock.VolumeSpec) -> stock.VolumeInfo:
        info = await self._volumes.create(spec, await self._keeper_of_volumes())
        self._volume_changed(spec.name, "created")
        return info

    async def volumes(self) -> builtins.list[stock.VolumeInfo]:
        return await self._volumes.list(await self._keeper_of_volumes())

    async def volume(self, volume: str) -> stock.VolumeInfo:
        return await self._volumes.find(volume, await self._keeper_of_volumes())

    async def delete_volume(self, volume: str) -> None:
        await self._volumes.delete(volume, await self._keeper_of_volumes())
        self._volume_changed(volume, "deleted")

    def _volume_changed(self, name: str, change: Literal["created", "deleted"]) -> None:
        self._journal.append(
            events.VolumeChanged(
                sandbox=None, time=self._clock.time(), actor=self._actor, name=name, change=change
            )
        )

    async def usage(self, sandbox: str) -> model.SandboxUsage:
        return model.SandboxUsage(**self._find(sandbox).machine.usage()._asdict())

    # ── secrets ─────────────────────────────────────────────────────────────────────────────────

    async def secrets(self) -> builtins.list[model.SecretInfo]:
        return await asyncio.to_thread(lambda: self._secrets().list())

    async def set_secret(
        self, secret: model.Secret, value: bytes, if_version: str | None = None
    ) -> model.SecretInfo:
        info, replaced = await asyncio.to_thread(lambda: self._secrets().set(secret, value, if_version))
        self._secret_changed(info, "replaced" if replaced else "created")
        return info

    async def remove_secret(self, name: str, if_version: str | None = None) -> None:
        info = await asyncio.to_thread(lambda: self._secrets().remove(name, if_version))
        self._secret_changed(info, "deleted")

    async def rotate_secrets_key(self) -> int:
        count = await asyncio.to_thread(lambda: self._secrets().rotate_key())
        self._journal.append(
            events.Administered(
                sandbox=None, time=self._clock.time(), actor=self._actor, operation="secrets_key_rotated"
            )
        )
        return count

    def _secret_changed(self, info: model.SecretInfo, change: events.Change) -> None:
        self._journal.append(
            events.SecretChanged(
                sandbox=None,
                time=self._clock.time(),
                actor=self._actor,
                name=info.name,
                change=change,
                hosts=info.hosts,
            )
        )

    # ── templates, pools, claims ────────────────────────────────────────────────────────────────

    @property
    def _stock(self) -> stocking.Stock:
        if self._stocked is None:
            from cloche.engine import stocking

            self._stocked = stocking.Stock(
                _House(self),
                self._store,
                self._clock,
                self._journal.append,
                lambda: self._actor,
                self.owner,
                self.settings.defaults,
                self._guesses,
            )
        return self._stocked

    async def host(self) -> None:
        """Fill the pools that stay: this engine is the one that keeps them. Clients of the one before it come back to ask for what
        died with it, and are told."""
        for info in await asyncio.to_thread(self._store.sandboxes):
            if info.phase == "lost":
                self._ended[info.id] = (info.reason or "its engine has ended", info.tenant)
        await self._mark_lost()
        while len(self._ended) > _MOST_LOST:
            del self._ended[next(iter(self._ended))]
        await asyncio.to_thread(self._store.settle_claims, reaping.owner_lives, self._clock.time())
        await self._stock.load()

    async def put_template(
        self, spec: stock.TemplateSpec, if_version: str | None = None, warnings: tuple[str, ...] = ()
    ) -> stock.TemplateInfo:
        return await self._stock.templates.put(spec, if_version, warnings)

    async def template(self, name: str) -> stock.TemplateInfo:
        return await self._stock.templates.get(name)

    async def templates(self) -> builtins.list[stock.TemplateInfo]:
        return await self._stock.templates.list()

    async def delete_template(self, name: str, if_version: str | None = None) -> None:
        await self._stock.templates.delete(name, if_version)

    async def put_pool(self, spec: stock.PoolSpec, if_generation: int | None = None) -> stock.PoolInfo:
        return await self._stock.put_pool(spec, if_generation)

    async def pool(self, name: str) -> stock.PoolInfo:
        return self._stock.pool_info(name)

    async def pools(self) -> builtins.list[stock.PoolInfo]:
        return self._stock.pools()

    async def scale_pool(self, name: str, size: int, if_generation: int | None = None) -> stock.PoolInfo:
        return await self._stock.scale_pool(name, size, if_generation)

    async def wait_pool(self, name: str, ready: int | None = None, timeout_s: float = 60) -> stock.PoolInfo:
        return await self._stock.wait_pool(name, ready, timeout_s)

    async def delete_pool(self, name: str, if_generation: int | None = None) -> None:
        await self._stock.delete_pool(name, if_generation)

    async def claim(self, spec: stock.ClaimSpec) -> stock.ClaimInfo:
        begun = time.perf_counter()
        info = await self._stock.claims.claim(spec)
        made = self._sandboxes.get(info.sandbox or "")
        if made is not None and made.ready_s is None:  # else it is the answer to the same claim again
            made.ready_s = time.perf_counter() - begun
            if self._measures is not None:
                self._measures.claimed["warm" if info.warm else "cold"].observe(made.ready_s)
        return info

    async def claim_info(self, name: str) -> stock.ClaimInfo:
        return await self._stock.claims.info(name)

    async def claims(self) -> builtins.list[stock.ClaimInfo]:
        return await self._stock.claims.list()

    async def release_claim(self, name: str) -> None:
        await self._stock.claims.release(name)

    # ── endings ─────────────────────────────────────────────────────────────────────────────────

    async def _end(self, sandbox: sandboxes.Sandbox, reason: events.EndReason, words: str) -> None:
        async with (
            sandbox.alone()
        ):  # a change that is under way is finished first: what it made must end as well
            before = sandbox.phase
            if before not in ("deleted", "lost"):
                sandbox.phase, sandbox.reason = "deleted", words
                self._forget(sandbox, words)
        if before in ("deleted", "lost"):
            await asyncio.shield(sandbox.machine.ended)
            return
        if self._stocked is not None:
            expired = reason in ("expired", "idle")
            self._stocked.claims.ended(sandbox.id, "expired" if expired else "deleted", words)
        self._journal.append(
            events.Deleted(
                sandbox=sandbox.id,
                time=self._clock.time(),
                actor=self._actor if reason in ("asked", "failed") else "engine",
                reason=reason,
                executions=sandbox.count,
            )
        )
        if sandbox.spec.stay or before == "archived":
            await asyncio.to_thread(
                self._store.put_sandbox, sandbox.info(server=self.where, owner=self.owner)
            )
        if before == "archived":
            await self._archive.forget(sandbox.id)
        await sandbox.machine.kill(words)
        self._let_go(sandbox)
        sandbox.close()
        await self._networks.detach(sandbox)
        await self._give_back(sandbox)

    def _expire(self, sandbox: sandboxes.Sandbox, reason: str) -> None:
        if reason == "expired" and sandbox.outlive():
            self._spawn(self._suspend_expired(sandbox), f"suspend {sandbox.id}")
            return
        words = "its time was up" if reason == "expired" else "nobody used it"
        self._spawn(
            self._end(sandbox, "expired" if reason == "expired" else "idle", words), f"end {sandbox.id}"
        )

    def _machine_ended(
        self, sandbox: sandboxes.Sandbox, machine: interfaces.Machine, future: asyncio.Future[str]
    ) -> None:
        if sandbox.phase == "deleted" or future.cancelled() or sandbox.machine is not machine:
            return
        reason = future.result()
        sandbox.phase, sandbox.reason = "lost", reason
        self._let_go(sandbox)
        self._forget(sandbox, reason)
        if self._stocked is not None:
            self._stocked.claims.ended(sandbox.id, "lost", reason)
        sandbox.close()
        self._spawn(self._networks.detach(sandbox), f"detach {sandbox.id}")
        self._spawn(self._give_back(sandbox), f"give back {sandbox.id}")
        self._journal.append(
            events.Lost(
                sandbox=sandbox.id, time=self._clock.time(), actor="engine", reason=reason, owner=self.owner
            )
        )

    async def _give_back(self, sandbox: sandboxes.Sandbox) -> None:
        """After the sandbox's end, and only then, its workspace is put in order on the host."""
        if sandbox.workspace is not None:
            report = await asyncio.to_thread(sandbox.workspace.finish)
            self._reports[sandbox.id] = report

    def _forget(self, sandbox: sandboxes.Sandbox, words: str) -> None:
        self._sandboxes.pop(sandbox.id, None)
        if sandbox.spec.full_name is not None and self._names.get(sandbox.spec.full_name) == sandbox.id:
            del self._names[sandbox.spec.full_name]
        self._ended[sandbox.id] = (words, sandbox.spec.tenant)
        while len(self._ended) > _MOST_LOST:
            self._reports.pop(oldest := next(iter(self._ended)), None)
            del self._ended[oldest]

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ── executions ──────────────────────────────────────────────────────────────────────────────

    async def exec(self, sandbox: str, request: model.ExecRequest) -> model.ExecResult:
        """Run to the end, or, past `background_after_s`, hand back the running command."""
        found = self._find(sandbox)
        running = await self._start(found, request, to_end=request.background_after_s is None)
        try:
            return await asyncio.wait_for(running.finished(), request.background_after_s)
        except TimeoutError:
            log = running.log
            return model.ExecResult(
                exit_code=None,
                stdout_bytes=log.stdout.bytes(),
                stderr_bytes=log.stderr.bytes(),
                stdout_total=log.stdout.total,
                stderr_total=log.stderr.total,
                isolation=found.machine.isolation,
                execution=running.id,
                process=running.id,
            )
        except asyncio.CancelledError:
            if not found.spec.stay:
                with suppress(errors.ClocheError):
                    await running.signal(9, scope="tree")
            raise

    async def start(self, sandbox: str, request: model.ExecRequest) -> model.ExecutionInfo:
        return (await self._start(self._find(sandbox), request)).info()

    async def _start(
        self, found: sandboxes.Sandbox, request: model.ExecRequest, *, to_end: bool = False
    ) -> execution.Execution:
        begun = time.perf_counter()
        await self._networks.ready(found)
        running = await found.start(request, to_end=to_end)
        if self._measures is not None:
            self._measures.began()
            if found.count == 1 and found.ready_s is not None:
                self._measures.first_instruction.observe(found.ready_s + time.perf_counter() - begun)
        self._reaper.look_again(found)  # memory that is watched is watched while something runs
        shown = running.info()
        self._journal.append(
            events.Started(
                sandbox=found.id,
                time=shown.started_at,
                actor=self._actor,
                execution=running.id,
                command=shown.command,
                user=request.user,
            )
        )
        if running.running:
            running.result.add_done_callback(lambda future: self._record_exit(found, running, future))
        else:
            self._record_exit(found, running, running.result)
        return running

    def _record_exit(
        self, found: sandboxes.Sandbox, running: execution.Execution, future: asyncio.Future[model.ExecResult]
    ) -> None:
        self._reaper.look_again(found)
        lost = future.cancelled() or future.exception() is not None
        if self._measures is not None:
            self._measures.exited(None if lost else future.result(), running.first_output_s)
        if lost:
            return
        result = future.result()
        now = self._clock.time()
        trace = msgspec.UNSET if running.trace is None else running.trace.id
        for denial in result.denials:
            self._journal.append(
                events.Denied(
                    sandbox=found.id,
                    time=now,
                    actor="guest",
                    denial=denial,
                    execution=running.id,
                    trace=trace,
                )
            )
        self._journal.append(
            events.Exited(
                sandbox=found.id,
                time=now,
                actor="guest",
                execution=running.id,
                exit_code=result.exit_code,
                signal=result.signal,
                timed_out=result.timed_out,
                oom_killed=result.oom_killed,
                duration_ms=result.duration_ms,
                trace=trace,
            )
        )

    def attach(
        self, sandbox: str, execution: str, after: int = 0, wait: bool = True, lossless: bool = False
    ) -> AsyncIterator[model.StreamEvent]:
        return self._find(sandbox).execution(execution).follow(after, wait=wait, lossless=lossless)

    async def wait(self, sandbox: str, execution: str) -> model.ExecResult:
        return await asyncio.shield(self._find(sandbox).execution(execution).result)

    async def write_stdin(self, sandbox: str, execution: str, data: bytes, end: bool = False) -> None:
        running = self._find(sandbox).execution(execution)
        await self._find(sandbox).wake()
        if data:
            await running.write(data)
        if end:
            running.end_input()

    async def resize(self, sandbox: str, execution: str, columns: int, rows: int) -> None:
        self._find(sandbox).execution(execution).resize(columns, rows)

    async def signal(self, sandbox: str, execution: str, number: int, tree: bool = False) -> None:
        if not 0 < number < 65:
            raise errors.error("signal_unknown", f"there is no signal {number}")
        found = self._find(sandbox)
        running = found.execution(execution)
        await found.wake()
        await running.signal(number, scope="tree" if tree else "group")

    async def executions(self, sandbox: str) -> builtins.list[model.ExecutionInfo]:
        return [e.info() for e in self._find(sandbox).executions.values()]

    # ── ports ───────────────────────────────────────────────────────────────────────────────────

    async def dial(self, sandbox: str, port: int, timeout_s: float = 10) -> interfaces.Tunnel:
        model.check_port(port)
        model.check_seconds("timeout_s", timeout_s)
        from cloche.engine import tunnels  # for who uses it

        return await tunnels.dial(self._find(sandbox), port, timeout_s)

    async def ports(self, sandbox: str) -> builtins.list[model.PortInfo]:
        found = self._find(sandbox)
        async with found.use(looking=True) as machine:
            return [
                model.PortInfo(port=port, address=address)
                for address, port in await machine.listening()
                if port not in found.own_ports
            ]

    async def link(self, sandbox: str, port: int, ttl_s: float = 3600) -> model.LinkInfo:
        model.check_port(port)
        found = self._find(sandbox)
        if self.make_link is None:
            raise errors.error(
                "server_unavailable",
                "preview links are served by `cloche serve`, and this is none",
                hint="start one and set CLOCHE_URL, or use box.forward(port), or `cloche forward`",
            )
        made = self.make_link(found.id, port, ttl_s, self._actor)
        self.record(self.administered("link_made", f"{found.id}:{port}", f"for {ttl_s:g} s"))
        return made

    async def create_token(
        self, sandbox: str, scopes: builtins.list[str], ttl_s: float = 900
    ) -> model.AccessToken:
        model.check_token(scopes, ttl_s)
        found = self._find(sandbox)
        if self.make_token is None:
            raise errors.error(
                "server_unavailable",
                "tokens are for callers of `cloche serve`, and this is none",
                hint="start one, and create the sandbox there",
            )
        wanted = tuple(dict.fromkeys(scopes))
        self.record(self.administered("token_made", found.id, f"{' '.join(wanted)}; for {ttl_s:g} s"))
        return self.make_token(found.id, found.spec.tenant, wanted, ttl_s, self._actor)

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    async def read_file(self, sandbox: str, path: str, user: str = "user") -> bytes:
        async with self._find(sandbox).use() as machine:
            return await files.read(machine, path, user=user)

    async def read_file_stream(self, sandbox: str, path: str, user: str = "user") -> AsyncIterator[bytes]:
        async with self._find(sandbox).use() as machine:
            async for data in files.read_stream(machine, path, user=user):
                yield data

    async def write_file(
        self, sandbox: str, path: str, data: bytes, user: str = "user", mode: int | None = None
    ) -> model.FileInfo:
        found = self._find(sandbox)
        async with found.use(writing=True) as machine:
            info = await files.write(machine, path, data, user=user, mode=mode)
        self._journal.append(
            events.FileWritten(
                sandbox=found.id, time=self._clock.time(), actor=self._actor, path=path, size=len(data)
            )
        )
        return info

    async def list_files(
        self, sandbox: str, path: str, depth: int = 1, user: str = "user"
    ) -> builtins.list[model.FileInfo]:
        async with self._find(sandbox).use() as machine:
            return await files.list_dir(machine, path, user=user, depth=depth)

    async def stat_file(self, sandbox: str, path: str, user: str = "user") -> model.FileInfo:
        async with self._find(sandbox).use() as machine:
            return await files.stat_path(machine, path, user=user)

    async def move_file(
        self, sandbox: str, path: str, target: str, overwrite: bool = True, user: str = "user"
    ) -> None:
        async with self._find(sandbox).use() as machine:
            await files.move(machine, path, target, user=user, overwrite=overwrite)
        self._files_changed(sandbox, "moved", path, target)

    async def remove_file(self, sandbox: str, path: str, recursive: bool = False, user: str = "user") -> None:
        async with self._find(sandbox).use() as machine:
            await files.remove(machine, path, user=user, recursive=recursive)
        self._files_changed(sandbox, "removed", path)

    async def make_dir(self, sandbox: str, path: str, user: str = "user") -> bool:
        async with self._find(sandbox).use() as machine:
            made = await files.make_dir(machine, path, user=user)
        if made:
            self._files_changed(sandbox, "directory_made", path)
        return made

    async def watch_files(
        self, sandbox: str, path: str, recursive: bool = False, user: str = "user"
    ) -> AsyncIterator[model.FileEvent]:
        model.check_path(path)
        async with self._find(sandbox).use(looking=True) as machine:
            async for event in machine.watch(path, recursive=recursive, user=user):
                yield event

    async def upload_tree(self, sandbox: str, path: str, archive: bytes, user: str = "user") -> int:
        async with self._find(sandbox).use(writing=True) as machine:
            count = await files.upload_tree(machine, path, archive, user=user)
        self._files_changed(sandbox, "uploaded", path, count=count)
        return count

    async def download_tree(self, sandbox: str, path: str, user: str = "user") -> bytes:
        async with self._find(sandbox).use() as machine:
            return await files.download_tree(machine, path, user=user)

    def _files_changed(
        self,
        sandbox: str,
        change: Literal["uploaded", "moved", "removed", "directory_made", "applied"],
        path: str,
        target: str | None = None,
        count: int = 1,
    ) -> None:
        self._journal.append(
            events.FilesChanged(
                sandbox=self._find(sandbox).id,
                time=self._clock.time(),
                actor=self._actor,
                change=change,
                path=path,
                target=target,
                count=count,
            )
        )

    # ── contexts ────────────────────────────────────────────────────────────────────────────────

    async def create_context(
        self, sandbox: str, language: str = "python", cwd: str | None = None
    ) -> model.ContextInfo:
        return (await self._find(sandbox).create_context(language, cwd)).info()

    async def contexts(self, sandbox: str) -> builtins.list[model.ContextInfo]:
        return [c.info() for c in self._find(sandbox).contexts.values()]

    async def run_code(
        self, sandbox: str, code: str, context: str | None = None, language: str = "python",
        env: dict[str, str] | None = None, timeout_s: float | None = None,
    ) -> model.CodeResult:  # fmt: skip
        async with self._coding(sandbox, code, context, language, env, timeout_s) as (chosen, given):
            given.append(await chosen.run(code, env=env, timeout_s=timeout_s))
        return given[0]

    async def run_code_stream(
        self, sandbox: str, code: str, context: str | None = None, language: str = "python",
        env: dict[str, str] | None = None, timeout_s: float | None = None,
    ) -> AsyncIterator[model.CodeEvent]:  # fmt: skip
        async with (
            self._coding(sandbox, code, context, language, env, timeout_s) as (chosen, given),
            aclosing(chosen.follow(code, env=env, timeout_s=timeout_s)) as followed,  # type: ignore[type-var]
        ):
            async for event in followed:
                if isinstance(event, model.CodeEnded):
                    given.append(event.result)
                yield event

    @asynccontextmanager
    async def _coding(
        self, sandbox: str, code: str, context: str | None, language: str, env: dict[str, str] | None,
        timeout_s: float | None,
    ) -> AsyncIterator[tuple[code_contexts.Context, builtins.list[model.CodeResult]]]:  # fmt: skip
        """The context for a piece of code, on record; its user puts the result into the list."""
        model.check_environment(env or {})
        policy.check_environment(self._find(sandbox).rules, env or {})
        model.check_seconds("timeout_s", timeout_s)
        found = self._find(sandbox)
        await found.wake()
        found.touch()
        chosen = await found.context(context, language)
        execution = model.new_id()
        began = self._clock.time()
        self._journal.append(
            events.Started(
                sandbox=found.id,
                time=began,
                actor=self._actor,
                execution=execution,
                command=code,
                context=chosen.id,
            )
        )
        given: builtins.list[model.CodeResult] = []
        try:
            yield chosen, given
        except errors.SandboxLost:
            if context is None:  # the default context is replaced by a fresh one next time
                found.contexts.pop(chosen.id, None)
            raise
        finally:
            found.touch()
            self._reaper.look_again(found)
            now = self._clock.time()
            self._journal.append(
                events.Exited(
                    sandbox=found.id,
                    time=now,
                    actor="guest",
                    execution=execution,
                    exit_code=0 if given and given[0].error is None else 1,
                    duration_ms=(now - began) * 1000,
                )
            )

    async def _context(self, sandbox: str, context: str) -> code_contexts.Context:
        found = self._find(sandbox)
        await found.wake()
        return await found.context(context, "python")

    async def interrupt_context(self, sandbox: str, context: str) -> None:
        await (await self._context(sandbox, context)).interrupt()

    async def restart_context(self, sandbox: str, context: str) -> None:
        await (await self._context(sandbox, context)).restart()

    async def fork_context(
        self, sandbox: str, context: str, count: int = 1
    ) -> builtins.list[model.ContextInfo]:
        if not 1 <= count <= _MOST_FORKS:
            raise errors.error(
                "limit_invalid", f"count is {count}; it must be 1 to {_MOST_FORKS}", field="count"
            )
        chosen = await self._context(sandbox, context)
        found = self._find(sandbox)
        async with found.use():
            made = await chosen.fork(count)
            found.contexts |= {copy.id: copy for copy in made}
        return [copy.info() for copy in made]

    async def delete_context(self, sandbox: str, context: str) -> None:
        chosen = await self._context(sandbox, context)
        self._find(sandbox).contexts.pop(chosen.id, None)
        await chosen.kill()

    # ── images ──────────────────────────────────────────────────────────────────────────────────

    async def images(self) -> builtins.list[model.ImageInfo]:
        return await self._imaging.images()

    async def image(self, reference: str) -> model.ImageInfo:
        return await self._imaging.find(reference)

    def pull_image(self, reference: str) -> AsyncIterator[model.ImageProgress]:
        return self._imaging.pull(reference)

    def build_image(self, recipe: dict[str, Any] | str, directory: str) -> AsyncIterator[model.ImageProgress]:
        return self._imaging.build(recipe, directory)

    async def remove_image(self, reference: str) -> model.ImageInfo:
        return await self._imaging.remove(reference)

    async def gc_images(self) -> builtins.list[model.ImageInfo]:
        return await self._imaging.collect()

    def record(self, event: events.AnyEvent) -> None:
        """For the parts of the engine that have acts of their own."""
        self._journal.append(event)

    def administered(self, operation: str, target: str = "", detail: str = "") -> events.Administered:
        """That somebody does so now."""
        return events.Administered(
            sandbox=None,
            time=self._clock.time(),
            actor=self._actor,
            operation=operation,
            target=target,
            detail=detail,
        )

    # ── the journal, and the rest ───────────────────────────────────────────────────────────────

    async def events(
        self, after: int = 0, sandbox: str | None = None, limit: int = 1000
    ) -> builtins.list[dict[str, Any]]:
        return await self._journal.read(after=after, sandbox=sandbox, limit=limit)

    def follow_events(self, after: int = 0, sandbox: str | None = None) -> AsyncIterator[dict[str, Any]]:
        return self._journal.follow(after=after, sandbox=sandbox)

    async def sweep(self) -> builtins.list[str]:
        """Remove what dead engines left behind: their cgroups, files, workspace stubs; their sandboxes are lost."""
        with suppress(errors.ClocheError):
            await self._placement.choose("process")
        swept = await self._sweep()
        self._journal.append(
            events.Administered(
                sandbox=None,
                time=self._clock.time(),
                actor=self._actor,
                operation="swept",
                detail=f"{len(swept)} remains",
            )
        )
        return swept

    async def _sweep_quietly(self) -> None:
        """Once per engine, beside the first sandbox; who fails here has `cloche gc` to see why."""
        with suppress(OSError, errors.ClocheError):
            await self._sweep()

    async def _sweep(self) -> builtins.list[str]:
        swept: builtins.list[str] = []
        for driver in self._placement.started:
            swept += await asyncio.to_thread(driver.sweep, set())
        swept += await asyncio.to_thread(self._workspaces.sweep)
        swept += (
            await self._shelf.sweep(self.settings.snapshots.unnamed_ttl_s)
            + await self._sweep_archive()
            + await self._volumes.sweep()
        )
        await asyncio.to_thread(self._store.settle_claims, reaping.owner_lives, self._clock.time())
        lost = await self._mark_lost()
        if self._audit is not None:
            await asyncio.to_thread(self._audit.recover)
        return swept + [info.id for info in lost]

    async def _mark_lost(self) -> builtins.list[model.SandboxInfo]:
        """What died with its engine is lost from now on, on record and to whoever asks for it."""
        lost = await asyncio.to_thread(self._store.mark_lost, reaping.owner_lives, self._clock.time())
        for info in lost:
            self._ended[info.id] = (info.reason or "its engine has ended", info.tenant)
            self._journal.audit(
                events.Lost(
                    sandbox=info.id,
                    time=self._clock.time(),
                    actor="sweeper",
                    reason=info.reason or "lost",
                    owner=info.owner,
                )
            )
        return lost

    async def audit_lines(
        self, since: float | None = None, until: float | None = None, sandbox: str | None = None,
        kinds: builtins.list[str] | None = None, actor: str | None = None, outcome: str | None = None,
        after: tuple[float, str, int] | None = None, limit: int = 1000,
    ) -> builtins.list[dict[str, Any]]:  # fmt: skip
        log = self._kept_audit()
        self.settle_audit()
        return await asyncio.to_thread(
            log.read, since=since, until=until, sandbox=sandbox, kinds=kinds or (), actor=actor, outcome=outcome,
            after=after, limit=limit,
        )  # fmt: skip

    async def verify_audit(self, head: str | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(self._kept_audit().verify, head)

    def _kept_audit(self) -> interfaces.Audit:
        if self._audit is None:
            raise errors.error(
                "audit_unavailable",
                "this engine keeps no audit log",
                hint="set audit.enabled in the settings",
            )
        return self._audit

    async def check_ready(self) -> None:
        """Whether a sandbox could be made, recorded and kept now; raises why not."""
        if self._closed:
            raise errors.error("server_unavailable", "this engine is closed")
        self.check_audit()
        await asyncio.to_thread(self._store.check)
        await (await self._placement.choose(self.settings.defaults.minimum_isolation)).check()

    def check_audit(self) -> None:
        """Whether anything may be done that needs a record."""
        if self._audit is not None:
            self._audit.check()

    def settle_audit(self) -> None:
        self._journal.settle_audit()

    def record_refusal(self, operation: str, sandbox: str | None, code: str, message: str) -> None:
        if self._closed:
            return
        self._journal.append(
            events.Refused(
                sandbox=self._names.get(sandbox or "", sandbox),
                time=self._clock.time(),
                actor=self._actor,
                operation=operation,
                code=code,
                message=message,
            )
        )

    @property
    def live(self) -> int:
        return sum(1 for sandbox in self._sandboxes.values() if sandbox.phase != "archived")

    @property
    def staying(self) -> int:
        """Pools that are kept for whoever comes."""
        return self._stocked.staying if self._stocked is not None else 0

    @property
    def _actor(self) -> str:
        return events.caller.get("") or f"uid:{os.getuid()}"

    @property
    def _directory(self) -> str:
        return self.settings.home

    async def aclose(self) -> None:
        """End every sandbox of this engine and let go of everything. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._reaper.close()
        await asyncio.gather(
            *(
                self._end(s, "engine_stopped", "its engine stopped")
                for s in tuple(self._sandboxes.values())
                if s.phase != "archived"
            )
        )
        if self._stocked is not None:
            await self._stocked.close()
        await self._placement.close()
        await self._networks.aclose()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._journal.close()
        self._store.close()


class _House:
    """What an engine's stock may ask of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def judge(self, spec: model.SandboxSpec) -> sandboxes.Wanted:
        return self._engine._judge(spec)

    async def build(self, wanted: sandboxes.Wanted, *, ahead: bool) -> sandboxes.Sandbox:
        if self._engine._closed:
            raise errors.error("server_unavailable", "this engine is closed")
        return await self._engine._build(wanted, ahead=ahead)

    async def bind(self, made: sandboxes.Sandbox, wanted: sandboxes.Wanted, files: dict[str, bytes]) -> None:
        await self._engine._bind(made, wanted, files)

    async def publish(self, made: sandboxes.Sandbox) -> None:
        await self._engine._publish(made)

    async def discard(self, made: sandboxes.Sandbox, words: str) -> None:
        await self._engine._discard(made, words)

    async def end(self, sandbox: str, words: str) -> None:
        await self._engine._end(self._engine._find(sandbox), "asked", words)

    async def admit(self, spec: model.SandboxSpec) -> AbstractContextManager[None]:
        besides = await self._engine._besides(spec.tenant)
        return self._engine._admit(spec.tenant, spec.resources, besides)

    def known(self, sandbox: str) -> bool:
        return sandbox in self._engine._sandboxes or sandbox in self._engine._ended


async def _exercise(machine: interfaces.Machine) -> None:
    """Run nothing, once: what a first command copies and reads for the first time is there before somebody waits for it."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        nothing = interfaces.Start(["true"], {}, None, "user", [null] * 3, together=True)
        # A template may lack even that; whoever starts something will be told so.
        with suppress(errors.ClocheError, OSError, TimeoutError):
            child = await machine.start(nothing)
            await asyncio.wait_for(asyncio.shield(child.exited), _EXERCISE_S)
    finally:
        os.close(null)


def spec_from(data: dict[str, Any]) -> model.SandboxSpec:
    """A spec from plain data; an unknown or ill-typed field is an error that names it."""
    try:
        return msgspec.convert(data, model.SandboxSpec)
    except msgspec.ValidationError as problem:
        code = "field_unknown" if "unknown field" in str(problem) else "argument_invalid"
        raise errors.error(code, f"the sandbox cannot be described so: {problem}") from None
