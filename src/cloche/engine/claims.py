"""Claims: one sandbox each, bound once; everything that differs from the template is bound late.

    claim ─► a member that meets the requirements ─► bind (one message) ─► published under its id
         └─► none, or something that cannot be bound late ─► cold start, and the reason is recorded

Taking a member is one step of the event loop, so no sandbox is granted twice. A binding that fails for the caller's fault (a
path that is a directory, say) ends the member and the claim: nothing half-bound is ever handed out, or put back.

*What is durable.* A claim that has a name, or whose sandbox stays, may be asked for after its engine has ended: it is written
twice, as `binding` before the sandbox is bound and as `bound` before the answer. After a crash the first is undone (the name
is free), the second is finished with `SandboxMissing`, because nothing live survives its engine. Other claims end with their
connection; the journal has them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import msgspec

from cloche import errors, events, interfaces, model, settings, stock
from cloche.engine import pools, sandboxes, templates
from cloche.lifecycle import claims as binding
from cloche.lifecycle import conditions

_TRIES = 3
_LIMITS = model.Resources.__struct_fields__
_MOST_BYTES = 64 << 20
_MOST_ENDED = 1000


class House(Protocol):
    """What claims need of their engine."""

    def judge(self, spec: model.SandboxSpec) -> sandboxes.Wanted: ...

    async def build(self, wanted: sandboxes.Wanted, *, ahead: bool) -> sandboxes.Sandbox: ...

    async def bind(
        self, made: sandboxes.Sandbox, wanted: sandboxes.Wanted, files: dict[str, bytes]
    ) -> None: ...

    async def publish(self, made: sandboxes.Sandbox) -> None: ...

    async def discard(self, made: sandboxes.Sandbox, words: str) -> None: ...

    async def end(self, sandbox: str, words: str) -> None: ...

    async def admit(self, spec: model.SandboxSpec) -> AbstractContextManager[None]: ...

    def known(self, sandbox: str) -> bool: ...


class Claim:
    """One claim and what became of it."""

    def __init__(self, info: stock.ClaimInfo) -> None:
        self.info = info
        self.timer: asyncio.TimerHandle | None = None

    @property
    def durable(self) -> bool:
        return _durable(self.info.spec)


def _durable(spec: stock.ClaimSpec) -> bool:
    return spec.name is not None or spec.stay


def check(spec: stock.ClaimSpec) -> None:
    """Say what is wrong with a claim before anything is taken."""
    if spec.name is not None:
        model.check_name(spec.name)
    model.check_environment(spec.env)
    for field in ("timeout_s", "idle_timeout_s"):
        model.check_seconds(field, getattr(spec, field))
    if not 0 <= spec.wait_s < 1e6:
        raise errors.error("limit_invalid", f"wait_s is {spec.wait_s}; it must be 0 or more", field="wait_s")
    after = spec.ttl_seconds_after_finished
    if after is not None and after < 0:
        raise errors.error(
            "limit_invalid", f"ttl_seconds_after_finished is {after}", field="ttl_seconds_after_finished"
        )
    for path in (*spec.files, *spec.volumes):
        model.check_path(path)
    size = sum(map(len, spec.files.values()))
    if size > _MOST_BYTES:
        raise errors.error(
            "file_too_large", f"the files of a claim have {size} bytes; at most {_MOST_BYTES} are bound at once",
            hint="write the large ones after the claim, or use a volume",
        )  # fmt: skip


class Claims:
    def __init__(
        self,
        house: House,
        store: interfaces.Store,
        clock: interfaces.Clock,
        record: Callable[[events.AnyEvent], None],
        actor: Callable[[], str],
        find_pool: Callable[[str], pools.Pool | None],
        find_template: Callable[[str], Awaitable[stock.TemplateInfo]],
        owner: str,
        defaults: settings.Defaults,
    ) -> None:
        self._defaults = defaults
        self._house = house
        self._store = store
        self._clock = clock
        self._record = record
        self._actor = actor
        self._find_pool = find_pool
        self._find_template = find_template
        self._owner = owner
        self._claims: dict[str, Claim] = {}
        self._of_sandbox: dict[str, str] = {}
        self._coming: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ── asking ──────────────────────────────────────────────────────────────────────────────────

    async def claim(self, spec: stock.ClaimSpec) -> stock.ClaimInfo:
        begun = time.perf_counter()
        check(spec)
        if spec.name is None:
            return await self._claim(model.new_id(), spec, begun)
        while spec.name in self._coming:
            await self._coming[spec.name].wait()
        if (same := await self._same(spec)) is not None:
            return same
        self._coming[spec.name] = asyncio.Event()
        try:
            return await self._claim(spec.name, spec, begun)
        finally:
            self._coming.pop(spec.name).set()

    async def _same(self, spec: stock.ClaimSpec) -> stock.ClaimInfo | None:
        """The live claim of that name, if the body is the same; one that has finished makes way."""
        known = self._claims.get(spec.name or "")
        if known is None:
            return None
        if known.info.finished_at is not None:
            await self.release(known.info.name)
            return None
        if known.info.spec != spec:
            raise errors.error(
                "name_conflict",
                f"the name {spec.name!r} is taken by a claim that was asked for differently",
                hint="release it (cloche delete), or choose another name",
            )
        return known.info

    async def _claim(self, name: str, spec: stock.ClaimSpec, begun: float) -> stock.ClaimInfo:
        pool = self._find_pool(spec.pool)
        if pool is not None:
            version, base = pool.working
        else:
            template = await self._template(spec.pool)
            base, version = templates.as_sandbox(template.spec, self._defaults), template.version
        wanted = self._house.judge(_asked(base, spec))
        self._refuse_bound(spec)
        if pool is not None:
            pool.arrived()
        with await self._house.admit(_most(wanted.spec, spec)):
            made, cold_reason = await self._obtain(name, spec, pool, wanted, version)
            try:
                made.template_version = made.template_version or version
                info = self._bound(name, spec, made, cold_reason)
                if _durable(spec):
                    await asyncio.to_thread(self._store.put_claim, info, self._owner, "bound")
                await self._house.publish(made)
            except BaseException:
                await self._house.discard(made, "its claim could not be recorded")
                await self._undo(name, spec)
                raise
        self._remember(info)
        if pool is not None:
            pool.served((time.perf_counter() - begun) * 1000, warm=info.warm)
        self._record(
            events.Claimed(
                sandbox=made.id, time=info.created_at, actor=self._actor(), pool=pool.name if pool is not None else None,
                template=info.template, warm=info.warm, reason=cold_reason or "",
            )
        )  # fmt: skip
        return info

    async def _template(self, name: str) -> stock.TemplateInfo:
        try:
            return await self._find_template(name)
        except errors.NotFound as problem:
            raise errors.error(
                "pool_not_found",
                f"there is neither a pool nor a template {name!r}",
                hint=problem.hint,
                pool=name,
            ) from None

    def _refuse_bound(self, spec: stock.ClaimSpec) -> None:
        wanted = spec.requirements.sandbox
        if wanted is not None and self._house.known(wanted):
            raise errors.error(
                "sandbox_claimed", f"sandbox {wanted} is bound already; a sandbox serves one claim, once",
                hint="leave requirements.sandbox out, or name a member that `cloche pool info` lists",
            )  # fmt: skip

    # ── getting one ─────────────────────────────────────────────────────────────────────────────

    async def _obtain(
        self,
        name: str,
        spec: stock.ClaimSpec,
        pool: pools.Pool | None,
        wanted: sandboxes.Wanted,
        version: str,
    ) -> tuple[sandboxes.Sandbox, str | None]:
        """A bound sandbox, and why it is not a warm one."""
        if pool is None:
            reason = binding.NO_POOL.format(name=spec.pool)
            return await self._cold(name, spec, wanted, reason), reason
        reason = self._unbindable(spec, pool, wanted) or ""
        for _ in range(_TRIES):
            if reason:
                break
            found = pool.take(spec.requirements)
            if isinstance(found, str):
                reason = found
            elif await self._try(name, spec, found, wanted, version):
                return found, None
        if reason == binding.NO_MEMBER and spec.requirements == binding.NOTHING:
            later = await pool.next(spec.wait_s)
            if later is not None and await self._try(name, spec, later, wanted, version):
                return later, f"{reason}; it waited for one in the making"
        reason = reason or "members could not be bound"
        return await self._cold(name, spec, wanted, reason), reason

    def _unbindable(self, spec: stock.ClaimSpec, pool: pools.Pool, wanted: sandboxes.Wanted) -> str | None:
        base = pool.working.spec
        reason = binding.unbindable(base, _asked(base, spec))
        if reason is None and spec.policy:
            reason = binding.fixed_rules(self._house.judge(base).rules, wanted.rules)
        return reason

    async def _try(
        self,
        name: str,
        spec: stock.ClaimSpec,
        found: sandboxes.Sandbox,
        wanted: sandboxes.Wanted,
        version: str,
    ) -> bool:
        """Bind a member; False, and the member is gone, if it ended meanwhile or cannot take something on."""
        if found.template_version != version:
            wanted = self._house.judge(_asked(found.origin, spec))
        if binding.fixed_rules(found.rules, wanted.rules) is not None:
            await self._house.discard(found, "the policy has changed since it was made")
            return False
        try:
            await self._intend(name, spec, found)
            await self._house.bind(found, wanted, spec.files)
        except (errors.NotSupported, errors.SandboxLost):
            await self._house.discard(found, "it could not be bound")
            return False
        except BaseException:
            await self._house.discard(found, "it could not be bound")
            await self._undo(name, spec)
            raise
        return True

    async def _undo(self, name: str, spec: stock.ClaimSpec) -> None:
        if _durable(spec):
            await asyncio.to_thread(self._store.delete_claim, name)

    async def _cold(
        self, name: str, spec: stock.ClaimSpec, wanted: sandboxes.Wanted, reason: str
    ) -> sandboxes.Sandbox:
        wanted = wanted._replace(spec=self._demanded(spec, wanted.spec, reason))
        try:
            made = await asyncio.wait_for(self._house.build(wanted, ahead=False), spec.wait_s or None)
        except TimeoutError:
            raise errors.error(
                "wait_timeout", f"no sandbox could be had within {spec.wait_s:g} s ({reason})",
                hint="ask again, or with a longer wait_s",
            ) from None  # fmt: skip
        try:
            await self._intend(name, spec, made)
            await self._house.bind(made, wanted, spec.files)
        except BaseException:
            await self._house.discard(made, "it could not be bound")
            await self._undo(name, spec)
            raise
        return made

    def _demanded(self, spec: stock.ClaimSpec, wanted: model.SandboxSpec, reason: str) -> model.SandboxSpec:
        """The spec of a cold start that meets the requirements; those that no new one could meet are refused."""
        least = spec.requirements
        labelled = all(wanted.labels.get(key) == value for key, value in least.labels.items())
        if least.sandbox is not None or not labelled or least.template_version is not None:
            raise errors.error(
                "sandbox_not_found", f"{reason}, and a new one of {spec.pool!r} would not meet them either",
                hint=f"`cloche pool info {spec.pool}` lists its members",
            )  # fmt: skip
        wanted = _most(wanted, spec)
        if least.minimum_isolation is None:
            return wanted
        levels = (wanted.minimum_isolation, least.minimum_isolation)
        return msgspec.structs.replace(wanted, minimum_isolation=max(levels, key=model.LEVELS.index))

    async def _intend(self, name: str, spec: stock.ClaimSpec, made: sandboxes.Sandbox) -> None:
        if _durable(spec):
            info = self._bound(name, spec, made, None)
            await asyncio.to_thread(self._store.put_claim, info, self._owner, "binding")

    def _bound(
        self, name: str, spec: stock.ClaimSpec, made: sandboxes.Sandbox, cold_reason: str | None
    ) -> stock.ClaimInfo:
        now = self._clock.time()
        words = "Sandbox is ready"
        if made.startup:
            words += "; startup: " + "; ".join(made.startup)
        told = conditions.settle((binding.ready(words),), (), now)
        return stock.ClaimInfo(
            name=name, spec=spec, sandbox=made.id, warm=cold_reason is None, cold_reason=cold_reason,
            template=made.spec.template, template_version=made.template_version, created_at=now, bound_at=now, conditions=told,
        )  # fmt: skip

    # ── afterwards ──────────────────────────────────────────────────────────────────────────────

    def _remember(self, info: stock.ClaimInfo) -> None:
        claim = self._claims[info.name] = Claim(info)
        if info.sandbox is not None:
            self._of_sandbox[info.sandbox] = info.name
        self._schedule(claim)

    def _schedule(self, claim: Claim) -> None:
        if claim.timer is not None:
            claim.timer.cancel()
            claim.timer = None
        ends = binding.end(claim.info.spec, claim.info.finished_at)
        if ends is not None:
            delay = max(0.0, ends.at - self._clock.time())
            claim.timer = asyncio.get_running_loop().call_later(delay, self._expire, claim)

    def _expire(self, claim: Claim) -> None:
        self._spawn(self._expired(claim), f"expire {claim.info.name}")

    async def _expired(self, claim: Claim) -> None:
        info = claim.info
        remove = info.spec.shutdown_policy == "Delete"
        now = self._clock.time()
        claim.info = msgspec.structs.replace(
            info, sandbox=None, finished_at=info.finished_at or now,
            conditions=conditions.settle((*binding.expired(), *_kept(info)), info.conditions, now),
        )  # fmt: skip
        if info.sandbox is not None:
            self._of_sandbox.pop(info.sandbox, None)
            with suppress(errors.ClocheError):
                await self._house.end(info.sandbox, "its claim expired")
        if remove:
            await self.release(info.name)
        elif claim.durable:
            await asyncio.to_thread(self._store.put_claim, claim.info, self._owner, "ended")

    def ended(self, sandbox: str, how: binding.Ended, words: str) -> None:
        """The sandbox of a claim has ended. Deleting it is releasing the claim; otherwise the claim says what happened."""
        name = self._of_sandbox.pop(sandbox, None)
        claim = self._claims.get(name or "")
        if claim is None:
            return
        info = claim.info
        gone = how == "deleted" or (not claim.durable and info.spec.shutdown_policy == "Delete")
        if gone and info.spec.ttl_seconds_after_finished is None:
            self._spawn(self.release(info.name), f"release {info.name}")
            return
        now = self._clock.time()
        told = conditions.settle(binding.finished(how, words), info.conditions, now)
        claim.info = msgspec.structs.replace(info, sandbox=None, finished_at=now, conditions=told)
        self._schedule(claim)
        self._forget_old()
        if claim.durable:
            self._spawn(self._put_ended(claim.info), f"record {info.name}")

    async def _put_ended(self, info: stock.ClaimInfo) -> None:
        await asyncio.to_thread(self._store.put_claim, info, self._owner, "ended")

    def _forget_old(self) -> None:
        ended = [name for name, claim in self._claims.items() if claim.info.finished_at is not None]
        for name in ended[: max(0, len(ended) - _MOST_ENDED)]:
            del self._claims[name]

    async def info(self, name: str) -> stock.ClaimInfo:
        claim = self._claims.get(name) or self._claims.get(self._of_sandbox.get(name, ""))
        if claim is not None:
            return claim.info
        stored = await asyncio.to_thread(self._store.claim, name)
        if stored is None:
            raise errors.error(
                "claim_not_found",
                f"there is no claim {name!r}",
                hint="`cloche claim --list` shows what is there",
            )
        return stored

    async def list(self) -> list[stock.ClaimInfo]:
        stored = {info.name: info for info in await asyncio.to_thread(self._store.claims)}
        return list((stored | {name: claim.info for name, claim in self._claims.items()}).values())

    async def release(self, name: str) -> None:
        """End the claim and its sandbox."""
        info = await self.info(name)
        claim = self._claims.pop(info.name, None)
        if claim is not None and claim.timer is not None:
            claim.timer.cancel()
        if info.sandbox is not None:
            self._of_sandbox.pop(info.sandbox, None)
            with suppress(errors.ClocheError):
                await self._house.end(info.sandbox, "its claim was released")
        if _durable(info.spec):
            await asyncio.to_thread(self._store.delete_claim, info.name)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for claim in self._claims.values():
            if claim.timer is not None:
                claim.timer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _asked(base: model.SandboxSpec, spec: stock.ClaimSpec) -> model.SandboxSpec:
    """The template, with everything that the claim says."""
    said: dict[str, Any] = {
        "timeout_s": spec.timeout_s,
        "idle_timeout_s": spec.idle_timeout_s,
        "stay": spec.stay,
    }
    if spec.env:
        said["env"] = {**base.env, **spec.env}
    if spec.labels:
        said["labels"] = {**base.labels, **spec.labels}
    if spec.volumes:
        said["volumes"] = {**base.volumes, **spec.volumes}
    if spec.secrets:
        said["secrets"] = (*base.secrets, *spec.secrets)
    if spec.policy:
        said["policy"] = templates.overlaid(base.policy, spec.policy)
    if spec.resources:
        said["resources"] = _limited(base.resources, spec.resources)
    return msgspec.structs.replace(base, **said)


def _most(wanted: model.SandboxSpec, spec: stock.ClaimSpec) -> model.SandboxSpec:
    """With at least the resources that are required."""
    least = spec.requirements.resources
    if least is None:
        return wanted
    most = {field: max(getattr(wanted.resources, field), getattr(least, field)) for field in _LIMITS}
    return msgspec.structs.replace(wanted, resources=model.Resources(**most))


def _limited(base: model.Resources, said: dict[str, float]) -> model.Resources:
    for field in said:
        if field not in _LIMITS:
            raise errors.error(
                "field_unknown", f"there is no limit {field!r}",
                hint=errors.nearest(field, _LIMITS), field=field,
            )  # fmt: skip
    whole = {field: int(value) if float(value).is_integer() else value for field, value in said.items()}
    limited = msgspec.structs.replace(base, **whole)
    limited.check()
    return limited


def _kept(info: stock.ClaimInfo) -> tuple[stock.Condition, ...]:
    return tuple(condition for condition in info.conditions if condition.type == "Finished")
