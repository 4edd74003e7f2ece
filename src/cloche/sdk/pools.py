"""The asynchronous handles of what waits: templates and pools. `sync_pools.py` is generated from this file.

A pool's handle is a backend and a name; `claim` answers with a sandbox's handle, which is used like any other.
"""

from __future__ import annotations

import os
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from cloche import errors, interfaces, model, settings, stock
from cloche.policy import Policy
from cloche.sdk import connecting, portal
from cloche.sdk.sandboxes import AsyncSandbox, Handle, Timeout


class Template:
    """A named, versioned starting point. `Template("data", contexts=["python"], preload=["json"])`, or `Template.load`.

    The arguments are the fields of a template (docs/concepts/templates.md). It is stored when a pool is made of it, or by
    `put_template`.
    """

    def __init__(self, name: str, **fields: Any) -> None:
        self.spec = _template_spec({"name": name, **fields})
        self.warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str) -> Template:
        """From a YAML file: a template of ours, or a Kubernetes `SandboxTemplate` manifest as it is."""
        from cloche.compat import kubernetes

        made = cls.__new__(cls)
        made.spec, made.warnings = kubernetes.load_template(path)
        return made

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def version(self) -> str:
        """The hash of its content."""
        return self.spec.version

    def __repr__(self) -> str:
        return f"<Template {self.name} {self.version}>"


def _template_spec(fields: dict[str, Any]) -> stock.TemplateSpec:
    try:
        return msgspec.convert(fields, stock.TemplateSpec)
    except msgspec.ValidationError as problem:
        code = "field_unknown" if "unknown field" in str(problem) else "template_invalid"
        raise errors.error(code, f"the template is not valid: {problem}") from None


class PoolOptions(TypedDict, total=False):
    """The constructor's arguments but the template."""

    size: int | None
    min: int
    max: int | None
    name: str | None
    preset: str | None
    update: stock.Update
    max_surge: int
    max_unavailable: int
    refill_per_s: float | None
    ready_grace_s: float
    scale_to_zero_after_s: float | None
    stay: bool
    server: str | None


class AsyncPool(Handle):
    """Sandboxes kept warm. `await AsyncPool.create("base", size=4)`, or `async with AsyncPool(...) as pool`, which deletes it.

    `size` is how many unclaimed ready ones are wanted; with `max`, it follows the observed rate of claims between `min`
    and `max`. A pool that does not `stay` ends with this process.
    """

    def __init__(
        self,
        template: str | Template,
        *,
        size: int | None = None,
        min: int = 0,
        max: int | None = None,
        name: str | None = None,
        preset: str | None = None,
        update: stock.Update = "OnReplenish",
        max_surge: int = 1,
        max_unavailable: int = 0,
        refill_per_s: float | None = None,
        ready_grace_s: float = 300,
        scale_to_zero_after_s: float | None = None,
        stay: bool = False,
        server: str | None = None,
    ) -> None:
        self._template = template if isinstance(template, Template) else None
        said: dict[str, Any] = {
            "template": template.name if isinstance(template, Template) else template,
            "name": name,
            "size": size,
            "min": min,
            "max": max,
            "update": update,
            "max_surge": max_surge,
            "max_unavailable": max_unavailable,
            "refill_per_s": refill_per_s,
            "ready_grace_s": ready_grace_s,
            "scale_to_zero_after_s": scale_to_zero_after_s,
            "stay": stay,
        }
        if preset is not None:
            said = _preset(preset, said)
        if said["size"] is None:
            said["size"] = 1
        self._spec = _pool_spec(said)
        self._server = server

    @classmethod
    async def create(cls, template: str | Template, **options: Unpack[PoolOptions]) -> AsyncPool:
        """A pool that fills itself from now on; the arguments are the constructor's."""
        return await cls(template, **options)._open()

    @classmethod
    async def get(cls, name: str, *, server: str | None = None) -> AsyncPool:
        """A handle of a pool that exists."""
        home = portal.get()
        backend, info = await portal.bridge(_find(name, server, home), home)
        handle = cls.__new__(cls)
        Handle.__init__(handle, backend, home, info.name)
        return handle

    async def _open(self) -> AsyncPool:
        home = portal.get()
        backend, info = await portal.bridge(_put(self._template, self._spec, self._server, home), home)
        Handle.__init__(self, backend, home, info.name)
        return self

    async def __aenter__(self) -> AsyncPool:
        if not hasattr(self, "_id"):
            await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.delete()
        except errors.NotFound:
            return  # somebody else did

    def _shown(self) -> str:
        return getattr(self, "_id", "not created")

    @property
    def name(self) -> str:
        """Its name, good for `get` from anywhere that reaches the same server."""
        return self._id

    async def info(self) -> stock.PoolInfo:
        """How many are wanted, ready and in the making; hits, misses, and how long claims took."""
        return await self._do(self._backend.pool(self._id))

    async def wait_ready(self, ready: int | None = None, *, timeout_s: float = 60) -> stock.PoolInfo:
        """Wait until so many are ready (None: as many as are wanted)."""
        return await self._do(self._backend.wait_pool(self._id, ready, timeout_s))

    async def scale(self, size: int) -> stock.PoolInfo:
        """Another size from now on."""
        return await self._do(self._backend.scale_pool(self._id, size))

    async def claim(
        self,
        name: str | None = None,
        *,
        env: dict[str, str] | None = None,
        files: dict[str, str | bytes] | None = None,
        secrets: list[str] | None = None,
        allow: list[str] | None = None,
        deny: list[str] | None = None,
        policy: Policy | None = None,
        volumes: dict[str, str | model.Mount] | None = None,
        labels: dict[str, str] | None = None,
        memory_mib: int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        requirements: stock.Requirements | None = None,
        timeout_s: Timeout = "default",
        idle_timeout_s: float | None = None,
        wait_s: float = 10,
        shutdown_time: float | None = None,
        ttl_seconds_after_finished: int | None = None,
        shutdown_policy: Literal["Delete", "Retain"] = "Delete",
        stay: bool = False,
    ) -> AsyncSandbox:
        """One sandbox of the pool, for you alone, with everything that you say bound to it.

        It is warm unless `box.claim.cold_reason` says why not. Deleting it releases the claim. The same `name` and body give
        the same sandbox; another body is `name_conflict`.
        """
        network = {"mode": "rules", "allow": allow or [], "deny": deny or []}
        rules = msgspec.to_builtins(policy) if policy is not None else {}
        said: dict[str, Any] = {
            "name": name,
            "pool": self._id,
            "env": env,
            "files": {path: _bytes(data) for path, data in (files or {}).items()},
            "secrets": secrets,
            "policy": {**rules, "network": network} if allow or deny else rules,
            "volumes": {path: _mount(what) for path, what in (volumes or {}).items()},
            "labels": labels,
            "resources": _given({"memory_mib": memory_mib, "cpus": cpus, "pids": pids}),
            "requirements": requirements,
            "timeout_s": timeout_s,
            "wait_s": wait_s,
            "shutdown_policy": shutdown_policy,
            "stay": stay,
        }
        spec = _claim_spec(
            {
                **_given(said),
                "timeout_s": timeout_s,
                "idle_timeout_s": idle_timeout_s,
                "shutdown_time": shutdown_time,
                "ttl_seconds_after_finished": ttl_seconds_after_finished,
            }
        )
        made = await self._do(self._backend.claim(spec))
        return AsyncSandbox._claimed(self._backend, self._home, made)

    async def delete(self) -> None:
        """End the pool and what waits in it; what was claimed lives on."""
        await self._do(self._backend.delete_pool(self._id))

    @classmethod
    async def list(cls, *, server: str | None = None) -> list[stock.PoolInfo]:
        """The pools of the server, or of this process."""
        home = portal.get()
        return await portal.bridge(_list(server, home), home)


