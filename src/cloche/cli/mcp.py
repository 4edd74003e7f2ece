"""`cloche mcp`: the tools for a coding agent, on standard input and output.

The client starts it and owns its end: when its input closes, the sandboxes that it made end. Standard output belongs to the
protocol alone, so all talk goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from cloche import interfaces, model, settings, wiring
from cloche.mcp import tools
from cloche.sdk import connecting


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    add("--workspace", metavar="DIR", help="a directory that every sandbox shows, at its own path")
    add("--overlay", action="store_true", help="changes to the workspace stay in the sandbox")
    add("--config", metavar="FILE", help="a settings file to use instead of your own")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    config = settings.load(os.environ, file=chosen.config)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="cloche: %(message)s")
    base = model.SandboxSpec(overlay=chosen.overlay)
    if chosen.workspace is not None:
        base = model.SandboxSpec(
            workspace=os.path.abspath(chosen.workspace), overlay=chosen.overlay, path=os.environ.get("PATH")
        )
    asyncio.run(_serve(config, base))
    return 0


async def _serve(config: settings.Settings, base: model.SandboxSpec) -> None:
    from cloche.mcp import serving  # the protocol's SDK: only here

    backend = await connecting.find(config.url, config, lambda: _engine(config, base))
    try:
        await serving.serve_stdio(backend, config, base)
    finally:
        await backend.aclose()


def _engine(config: settings.Settings, base: model.SandboxSpec) -> interfaces.Backend:
    """One of our own, which makes the first sandbox while the client still says hello."""
    made = wiring.make_engine(os.environ, warm=True, config=config)
    made.warm_up(tools.Calls(made, config, "", base).usual())
    return made
