"""Starting a keeper: detached, with a clean environment, and at most one per state directory.

`behind` leaves one starting and does not look back; `needed` waits until it answers. The child tells how it went over
a pipe: `ready`, `locked` (another process holds the state; then that one is waited for), or an error. Standard library
only, and cheap: the first `cloche run` of a session ends with this.
"""

import os
import sys
import time

from cloche import errors
from cloche.cli import thin

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any

READY_FD = 3
_PASSED_ON = ("HOME", "PATH", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER", "LOGNAME", "CLOCHE_SECRETS_KEY")
_PATIENCE_S = 20.0
_STEP_S = 0.01
_SHAPE = ("profile", "mode", "template", "image", "driver", "minimum_isolation", "resources")

_PROGRAM = "import sys; sys.path[:] = {path!r}; from cloche.cli.keeper import main; main()"


def behind(home: str, options: "thin.Options") -> None:
    """Leave a keeper starting, with a sandbox of this shape to come."""
    shape = {key: options.spec[key] for key in _SHAPE if key in options.spec}
    if options.resources:
        shape["resources"] = options.resources
    try:
        _spawn(home, thin.encode(shape), -1)
    except OSError:
        pass  # the command is done; the next one tries again


def needed(home: str) -> "_socket.socket":
    """A connection to a keeper that was started for it."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        _spawn(home, "", writing)
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read(65536).decode("utf-8", "replace")
    word, _, rest = said.partition("\n")
    if word == "error":
        import json

        raise errors.from_dict(json.loads(rest))
    return _await(home + "/cloche.sock", word)


def _await(path: str, word: str) -> "_socket.socket":
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        sock = thin.connect(path)
        if sock is not None:
            return sock
        if word not in ("ready", "locked") or time.monotonic() > deadline:
            raise errors.error(
                "server_unavailable", "the keeper did not start" + ("" if word else " and did not say why"),
                hint=f"look at {os.path.dirname(path)}/keeper.log",
            )  # fmt: skip
        time.sleep(_STEP_S)


def _spawn(home: str, shape: str, ready: int) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    here = os.getcwd()
    # What we import it must import too, from wherever it was installed; but never from the directory we stand in.
    path = [root, *(entry for entry in sys.path if entry[:1] == "/" and entry not in (root, here))]
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    if ready == READY_FD:
        os.set_inheritable(ready, True)  # dup2 onto itself keeps close-on-exec
    elif ready >= 0:
        actions.append((os.POSIX_SPAWN_DUP2, ready, READY_FD))
    environment = {name: os.environ[name] for name in os.environ if name in _PASSED_ON or name[:4] == "XDG_"}
    environment["CLOCHE_HOME"] = home
    program = _PROGRAM.format(path=path)
    argv = [sys.executable, "-I", "-c", program, shape, "tell" if ready >= 0 else "quiet"]
    os.posix_spawn(sys.executable, argv, environment, file_actions=actions)
