"""The product on a page: which parts there are, and how they meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache

from cloche import engine, interfaces, settings, store, workspaces
from cloche.drivers import bubblewrap, namespaces, process, spawning
from cloche.guest import interpreter, shells
from cloche.linux import processes


def drivers(home: str, launch: spawning.Launch | None = None) -> list[tuple[str, Callable[[], interfaces.Driver]]]:
    """Strongest first."""
    return [
        ("namespaces", lambda: namespaces.NamespacesDriver(home, launch=launch)),
        ("bubblewrap", lambda: bubblewrap.BubblewrapDriver(home)),
        ("process", lambda: process.ProcessDriver(home)),
    ]


def interpreters() -> dict[str, interfaces.Interpreter]:
    return {
        "python": interfaces.Interpreter(interpreter.command(), cache(interpreter.open_source), frames=True),
        "bash": interfaces.Interpreter(shells.command(), None, frames=False),
    }


def owner() -> str:
    """This process, told apart from a later one with the same pid."""
    return f"{os.getpid()}:{processes.start_time(os.getpid())}"


def make_engine(
    environment: Mapping[str, str], *, where: str = "in process", warm: bool = False, launch: spawning.Launch | None = None
) -> engine.Engine:
    """An engine on this machine's state directory. Must be called in the event loop that it will live in."""
    config = settings.load(environment)
    settings.make_home(config.home)
    return engine.Engine(
        config,
        store.Store(config.state_path),
        drivers(config.home, launch),
        owner=owner(),
        interpreters=interpreters(),
        workspaces=workspaces.LocalWorkspaces(config.home, environment),
        where=where,
        warm=config.keeper.warm_sandboxes if warm else 0,
    )
