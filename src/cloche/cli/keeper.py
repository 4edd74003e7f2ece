"""The keeper's process: `python -m cloche.cli.keeper [SHAPE] [tell]`, started by `starting`.

It leaves its caller's session, takes the state's lock (a second one exits quietly), listens, makes a sandbox of the
shape that was used last, and stays until nobody needs it. What it has to say goes to `keeper.log`, which is cut when a
keeper starts. The lock file names the holder's pid; it is never removed, because a removed name locks nobody out.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import os
import sys
import time
from typing import Any

from cloche import errors, rpc, settings, wiring
from cloche.cli import starting
from cloche.server import keeper

_LOG_LIMIT = 256 << 10
_LOCK_PATIENCE_S = 5.0
_LOCK_STEP_S = 0.02
_FAREWELL_S = 15.0


def main() -> None:
    words = sys.argv[1:]
    tell = starting.READY_FD if "tell" in words else -1
    try:
        code = _main(words[0] if words else "", tell)
    except errors.ClocheError as problem:
        _tell(tell, "error\n" + json.dumps(problem.to_dict()))
        code = 125
    sys.exit(code)


def _main(shape: str, tell: int) -> int:
    _leave_the_caller()
    config = settings.load(os.environ)
    path = config.socket_path
    settings.make_home(config.home)
    lock = take_lock(config.home, patience_s=_LOCK_PATIENCE_S)
    if lock < 0:
        _tell(tell, "locked\n")
        return 0
    _open_log(os.path.join(config.home, "keeper.log"))
    asyncio.run(_serve(config, path, shape, tell, lock))
    os.close(lock)
    return 0


def _leave_the_caller() -> None:
    try:
        os.setsid()
    except OSError:
        pass  # a group leader already: started by hand from a shell
    os.chdir("/")
    os.umask(0o022)  # what is made for a sandbox must be readable in it, whatever the caller prefers


def take_lock(home: str, *, patience_s: float = 0.0) -> int:
    """The state's exclusive lock as a descriptor, or -1. A keeper that is leaving is waited for a moment."""
    lock = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Who answers at the socket is not leaving: there is nothing to wait for.
            if time.monotonic() >= deadline or os.path.exists(os.path.join(home, "cloche.sock")):
                os.close(lock)
                return -1
            time.sleep(_LOCK_STEP_S)
            continue
        os.ftruncate(lock, 0)
        sign_lock(lock, "")
        return lock


def sign_lock(lock: int, address: str) -> None:
    """Who holds it, and where that one answers; for people. The lock itself is the kernel's."""
    os.pwrite(lock, f"{os.getpid()}\n{address}\n".encode(), 0)


def holder(home: str) -> str:
    """Who holds the lock, in words."""
    try:
        with open(os.path.join(home, "lock")) as file:
            pid, address = file.read(4096).split("\n")[:2]
        return f"another server or keeper (pid {int(pid)}" + (f", {address})" if address else ")")
    except (OSError, ValueError):
        return "another server or keeper"


def _open_log(path: str) -> None:
    """Standard error is the log. Errors are few; a keeper that has many is bounded by its own life."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if os.path.exists(path) and os.path.getsize(path) > _LOG_LIMIT:
        os.replace(path, path + ".1")
    log = os.open(path, flags, 0o600)
    os.dup2(log, 2)
    os.close(log)


async def _serve(config: settings.Settings, path: str, shape: str, tell: int, lock: int) -> None:
    engine = wiring.make_engine(os.environ, where=f"unix:{path}", warm=True)
    kept = keeper.Keeper(engine, engine, idle_exit_s=config.keeper.idle_exit_s, defaults=config.defaults)
    asyncio.get_running_loop().set_exception_handler(Complaints())
    await host(engine, config)
    serving = asyncio.ensure_future(kept.serve(path))
    await asyncio.sleep(0)  # it listens now, or has failed
    if not serving.done():
        sign_lock(lock, path)
        _tell(tell, "ready\n")
        _warm_up(engine, shape, config.defaults)
    gc.freeze()  # what was imported stays; the collector need not look at it again
    try:
        await serving
    finally:
        asyncio.get_running_loop().call_later(_FAREWELL_S, os._exit, 1)


def _warm_up(engine: Any, shape: str, defaults: settings.Defaults) -> None:
    """Have a sandbox ready before the next command asks. A shape that cannot be made is its asker's to hear about."""
    if shape:
        try:
            engine.warm_up(rpc.complete(json.loads(shape), defaults))
        except (errors.ClocheError, ValueError):
            pass


async def host(engine: Any, config: settings.Settings) -> None:
    """Begin to fill the pools that were made to stay; without a state file there are none. What is wrong with them is told
    to whoever asks for one, and keeps nobody else from being served."""
    if os.path.exists(config.state_path):  # noqa: ASYNC240 - a look, before anybody is served
        try:
            await engine.host()
        except errors.ClocheError as problem:
            sys.stderr.write(f"the pools were not filled: {problem}\n")


class Complaints:
    """asyncio's exception handler: the log is bounded, so only the first hundred are written."""

    def __init__(self, most: int = 100) -> None:
        self._left = most

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._left > 0:
            self._left -= 1
            loop.default_exception_handler(context)


def _tell(fd: int, text: str) -> None:
    if fd >= 0:
        try:
            os.write(fd, text.encode())
            os.close(fd)
        except OSError:
            pass  # whoever started us has gone


if __name__ == "__main__":
    main()
