"""An engine's stock: its templates, pools and claims together, made when the first of them is needed.

A one-shot command needs none of it and does not load it. What stays (`PoolSpec.stay`) is filled again by the next engine that
*hosts*: the keeper and the server do; an engine in somebody's process serves its own pools only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from cloche import errors, events, interfaces, model, settings, stock
from cloche.engine import claims, pools, sandboxes, templates
from cloche.lifecycle import claims as binding
from cloche.lifecycle import pools as planning


class Stock:
    def __init__(
        self,
        house: claims.House,
        store: interfaces.Store,
        clock: interfaces.Clock,
        record: Callable[[events.AnyEvent], None],
        actor: Callable[[], str],
        owner: str,
        defaults: settings.Defaults,
        guesses: int = 0,
    ) -> None:
        self._house = house
        self._store = store
        self._defaults = defaults
        self._clock = clock
        self._record = record
        self._actor = actor
        self._pools: dict[str, pools.Pool] = {}
        self._changing = asyncio.Lock()
        self.guesses = pools.Guesses(guesses, self._make, house.discard, clock)
        self.templates = templates.Templates(
            store, clock, record, actor, self._template_changed, self._pools_of
        )
        self.claims = claims.Claims(
            house, store, clock, record, actor, self._pools.get, self.templates.get, owner, defaults
        )

    @property
    def held(self) -> int:
        """Sandboxes that wait."""
        return self.guesses.held + sum(pool.held for pool in self._pools.values())

    @property
    def staying(self) -> int:
        return sum(1 for pool in self._pools.values() if pool.spec.stay)

    async def _make(self, spec: model.SandboxSpec) -> sandboxes.Sandbox:
        return await self._house.build(self._house.judge(spec), ahead=True)

    def take(self, wanted: sandboxes.Wanted) -> sandboxes.Sandbox | None:
        """A member of the pool that has the name of the wanted sandbox's template, if it can take on all that is wanted."""
        pool = self._pools.get(wanted.spec.template)
        if pool is None or pool.spec.template != wanted.spec.template:
            return None
        found = pool.take(binding.NOTHING, lambda member: _fits(member, wanted))
        if found == binding.NO_MEMBER or isinstance(found, sandboxes.Sandbox):
            pool.arrived()
        return found if isinstance(found, sandboxes.Sandbox) else None

    def served(self, template: str, ms: float) -> None:
        """A member of the pool of that name became a sandbox that was created."""
        pool = self._pools.get(template)
        if pool is not None:
            pool.served(ms, warm=True)

    # ── pools ───────────────────────────────────────────────────────────────────────────────────

    def _pools_of(self, template: str) -> list[str]:
        return [name for name, pool in self._pools.items() if pool.spec.template == template]

    def _template_changed(self, info: stock.TemplateInfo) -> None:
        for name in self._pools_of(info.spec.name):
            pool = self._pools[name]
            pool.update(pool.spec, self._version(info))

    def _version(self, info: stock.TemplateInfo) -> pools.Version:
        return pools.Version(info.version, templates.as_sandbox(info.spec, self._defaults))

    async def load(self) -> None:
        """Fill the pools that stay. One whose template is gone is left out, and says so when it is asked for."""
        for info in await asyncio.to_thread(self._store.pools):
            if info.name in self._pools:
                continue
            try:
                version = self._version(await self.templates.get(info.spec.template))
            except errors.NotFound:
                continue
            self._open(info.name, info.spec, version).generation = info.generation

    def _open(self, name: str, spec: stock.PoolSpec, version: pools.Version) -> pools.Pool:
        made = pools.Pool(name, spec, version, self._make, self._house.discard, self._clock)
        self._pools[name] = made
        made.look()
        return made

    def _pool(self, name: str) -> pools.Pool:
        try:
            return self._pools[name]
        except KeyError:
            raise errors.error(
                "pool_not_found",
                f"there is no pool {name!r} here",
                hint=errors.nearest(name, self._pools),
                pool=name,
            ) from None

    async def put_pool(self, spec: stock.PoolSpec, if_generation: int | None) -> stock.PoolInfo:
        """Make a pool, or the same again; with the generation that it has, change it."""
        planning.check(spec)
        name = spec.name or spec.template
        spec = msgspec.structs.replace(spec, name=name)
        async with self._changing:
            version = self._version(await self.templates.get(spec.template))
            known = self._pools.get(name)
            if known is not None and (known.spec == spec or if_generation is not None):
                return await self._change(known, spec, version, if_generation)
            if known is not None:
                raise errors.error(
                    "name_conflict", f"the name {name!r} is taken by a pool that was asked for differently",
                    hint="scale or delete it, choose another name, or give the generation that you saw",
                )  # fmt: skip
            if if_generation is not None:
                raise _version_conflict(name, if_generation, 0)
            info = stock.PoolInfo(
                name=name, spec=spec, generation=1, template_version=version.id, size=spec.size, ready=0
            )
            if spec.stay:
                await asyncio.to_thread(self._store.put_pool, info)
            self._note(spec, name, "created")
            return self._open(name, spec, version).info()

    async def _change(
        self, pool: pools.Pool, spec: stock.PoolSpec, version: pools.Version, if_generation: int | None
    ) -> stock.PoolInfo:
        if if_generation is not None and if_generation != pool.generation:
            raise _version_conflict(pool.name, if_generation, pool.generation)
        if spec != pool.spec:
            if spec.stay or pool.spec.stay:
                changed = msgspec.structs.replace(pool.info(), spec=spec, generation=pool.generation + 1)
                await asyncio.to_thread(self._store.put_pool, changed)
            pool.generation += 1
            pool.update(spec, version)
            self._note(spec, pool.name, "updated")
        return pool.info()

    async def scale_pool(self, name: str, size: int, if_generation: int | None) -> stock.PoolInfo:
        pool = self._pool(name)
        spec = msgspec.structs.replace(pool.spec, size=size)
        planning.check(spec)
        return await self.put_pool(spec, pool.generation if if_generation is None else if_generation)

    def pool_info(self, name: str) -> stock.PoolInfo:
        return self._pool(name).info()

    def pools(self) -> list[stock.PoolInfo]:
        return [pool.info() for pool in self._pools.values()]

    async def wait_pool(self, name: str, ready: int | None, timeout_s: float) -> stock.PoolInfo:
        model.check_seconds("timeout_s", timeout_s)
        return await self._pool(name).wait_ready(ready, timeout_s)

    async def delete_pool(self, name: str, if_generation: int | None = None) -> None:
        async with self._changing:
            pool = self._pool(name)
            if if_generation is not None and if_generation != pool.generation:
                raise _version_conflict(name, if_generation, pool.generation)
            if pool.spec.stay:
                await asyncio.to_thread(self._store.delete_pool, name)
            del self._pools[name]
            self._note(pool.spec, name, "deleted")
        await pool.close()

    def _note(self, spec: stock.PoolSpec, name: str, change: events.Change) -> None:
        self._record(
            events.PoolChanged(
                sandbox=None, time=self._clock.time(), actor=self._actor(), name=name, change=change,
                template=spec.template, size=spec.size,
            )
        )  # fmt: skip

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), self.guesses.close())
        await self.claims.close()


def _fits(member: sandboxes.Sandbox, wanted: sandboxes.Wanted) -> bool:
    return (
        binding.unbindable(member.spec, wanted.spec) is None
        and binding.fixed_rules(member.rules, wanted.rules) is None
    )


def _version_conflict(name: str, wanted: int, found: int) -> errors.ClocheError:
    return errors.error(
        "version_conflict", f"the pool {name!r} has generation {found or 'none'}, not {wanted}",
        hint="look at it again, and put your change on top", found=found,
    )  # fmt: skip
