"""The verbs' way to a server: calls and streams over the keeper's frames, in plain data.

No asyncio and no schema here: what is printed is what the server said. `reach` finds the server as CONTRACT orders it:
`CLOCHE_URL`, else the keeper's socket, else a keeper that is started for it, or an engine in this process.
"""

import json
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from cloche import __version__, errors, framing
from cloche.cli import talk, thin

_CHUNK = 1 << 18


class Client:
    """One connection, one call at a time."""

    def __init__(self, sock: Any, engine: Any = None) -> None:
        self.sock = sock
        self._engine = engine
        self._channel = thin.CHANNEL - 1
        self._reader = framing.Reader()
        self._frames: list[tuple[int, int, bytes]] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """With an engine of our own: ends it, and what was made in it."""
        self.sock.close()
        if self._engine is not None:
            self._engine.join()

    def call(self, method: str, **arguments: Any) -> Any:
        """The answer of one method."""
        for kind, body in self._exchange(method, arguments):
            if kind == framing.RESULT:
                return json.loads(body)
        raise AssertionError("the exchange ends with a result or raises")

    def stream(self, method: str, **arguments: Any) -> Iterator[Any]:
        """The items of one method, as they come."""
        for kind, body in self._exchange(method, arguments):
            if kind == framing.END:
                return
            yield json.loads(body)

    def _exchange(self, method: str, arguments: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
        self._channel += 1
        try:
            self.sock.sendall(thin.call(method, arguments, self._channel))
            while True:
                for kind, channel, body in self._receive():
                    if channel != self._channel:
                        continue
                    if kind == framing.ERROR:
                        raise errors.from_dict(json.loads(body))
                    yield kind, body
        except OSError as problem:
            raise errors.error(
                "connection_lost", f"the connection to the server broke: {problem.strerror}"
            ) from None

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        data = self.sock.recv(_CHUNK)
        if not data:
            raise errors.error(
                "connection_lost",
                "the server ended the connection",
                hint="its sandboxes are gone with it; create anew",
            )
        yield from self._reader.feed(data)


# ── finding a server ───────────────────────────────────────────────────────────────────────────────


def path() -> str:
    """Where the server listens; raises with the cause where no path can be had."""
    found = thin.socket_path()
    if found is not None:
        return found
    from cloche import settings

    config = settings.load(os.environ)
    return config.socket_path


def running() -> Client | None:
    """The server that answers and is of our version, if there is one. One that is not is told to leave."""
    url = os.environ.get("CLOCHE_URL", "")
    if url.startswith(("http://", "https://")):
        from cloche.cli import far

        return _greeted(
            Client(
                far.connect(
                    url, os.environ.get("CLOCHE_API_KEY") or None, os.environ.get("CLOCHE_CA_FILE") or None
                )
            )
        )
    address = path()
    sock = thin.connect(address)
    if sock is None:
        if os.environ.get("CLOCHE_URL"):
            raise errors.error(
                "server_unavailable", f"nothing answers at {address}",
                hint="start it, or unset CLOCHE_URL to run locally",
            )  # fmt: skip
        return None
    return _greeted(Client(sock))


def _greeted(client: Client) -> Client | None:
    try:
        found = client.call("hello")
    except errors.ServerUnavailable:
        client.close()
        if os.environ.get("CLOCHE_URL"):
            raise  # a server that was named is never passed over
        return None
    if (found.get("protocol"), found.get("version")) == (framing.PROTOCOL, __version__):
        return client
    _part_from(client, found)
    return None


def _part_from(client: Client, found: dict[str, Any]) -> None:
    """A server of another version: it stops if nobody needs it, else we work without it and say so."""
    theirs = f"version {found.get('version')}, protocol {found.get('protocol')}"
    if os.environ.get("CLOCHE_URL"):
        raise errors.error(
            "server_version_mismatch", f"the server is of {theirs}; this is version {__version__}",
            hint="use the server's version, or unset CLOCHE_URL to run locally",
        )  # fmt: skip
    try:
        stopped = client.call("stop").get("stopped")
    except errors.ClocheError:
        stopped = True  # it closed the connection while leaving
    client.close()
    if not stopped:
        talk.warning(
            f"the keeper (pid {found.get('pid')}) is of {theirs} and has {found.get('live')} live sandboxes; "
            "working without it"
        )


def reach() -> Client:
    """A running server, else an engine in this process that ends with the client."""
    found = running()
    if found is not None:
        return found
    from cloche.cli import here

    engine = here.Here(once=False)
    return Client(engine.sock, engine)


def reach_keeper() -> Client:
    """A server that outlives this command, started if it must be."""
    found = running()
    if found is not None:
        return found
    from cloche.cli import starting

    _need_linux()
    return Client(starting.needed(home()))


def home() -> str:
    """The state directory, made if it is not there."""
    from cloche import settings

    config = settings.load(os.environ)
    settings.make_home(config.home)
    return config.home


def _need_linux() -> None:
    if sys.platform != "linux":
        raise errors.error(
            "linux_only", f"sandboxes run on Linux only, and this is {sys.platform}",
            hint="point CLOCHE_URL at a Cloche server",
        )  # fmt: skip
