"""Templates: named, versioned starting points; what a spec takes from one.

A template's version is its content, so putting the same body twice changes nothing. `settle` lays what a caller said over
its template: fields that the spec lists in `inherit` are the template's *where it says something* (a field that it leaves
at its default stays what the settings made it); env, labels, volumes and policy are laid over each other; the image is the
template's unless the spec names one.

Built-in templates cannot be replaced. Of other templates the store is the truth, because several engines share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from cloche import errors, events, interfaces, model, policy, settings, stock

BUILTIN: dict[str, stock.TemplateSpec] = {
    made.name: made
    for made in (
        stock.TemplateSpec(
            name="base", description="this machine's own programs, read-only; works offline, needs no image"
        ),
        stock.TemplateSpec(
            name="python",
            description="base, with a Python context that runs before it is asked for",
            contexts=("python",),
        ),
        stock.TemplateSpec(
            name="node",
            description="base, with what node and npm expect: more memory and processes, and a cache that is thrown away",
            resources=model.Resources(memory_mib=1024, pids=512),
            env={
                "NODE_ENV": "development",
                "npm_config_cache": "/tmp/.npm",
                "npm_config_update_notifier": "false",
            },
        ),
    )
}
_NO_CHOICE = settings.Defaults()
_DEFAULT = stock.TemplateSpec(name="")
# What a sandbox has in common with its template, field by field.
INHERITED = tuple(
    field
    for field in stock.TemplateSpec.__struct_fields__
    if field in model.SandboxSpec.__struct_fields__
    and field not in ("name", "env", "labels", "volumes", "policy", "image")
)
EVERYTHING = (*INHERITED, *(f"resources.{part}" for part in model.Resources.__struct_fields__))


def check(spec: stock.TemplateSpec) -> None:
    """Say what is wrong with a template before it is stored."""
    model.check_name(spec.name)
    try:
        as_sandbox(spec).check()
        policy.parse(spec.policy, base=policy.profile(spec.profile))
    except errors.ClocheError as problem:
        raise errors.error(
            problem.code,
            f"the template {spec.name!r}: {problem.message}",
            hint=problem.hint,
            **problem.details,
        ) from None
    for port in spec.ports:
        if not 0 < port < 65536:
            raise errors.error("template_invalid", f"port {port} is not between 1 and 65535", field="ports")
    for module in spec.preload:
        if not all(part.isidentifier() for part in module.split(".")):
            raise errors.error("template_invalid", f"{module!r} is not a module's name", field="preload")
    if spec.preload and "python" not in spec.contexts:
        raise errors.error(
            "template_invalid", "preload imports into the Python context, which contexts does not list",
            hint="contexts: [python]", field="preload",
        )  # fmt: skip


def as_sandbox(template: stock.TemplateSpec, defaults: settings.Defaults = _NO_CHOICE) -> model.SandboxSpec:
    """A sandbox of which nothing was said but its template."""
    bare = model.SandboxSpec(
        template=template.name, profile=defaults.profile, minimum_isolation=defaults.minimum_isolation,
        resources=defaults.resources, timeout_s=defaults.timeout_s, idle_timeout_s=defaults.idle_timeout_s,
        inherit=EVERYTHING,
    )  # fmt: skip
    return msgspec.structs.replace(settle(bare, template), inherit=())


def settle(spec: model.SandboxSpec, template: stock.TemplateSpec) -> model.SandboxSpec:
    """The spec with everything that it leaves to its template."""
    taken: dict[str, Any] = {}
    for field in spec.inherit:
        group, _, part = field.partition(".")
        if group == "resources" and part:
            if getattr(template.resources, part) != getattr(_DEFAULT.resources, part):
                base = taken.get("resources", spec.resources)
                value = getattr(template.resources, part)
                taken["resources"] = msgspec.structs.replace(base, **{part: value})
        elif (
            field in INHERITED
            and field != "resources"
            and getattr(template, field) != getattr(_DEFAULT, field)
        ):
            taken[field] = getattr(template, field)
    if spec.image is None and template.image != "host":
        taken["image"] = template.image
    taken["env"] = {**template.env, **spec.env}
    taken["labels"] = {**template.labels, **spec.labels}
    taken["volumes"] = {**template.volumes, **spec.volumes}
    taken["policy"] = overlaid(template.policy, spec.policy)
    return msgspec.structs.replace(spec, **taken)


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """One policy's groups laid over another's; `policy.parse` says what is wrong with either."""
    merged = {group: dict(fields) if isinstance(fields, dict) else fields for group, fields in below.items()}
    for group, fields in above.items():
        if isinstance(fields, dict) and isinstance(merged.get(group), dict):
            merged[group] |= fields
        else:
            merged[group] = fields
    return merged


class Templates:
    def __init__(
        self,
        store: interfaces.Store,
        clock: interfaces.Clock,
        record: Callable[[events.AnyEvent], None],
        actor: Callable[[], str],
        changed: Callable[[stock.TemplateInfo], None],
        users: Callable[[str], list[str]],
    ) -> None:
        """`changed` is told of every new version; `users` names the pools of a template."""
        self._store = store
        self._clock = clock
        self._record = record
        self._actor = actor
        self._changed = changed
        self._users = users

    async def get(self, name: str) -> stock.TemplateInfo:
        if name in BUILTIN:
            return _builtin(name)
        found = await asyncio.to_thread(self._store.template, name)
        if found is None:
            raise errors.error(
                "template_not_found",
                f"there is no template {name!r}",
                hint=errors.nearest(name, [info.spec.name for info in await self.list()]),
                template=name,
            )
        return found

    async def list(self) -> list[stock.TemplateInfo]:
        stored = await asyncio.to_thread(self._store.templates)
        return [*map(_builtin, BUILTIN), *stored]

    async def put(
        self, spec: stock.TemplateSpec, if_version: str | None, warnings: tuple[str, ...]
    ) -> stock.TemplateInfo:
        check(spec)
        if spec.name in BUILTIN:
            raise errors.error(
                "name_conflict", f"the template {spec.name!r} is built in", hint="choose another name"
            )
        found = await asyncio.to_thread(self._store.template, spec.name)
        _match(spec.name, if_version, found.version if found is not None else "")
        info = stock.TemplateInfo(
            spec=spec, version=spec.version, created_at=self._clock.time(), warnings=warnings
        )
        if found is not None and (found.version, found.spec) == (info.version, spec):
            return found
        await asyncio.to_thread(self._store.put_template, info, if_version)
        self._note(spec.name, "created" if found is None else "replaced", info.version)
        self._changed(info)
        return info

    async def delete(self, name: str, if_version: str | None = None) -> None:
        if name in BUILTIN:
            raise errors.error("template_in_use", f"the template {name!r} is built in and stays")
        found = await self.get(name)
        if pools := self._users(name):
            raise errors.error(
                "template_in_use", f"the template {name!r} is used by the pool {pools[0]!r}",
                hint=f"delete the pool first: cloche pool delete {pools[0]}", pools=pools,
            )  # fmt: skip
        await asyncio.to_thread(self._store.delete_template, name, if_version)
        self._note(name, "deleted", found.version)

    def _note(self, name: str, change: events.Change, version: str) -> None:
        self._record(
            events.TemplateChanged(
                sandbox=None,
                time=self._clock.time(),
                actor=self._actor(),
                name=name,
                change=change,
                version=version,
            )
        )


@cache
def _builtin(name: str) -> stock.TemplateInfo:
    spec = BUILTIN[name]
    return stock.TemplateInfo(spec=spec, version=spec.version, created_at=0, builtin=True)


def _match(name: str, wanted: str | None, found: str) -> None:
    if wanted is not None and wanted != found:
        raise errors.error(
            "version_conflict",
            f"the template {name!r} has version {found or 'none'}, not {wanted}",
            hint="look at it again, and put your change on top",
            found=found,
        )
