"""An engine in this process, behind the keeper's own frames.

The caller gets one end of a socket pair; the other is served from a thread with an event loop, which imports the engine
while the caller already listens. So whatever speaks to a keeper speaks to this too, and there is one implementation
of both sides. The launcher is started first: it makes the sandbox on another core while we import.
"""

import _socket
import _thread
import gc
import importlib
import os
import sys

from cloche.cli import thin
from cloche.drivers import spawning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Here:
    """`sock` is the client's end. Closing it ends every sandbox made through it; `join` waits for that."""

    def __init__(self, *, once: bool = True) -> None:
        """`once`: for one sandbox, which is begun at once."""
        self._launch = spawning.start() if once else None
        self.sock, self._far = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        self._done = _thread.allocate_lock()
        self._done.acquire()
        _thread.start_new_thread(self._serve, ())

    def _serve(self) -> None:
        try:
            gc.disable()  # nothing that is imported is garbage, and looking for it takes a twelfth of the time
            launch = _begin(self._launch) if self._launch is not None else None
            asyncio = _import_asyncio()
            asyncio.run(self._main(launch))
        except BaseException as problem:
            # The caller waits at the other end: whatever went wrong, it must be told, and then left.
            self._fail(problem)
        finally:
            self._far.close()
            self._done.release()

    async def _main(self, launch: "spawning.Launch | None") -> None:
        import socket

        with _hidden(
            "typing_extensions"
        ):  # what msgspec takes from it is in `typing`; it would bring `inspect`
            from cloche import settings, wiring
            from cloche.server import keeper

        gc.freeze()
        gc.enable()
        config = settings.load(os.environ)
        far = socket.socket(fileno=os.dup(self._far.fileno()))
        await keeper.serve_pair(
            far,
            lambda: wiring.make_engine(os.environ, launch=launch, once=launch is not None),
            config.defaults,
        )

    def _fail(self, problem: BaseException) -> None:
        from cloche import errors, framing

        if not isinstance(problem, errors.ClocheError):
            problem = errors.error("internal_error", f"{type(problem).__name__}: {problem}")
        body = thin.encode({**problem.to_dict(), "details": {}}).encode()
        try:
            self._far.setblocking(True)
            self._far.sendall(framing.pack(framing.ERROR, thin.CHANNEL, body))
        except OSError:
            pass

    def join(self) -> None:
        self.sock.close()
        self._done.acquire()
        self._done.release()


def _begin(launch: spawning.Launch) -> spawning.Launch:
    """Let the launcher begin with the sandbox, if the thin client can say where the state is."""
    from cloche.drivers import beginning

    path = None if os.environ.get("CLOCHE_URL") else thin.socket_path()
    return beginning.begin(launch, os.path.dirname(path)) if path else launch


def run(options: "thin.Options") -> int:
    """One command in an engine that ends with it; a keeper is left starting behind, if that is allowed."""
    engine = Here()
    session = thin.Session(engine.sock, options)
    session.run()
    engine.join()
    code = thin.conclude(session)
    if session.result:
        _leave_keeper(options)
    return code


def _leave_keeper(options: "thin.Options") -> None:
    from cloche import errors, settings
    from cloche.cli import starting

    try:
        config = settings.load(os.environ)
        if config.keeper.start and config.socket_path:
            starting.behind(config.home, options)
    except errors.ClocheError:
        pass  # the path is too long for a socket: without a keeper, then


def _import_asyncio() -> "Any":
    """asyncio (and what msgspec will want), without what they name at import and a run does not use.

    It imports ssl where that is there: as costly as a sandbox, and nothing of ours speaks TLS in here. The others serve
    debugging, errors and child processes; they are loaded when somebody looks into them, and are then as ever.
    """
    _import_later("inspect")
    _import_later("linecache")
    _import_later("msgspec.inspect")
    _import_later("platform", system=lambda: os.uname().sysname)
    _import_later("subprocess", PIPE=-1, STDOUT=-2, DEVNULL=-3)
    _import_later("traceback", extract_stack=_extract_stack)
    _import_later("logging", getLogger=_Logger, StreamHandler=_nothing)
    with _hidden("ssl"):
        import asyncio
    return asyncio


class _hidden:
    """A module that cannot be imported for a while, for those who can do without."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._modules: dict[str, Any] = sys.modules
        self._acts = name not in sys.modules

    def __enter__(self) -> None:
        if self._acts:
            self._modules[self._name] = None

    def __exit__(self, *_: object) -> None:
        if self._acts:
            del self._modules[self._name]


class _Logger:
    """`logging.getLogger(name)`, which becomes real when it has something to say."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, *_: object) -> None:
        """Nobody asked for it: who wants debugging imports `logging` first."""

    addHandler = debug

    def __getattr__(self, attribute: str) -> "Any":
        import logging

        return getattr(logging.Logger.manager.getLogger(self._name), attribute)


def _nothing() -> None:
    """For a handler that nobody will use."""


def _extract_stack(frame: "Any" = None, limit: "int | None" = None) -> "Any":
    """`traceback.extract_stack`, which asyncio's C part takes hold of when it is imported."""
    import traceback

    stack = traceback.StackSummary.extract(traceback.walk_stack(frame or sys._getframe(1)), limit=limit)
    stack.reverse()
    return stack


def _import_later(name: str, **known: "Any") -> None:
    """A module that becomes `name` at the first look into it. `known` are what others take from it while they are imported.

    (importlib's own lazy loader loads at the first `import` statement on 3.11.)
    """
    if name in sys.modules:
        return
    later: Any = type(sys)(name)

    def load(attribute: str) -> "Any":
        if attribute[:2] == "__":
            raise AttributeError(attribute)  # the import system looks, and need not be answered
        if sys.modules.get(name) is later:
            del sys.modules[name]
        real = importlib.import_module(name)
        later.__dict__.update(real.__dict__)
        return getattr(real, attribute)

    later.__dict__.update(known)
    later.__getattr__ = load
    sys.modules[name] = later
