"""The product on a page: which parts there are, and how they meet."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from cloche import engine, events, interfaces, model, policy, settings, store
from cloche.drivers import namespaces, spawning
from cloche.guest import interpreter, shells
from cloche.linux import processes

if TYPE_CHECKING:
    from cloche.measures import Measures

# What few commands use is imported when it is used: the first `cloche run` pays for every line that is loaded here.


def drivers(
    home: str, launch: spawning.Launch | None = None, embryos: int = 2
) -> list[tuple[str, Callable[[], interfaces.Driver]]]:
    """Strongest first."""
    return [
        ("namespaces", lambda: namespaces.NamespacesDriver(home, launch=launch, embryos=embryos)),
        ("bubblewrap", lambda: _bubblewrap(home)),
        ("process", lambda: _process(home)),
    ]


def _bubblewrap(home: str) -> interfaces.Driver:
    from cloche.drivers import bubblewrap

    return bubblewrap.BubblewrapDriver(home)


def _process(home: str) -> interfaces.Driver:
    from cloche.drivers import process

    return process.ProcessDriver(home)


class Workspaces(interfaces.Workspaces):
    """`workspaces.LocalWorkspaces`, made at the first use."""

    def __init__(self, home: str, environment: Mapping[str, str]) -> None:
        self._home = home
        self._environment = environment

    def open(
        self, directory: str, *, rules: policy.Merged, sandbox_id: str, overlay: bool, path: str | None = None
    ) -> interfaces.Workspace:
        return self._local().open(directory, rules=rules, sandbox_id=sandbox_id, overlay=overlay, path=path)

    def show(self, *, rules: policy.Merged) -> interfaces.Workspace:
        return self._local().show(rules=rules)

    def sweep(self) -> list[str]:
        try:
            left = os.listdir(os.path.join(self._home, "workspaces"))
        except OSError:
            return []
        return self._local().sweep() if left else []

    def _local(self) -> interfaces.Workspaces:
        from cloche import workspaces

        return workspaces.LocalWorkspaces(self._home, self._environment)


def egress(config: settings.Settings) -> interfaces.Egress:
    """Made at the first sandbox that has a network."""
    from cloche.egress import outlet

    return outlet.LocalEgress(parent=config.network.parent_proxy, authorities=config.network.authorities)


class Images(interfaces.ImageSource):
    """`images.source.LocalImages`, made at the first use."""

    def __init__(self, config: settings.Settings, environment: Mapping[str, str]) -> None:
        self._config = config
        self._environment = environment

    async def resolve(
        self, reference: str, progress: interfaces.Progress | None = None, *, fresh: bool = False
    ) -> interfaces.Image:
        return await self._local.resolve(reference, progress, fresh=fresh)

    async def build(
        self,
        recipe: dict[str, Any] | str,
        directory: str,
        runner: interfaces.Runner,
        progress: interfaces.Progress,
    ) -> interfaces.Image:
        return await self._local.build(recipe, directory, runner, progress)

    def images(self) -> list[model.ImageInfo]:
        return self._local.images()

    def find(self, reference: str) -> model.ImageInfo:
        return self._local.find(reference)

    def remove(self, reference: str) -> model.ImageInfo:
        return self._local.remove(reference)

    def collect(self) -> list[model.ImageInfo]:
        return self._local.collect()

    @cached_property
    def _local(self) -> interfaces.ImageSource:
        from cloche.images import source

        return source.LocalImages(self._config.home, self._config.images, self._environment)


def _webhook(url: str | None) -> Callable[[model.Question], Awaitable[tuple[model.Answer, str]]] | None:
    async def ask(question: model.Question) -> tuple[model.Answer, str]:
        from cloche.egress import webhook

        return await webhook.ask(str(url), question)

    return ask if url else None


def secrets(config: settings.Settings) -> interfaces.Secrets:
    """Made when somebody stores, lists or grants one."""
    from cloche import secrets as kept

    return kept.LocalSecrets(config.home, key_file=config.secrets.key_file, key=config.secrets_key)


def interpreters() -> dict[str, interfaces.Interpreter]:
    return {
        "python": interfaces.Interpreter(interpreter.command(), cache(interpreter.open_source), frames=True),
        "bash": interfaces.Interpreter(shells.command(), None, frames=False),
    }


def owner() -> str:
    """This process, told apart from a later one with the same pid."""
    return f"{os.getpid()}:{processes.start_time(os.getpid())}"


def _audit(config: settings.Settings, who: str, *, once: bool) -> interfaces.Audit | None:
    """An engine that goes at once leaves the signing, which needs a slow import, to one that stays."""
    if not config.audit.enabled:
        return None
    from cloche.audit import writing

    return writing.Log(config.home, config.audit, who, seal_later=once)


def record(environment: Mapping[str, str], event: events.AnyEvent) -> str | None:
    """Put one act on record that is done without an engine, before it is done; why it could not be, if that may be."""
    config = settings.load(environment)
    settings.make_home(config.home)
    problem = None
    log = _audit(config, owner(), once=True)
    if log is not None:
        event = log.masked(event)
        log.append(event)
        log.flush()
        log.check()
        log.close()
        problem = log.problem
    kept = store.Store(config.state_path)
    kept.record([event])
    kept.close()
    return problem


def make_engine(
    environment: Mapping[str, str],
    *,
    where: str = "in process",
    warm: bool = False,
    once: bool = False,
    launch: spawning.Launch | None = None,
    config: settings.Settings | None = None,
    measures: Measures | None = None,
) -> engine.Engine:
    """An engine on this machine's state directory. Must be called in the event loop that it will live in.

    `warm` keeps a sandbox waiting for the next caller; `once` is for an engine that will make one sandbox and go.
    """
    config = config or settings.load(environment)
    settings.make_home(config.home)
    who = owner()
    return engine.Engine(
        config,
        store.Store(config.state_path),
        drivers(config.home, launch, embryos=0 if once else 2),
        owner=who,
        interpreters=interpreters(),
        workspaces=Workspaces(config.home, environment),
        egress=lambda: egress(config),
        remember=lambda rule: settings.allow_always(rule, environment),
        webhook=_webhook(config.network.ask_url),
        images=Images(config, environment),
        secrets=lambda: secrets(config),
        policies=settings.PolicyFiles(config, environment),
        where=where,
        audit=_audit(config, who, once=once),
        measures=measures,
        warm=config.keeper.warm_sandboxes if warm else 0,
    )
