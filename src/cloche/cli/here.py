"""An engine in this process, behind the keeper's own frames.

The caller gets one end of a socket pair; the other is served from a thread with an event loop, which imports the engine
while the caller already listens. So whatever speaks to a keeper speaks to this too, and there is one implementation
of both sides. The launcher is started first: it gets ready on another core while we import.
"""

import os
import socket
import threading

from cloche.drivers import spawning


class Here:
    """`sock` is the client's end. Closing it ends every sandbox made through it; `join` waits for that."""

    def __init__(self) -> None:
        self._launch = spawning.start()
        self.sock, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            import asyncio

            asyncio.run(self._main())
        except BaseException as problem:
            # The caller waits at the other end: whatever went wrong, it must be told, and then left.
            self._fail(problem)
        finally:
            self._far.close()

    def _fail(self, problem: BaseException) -> None:
        from cloche import errors, framing
        from cloche.cli import thin

        if not isinstance(problem, errors.ClocheError):
            problem = errors.error("internal_error", f"{type(problem).__name__}: {problem}")
        body = thin.encode({**problem.to_dict(), "details": {}}).encode()
        try:
            self._far.setblocking(True)
            self._far.sendall(framing.pack(framing.ERROR, thin.CHANNEL, body))
        except OSError:
            pass

    async def _main(self) -> None:
        from cloche import settings, wiring
        from cloche.server import keeper

        config = settings.load(os.environ)
        await keeper.serve_pair(
            self._far, lambda: wiring.make_engine(os.environ, launch=self._launch), config.defaults
        )

    def join(self) -> None:
        self.sock.close()
        self._thread.join()
