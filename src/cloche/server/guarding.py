"""One check of who may do what to which sandbox, for every wire.

`guard(backend, principal)` is the backend as one caller sees it. Every method of `interfaces.Backend` has its scope in `SCOPES`; one
that is not listed there is refused, so a new method is closed until somebody has thought about it. A caller with a tenant sees that
tenant's sandboxes: what it names is looked up first, and another tenant's is `sandbox_not_found`, in the words for one that never was.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from cloche import errors, events, interfaces, model, policy, rpc
from cloche.server import hostpaths
from cloche.server.refusals import record_refusal

T = TypeVar("T")

SCOPES: dict[str, str] = dict(
    pair
    for scope, methods in {
        "sandboxes": "create info list delete extend suspend resume usage create_token get_policy update_policy check_policy explain_policy follow_asks answer_ask snapshot restore fork "
        "snapshots snapshot_info delete_snapshot diff_snapshots",
        "exec": "exec start attach wait write_stdin resize signal executions create_context contexts run_code run_code_stream "
        "interrupt_context restart_context delete_context fork_context",
        "ports": "dial ports link",
        "volumes": "create_volume volumes volume delete_volume",
        "files": "read_file read_file_stream write_file list_files stat_file move_file remove_file make_dir watch_files "
        "upload_tree download_tree diff apply workspace_report",
        "pools": "template templates pool pools wait_pool claim claim_info claims release_claim",
        "events": "events follow_events",
        "audit": "audit_lines verify_audit",
        "admin": "sweep allow_always put_template delete_template put_pool scale_pool delete_pool secrets set_secret remove_secret rotate_secrets_key images image pull_image build_image remove_image gc_images",
    }.items()
    for pair in ((method, scope) for method in methods.split())
)

_OPERATORS = frozenset(
    method for method, scope in SCOPES.items() if scope in ("admin", "audit", "pools", "volumes")
)
"""What concerns the whole machine, and no tenant: a pool's members are nobody's until they are claimed."""

BY_TOKEN = frozenset(
    {method for method, scope in SCOPES.items() if scope in ("exec", "files", "ports", "events")}
    - {"link", "apply", "diff", "workspace_report"}
    | {"info", "extend", "delete", "suspend", "resume", "usage", "get_policy"}
)
"""What a token for one sandbox may do in it, given the scope. It makes nothing that outlives it (tokens, links, snapshots, forks), changes nothing
that limits the sandbox, and takes nothing out into the host's workspace. `info` needs no scope: who holds it may know what it is for."""


class Principal(NamedTuple):
    """Who calls, as the rest of the house knows it."""

    name: str
    """A key's; of others with what they are before it: `jwt:alice`. No key has a colon in its name."""
    tenant: str
    scopes: frozenset[str]
    host_paths: bool = False
    """Whether every path of the server's host means something from this caller."""
    directories: tuple[str, ...] = ()
    """Beneath which it may name them otherwise."""
    expires_at: float | None = None
    """When it is nobody any more."""
    sandbox: str | None = None
    """The one that there is, for this caller."""
    payer: str = ""
    """Whose rate it takes from, if not its own."""

    @property
    def actor(self) -> str:
        """As the journal and the audit log name this caller."""
        who = self.name if ":" in self.name else f"key:{self.name}"
        return f"{who}@{self.tenant}" if self.tenant else who

    @property
    def known_as(self) -> str:
        """What tells this caller from all others: who has no key may go by one name in several tenants."""
        return self.actor if ":" in self.name else self.name

    @property
    def account(self) -> str:
        """Whose rate its requests count for."""
        return self.payer or self.known_as

    def may(self, scope: str) -> bool:
        return "*" in self.scopes or scope in self.scopes

    def require(self, scope: str) -> None:
        if not self.may(scope):
            raise errors.error(
                "scope_missing",
                f"{'the key ' if ':' not in self.name else ''}{self.name!r} lacks the scope {scope!r}",
                hint=f"`cloche key create NAME --scope {scope}`, or a token with it",
                scope=scope,
            )


