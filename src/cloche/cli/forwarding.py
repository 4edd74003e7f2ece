"""`cloche forward`: ports of a sandbox on this machine's loopback, until it is told to stop or the sandbox ends."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from cloche import errors, interfaces, model, settings, wiring
from cloche.cli import talk
from cloche.sdk import connecting, forwarding

_LOOK_S = 2.0
_GONE = ("sandbox_lost", "sandbox_expired", "sandbox_not_found")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    add("sandbox", metavar="ID", help="its id or name")
    add(
        "ports",
        metavar="PORT[:LOCAL]",
        nargs="+",
        help="a port inside, and the local one (a free one if left out)",
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    wanted = [_pair(word) for word in chosen.ports]
    return asyncio.run(_forward(chosen.sandbox, wanted, as_json=chosen.json))


def _pair(word: str) -> tuple[int, int]:
    inside, _, local = word.partition(":")
    if not inside.isdecimal() or not (local or "0").isdecimal():
        raise errors.error(
            "argument_invalid", f"{word!r} is not PORT or PORT:LOCAL", hint="`cloche forward ID 8000:8080`"
        )
    model.check_port(int(inside))
    return int(inside), int(local or "0")


async def _forward(sandbox: str, wanted: list[tuple[int, int]], *, as_json: bool) -> int:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    config = settings.load(os.environ)
    async with AsyncExitStack() as stack:
        backend = await connecting.find(config.url, config, lambda: wiring.make_engine(os.environ))
        stack.push_async_callback(backend.aclose)
        found = await backend.info(sandbox)
        ending = asyncio.get_running_loop().create_future()
        for inside, local in wanted:
            made = forwarding.Forwarding(backend, found.id, inside, on_problem=_teller(inside, ending))
            await made.listen(local)
            stack.push_async_callback(made.aclose)
            _say(found.id, inside, made.local_port, as_json=as_json)
        watching = asyncio.ensure_future(_watch(backend, found.id, ending))
        stack.callback(watching.cancel)
        stopped = asyncio.ensure_future(told.wait())
        stack.callback(stopped.cancel)
        await asyncio.wait((stopped, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            raise ending.result()
    return 0


def _say(sandbox: str, inside: int, local: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sandbox": sandbox, "port": inside, "address": f"127.0.0.1:{local}"}), flush=True)
    talk.say(f"127.0.0.1:{local} is port {inside} of {sandbox}")


def _teller(inside: int, ending: asyncio.Future[errors.ClocheError]) -> Callable[[errors.ClocheError], None]:
    def tell(problem: errors.ClocheError) -> None:
        if problem.code in _GONE:
            _end(ending, problem)
        elif problem.code != "connection_lost":  # which either end does at will
            talk.warning(f"port {inside}: {problem.message}")

    return tell


async def _watch(
    backend: interfaces.Backend, sandbox: str, ending: asyncio.Future[errors.ClocheError]
) -> None:
    """Look whether the sandbox is still there; a look neither wakes it nor keeps it from ending."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            await backend.info(sandbox)
        except errors.ClocheError as problem:
            if problem.code == "scope_missing":
                return
            _end(ending, problem)
            return


def _end(ending: asyncio.Future[errors.ClocheError], problem: errors.ClocheError) -> None:
    with suppress(asyncio.InvalidStateError):
        ending.set_result(problem)