async def put_template(template: Template, *, server: str | None = None) -> stock.TemplateInfo:
    """Store a template; the same content again changes nothing."""
    home = portal.get()
    return await portal.bridge(_put_template(template, server, home), home)


# ── what was said, as nouns ────────────────────────────────────────────────────────────────────────


def _given(said: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in said.items() if value is not None}


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


def _mount(what: str | model.Mount) -> model.Mount:
    """A volume's name, read-only with `:ro` after it, or a `Mount`."""
    if isinstance(what, model.Mount):
        return what
    return model.Mount(volume=what.removesuffix(":ro"), read_only=what.endswith(":ro"))


def _claim_spec(said: dict[str, Any]) -> stock.ClaimSpec:
    if said["timeout_s"] == "default":
        said["timeout_s"] = settings.load(os.environ).defaults.timeout_s
    try:
        return msgspec.convert(said, stock.ClaimSpec)
    except msgspec.ValidationError as problem:
        raise errors.error("argument_invalid", f"the claim is not valid: {problem}") from None


def _pool_spec(said: dict[str, Any]) -> stock.PoolSpec:
    try:
        return msgspec.convert(said, stock.PoolSpec)
    except msgspec.ValidationError as problem:
        raise errors.error("pool_invalid", f"the pool is not valid: {problem}") from None


def _preset(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """What a kind of agent needs, where nothing else was said."""
    from cloche.lifecycle import prewarming

    found = prewarming.preset(name)
    most = found.max if said["max"] is None else said["max"]
    return {
        **said,
        "size": found.size if said["size"] is None else said["size"],
        "max": most,
        "scale_to_zero_after_s": said["scale_to_zero_after_s"]
        or (None if said["min"] else found.scale_to_zero_after_s),
    }


# ── in the portal's loop ───────────────────────────────────────────────────────────────────────────


async def _put(
    template: Template | None, spec: stock.PoolSpec, server: str | None, home: portal.Portal
) -> tuple[interfaces.Backend, stock.PoolInfo]:
    backend = await connecting.connect(server, home)
    if template is not None:
        await backend.put_template(template.spec, None, template.warnings)
    return backend, await backend.put_pool(spec)


async def _put_template(template: Template, server: str | None, home: portal.Portal) -> stock.TemplateInfo:
    backend = await connecting.connect(server, home)
    return await backend.put_template(template.spec, None, template.warnings)


async def _find(
    name: str, server: str | None, home: portal.Portal
) -> tuple[interfaces.Backend, stock.PoolInfo]:
    backend = await connecting.connect(server, home)
    return backend, await backend.pool(name)


async def _list(server: str | None, home: portal.Portal) -> list[stock.PoolInfo]:
    return await (await connecting.connect(server, home)).pools()