def _signature(method: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature` of a bound method; it is asked for with every call, and takes longer than most checks."""
    function = getattr(method, "__func__", None)
    return inspect.signature(method) if function is None else _bound_signature(function)


@functools.lru_cache(maxsize=1024)
def _bound_signature(function: Callable[..., Any]) -> inspect.Signature:
    whole = inspect.signature(function)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def guard(backend: interfaces.Backend, principal: Principal) -> interfaces.Backend:
    return cast(interfaces.Backend, Guarded(backend, principal))


class Guarded:
    """Answers `interfaces.Backend` by asking first; see `__getattr__`."""

    def __init__(self, backend: interfaces.Backend, principal: Principal) -> None:
        self.where = backend.where
        self._backend = backend
        self._principal = principal
        self._trace = events.trace.get()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = rpc.methods().get(name)
        if method is None:
            raise AttributeError(name)
        signature = _signature(getattr(self._backend, name))

        def call(*positional: Any, **named: Any) -> Any:
            given = dict(signature.bind(*positional, **named).arguments)
            return Opening(self._open(name, given)) if method.streams else self._ask(name, given)

        return call

    async def aclose(self) -> None:
        """The engine is not this caller's to close."""

    async def _ask(self, name: str, given: dict[str, Any]) -> Any:
        await self._admit(name, given)
        result = await getattr(self._backend, name)(**given)
        if name == "create":
            await self._check_opened(given["spec"], result)
        if name == "list" and self._principal.tenant:
            return [info for info in result if info.tenant == self._principal.tenant]
        if name == "snapshots" and self._principal.tenant:
            return [info for info in result if info.spec.tenant == self._principal.tenant]
        return result

    async def _open(self, name: str, given: dict[str, Any]) -> AsyncIterator[Any]:
        await self._admit(name, given)
        found: AsyncIterator[Any] = getattr(self._backend, name)(**given)
        return found

    async def _admit(self, name: str, given: dict[str, Any]) -> None:
        """Check, in the caller's name; what is turned down here is on record like what the engine turns down."""
        events.caller.set(self._principal.actor)
        events.trace.set(self._trace)
        try:
            await self._check(name, given)
        except errors.ClocheError as problem:
            about = given.get("sandbox")
            record_refusal(self._backend, name, about if isinstance(about, str) else None, problem)
            raise

    async def _check(self, name: str, given: dict[str, Any]) -> None:
        """Refuse, or bring the arguments into the shape in which they may pass."""
        caller = self._principal
        if caller.sandbox is not None:
            await self._check_token(caller.sandbox, name, given)
        else:
            caller.require(SCOPES.get(name, "admin"))
        if name == "create_token":
            for scope in given["scopes"]:
                caller.require(scope)
        if "spec" in given:
            given["spec"] = await self._place(given["spec"])
        if name in ("pull_image", "build_image") and not caller.host_paths:
            _refuse_host_images(given)
        if isinstance(given.get("spec"), model.SandboxSpec):
            given["spec"] = self._own(given["spec"])
        if not caller.tenant:
            return
        if "spec" in given and isinstance(given["spec"], model.SandboxSpec) and given["spec"].snapshot:
            found = await self._find_snapshot(given["spec"].snapshot)
            given["spec"] = msgspec.structs.replace(given["spec"], snapshot=found)
        for argument in ("snapshot", "other"):
            if given.get(argument) is not None:
                given[argument] = await self._find_snapshot(given[argument])
        named = given.get("sandbox")
        if name in _OPERATORS or (SCOPES.get(name) == "events" and named is None):
            raise errors.error(
                "scope_missing", f"{name} is the operator's", hint="use a key without a tenant", scope="admin"
            )
        if named is not None:
            given["sandbox"] = await self._find(named)

    async def _check_token(self, own: str, name: str, given: dict[str, Any]) -> None:
        """One sandbox, and a few verbs."""
        named = given.get("sandbox")
        if name not in BY_TOKEN or named is None:
            raise errors.error(
                "scope_missing",
                f"{name} is not for a token that is for one sandbox",
                hint="use an API key",
                scope=SCOPES.get(name, "admin"),
            )
        if name != "info":
            self._principal.require(SCOPES[name])
        if named != own and (await self._find(named)) != own:
            raise _missing(named)
        given["sandbox"] = own

    async def _find(self, named: str) -> str:
        tenant = self._principal.tenant
        for known_as in (named, f"{tenant}/{named}"):
            try:
                info = await self._backend.info(known_as)
            except errors.NotFound:
                continue
            except errors.SandboxLost as lost:
                if getattr(lost, "_tenant", tenant) != tenant:
                    continue
                raise
            if info.tenant == tenant:
                return info.id
        raise _missing(named)

    async def _find_snapshot(self, named: str) -> str:
        tenant = self._principal.tenant
        for known_as in (named, f"{tenant}/{named}"):
            try:
                info = await self._backend.snapshot_info(known_as)
            except errors.NotFound:
                continue
            if info.spec.tenant == tenant:
                return info.id
        raise errors.error(
            "snapshot_not_found",
            f"there is no snapshot {named!r}",
            hint="`cloche snapshot list` shows what is there",
        )

    def _own(self, spec: model.SandboxSpec) -> model.SandboxSpec:
        if self._principal.tenant and spec.secrets:
            raise errors.error(
                "secret_not_found",
                f"there is no secret {spec.secrets[0]!r}",  # those that are stored are the operator's
                hint="secrets are used with a key without a tenant",
            )
        if self._principal.tenant and spec.volumes:
            raise errors.error(
                "volume_not_found",
                "volumes are the operator's, and none of them is this caller's",
                hint="use a key without a tenant",
            )
        return msgspec.structs.replace(spec, tenant=self._principal.tenant)

    async def _place(self, spec: Any) -> Any:
        """What is asked for, be it a sandbox, a template or a claim, names no path of the server's host but those that this caller may."""
        if self._principal.host_paths:
            return spec
        if policy.names_directories(getattr(spec, "policy", {})):
            raise _host_path(
                "policy",
                "files.read and files.write name directories of the server's host, which this caller may not",
                "upload files instead, or have the operator name them in the server's own policy file",
            )
        allowed = self._principal.directories
        said: dict[str, Any] = {}
        if getattr(spec, "workspace", None) is not None:
            said["workspace"] = await asyncio.to_thread(hostpaths.place, spec.workspace, allowed)
            if said["workspace"] is None:
                raise hostpaths.refused(
                    "workspace", "a workspace is a directory", "upload files instead, or use the unix socket"
                )
        image = getattr(spec, "image", None)
        if image is not None and model.names_host_path(image):
            said["image"] = await asyncio.to_thread(hostpaths.image, image, allowed)
            if said["image"] is None:
                raise hostpaths.refused(
                    "image",
                    f"the image {image!r} is a path",
                    "name an image of a registry, or one by its digest",
                )
        if getattr(spec, "path", None) is not None or "workspace" in said:
            said["path"] = hostpaths.PATH
        return msgspec.structs.replace(spec, **said) if said else spec

    async def _check_opened(self, asked: Any, made: Any) -> None:
        """The directory that was opened is the one that was judged, or nobody gets the sandbox."""
        place = getattr(asked, "workspace", None)
        if place is None or self._principal.host_paths or not hostpaths.opened_elsewhere(made, place):
            return
        await self._backend.delete(made.id)
        problem = hostpaths.refused("workspace", "what was opened is a directory", "ask again")
        record_refusal(self._backend, "create", made.id, problem)
        raise problem


def _missing(named: str) -> errors.ClocheError:
    return errors.error(
        "sandbox_not_found", f"there is no sandbox {named!r}", hint="`cloche list` shows what is there"
    )


def _refuse_host_images(given: dict[str, Any]) -> None:
    """What an image is made of comes from a registry, not from the server's host."""
    recipe = given.get("recipe")
    base = recipe.get("from") if isinstance(recipe, dict) else None
    for reference in (given.get("reference"), base):
        if isinstance(reference, str) and model.names_host_path(reference):
            raise _host_path(
                "reference",
                f"the image {reference!r} is a path of the server's host, which this caller may not name",
                "name an image of a registry, or one by its digest",
            )
    if "recipe" in given and not isinstance(recipe, dict):
        raise errors.error(
            "recipe_invalid", "over the network a recipe is data, not text", hint="send it as JSON"
        )
    steps = recipe.get("steps") if isinstance(recipe, dict) else None
    copies = isinstance(steps, list) and any(isinstance(step, dict) and "copy" in step for step in steps)
    if given.get("directory") or copies:
        raise _host_path(
            "directory",
            "a recipe's copies are of the server's host, which this caller may not name",
            "build it where the files are, or fetch them in a `run` step",
        )


def _host_path(field: str, message: str, hint: str) -> errors.ClocheError:
    return errors.error("host_path_refused", message, hint=hint, field=field)


interfaces.Backend.register(Guarded)


class Opening(AsyncIterator[Any]):
    """A stream that is opened by its first step, or before it by `opened`, so that a refusal can still be an answer."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncIterator[Any]]) -> None:
        self._opening: Coroutine[Any, Any, AsyncIterator[Any]] | None = opening
        self._items: AsyncIterator[Any] | None = None

    async def open(self) -> AsyncIterator[Any]:
        if self._items is None:
            assert self._opening is not None
            opening, self._opening = self._opening, None
            self._items = await opening
        return self._items

    async def __anext__(self) -> Any:
        return await anext(await self.open())

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.close()
        close = getattr(self._items, "aclose", None)
        if close is not None:
            await close()


async def opened(stream: AsyncIterator[T]) -> AsyncIterator[T]:
    """The stream, which has passed its checks; raises what they refuse."""
    return await stream.open() if isinstance(stream, Opening) else stream
