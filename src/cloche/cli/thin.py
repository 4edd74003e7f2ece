"""The console entry, and the whole of `cloche run` and `cloche exec` when a keeper listens.

Its time is the product's: a Python start plus this file. So: no argparse (a scan that gives up on whatever it does not
know, and `main` says what was wrong), no json (a writer for what we send; of the answer only the code is looked at), the
C modules `_socket` and `_signal` (their Python faces import enum and selectors), `select.poll`, and `os._exit`.
tests/cli/test_thin.py holds the list of modules that must not be loaded.

    connect → CALL run → [stdin → INPUT, signals → CONTROL] ⇄ [STDOUT → 1, STDERR → 2, TAKEN] → RESULT → exit code

Standard input is not touched before the server has started the command: until then we may still turn to an engine in
this process, and the input must not be lost on the way.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import os
import select
import sys

from cloche import __version__, framing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CHANNEL = 1
OUR_FAILURE = 125
_CHUNK = 1 << 18
_PATIENCE = 1 << 20  # bytes a command may still write after its reader has gone
_DETACH = b"\x10\x11"  # ctrl-p ctrl-q
_FORWARDED = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)


# ── arguments ──────────────────────────────────────────────────────────────────────────────────────


class Options:
    """What `run` or `exec` was asked for: the call's arguments, and how to show it."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}
        self.resources: dict[str, Any] = {}
        self.request: dict[str, Any] = {"env": {}}
        self.sandbox: str | None = None
        self.execution: str | None = None
        self.after = 0
        self.tty = self.json = self.keep = self.detachable = False

    def arguments(self) -> "dict[str, Any]":
        made: dict[str, Any] = {"capture": self.json, "request": self.request}
        if self.sandbox is not None:
            made.update(sandbox=self.sandbox, execution=self.execution, after=self.after)
            if self.execution is not None:
                del made["request"]
        else:
            made.update(spec={**self.spec, "resources": self.resources, "stay": self.keep}, keep=self.keep)
        return made


def number(text: str) -> "float | int | None":
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e18 else None


_TEXTS = {
    "--profile": "profile", "--mode": "mode", "--template": "template", "--driver": "driver", "--name": "name",
    "--snapshot": "snapshot",
    "--minimum-isolation": "minimum_isolation",
}  # fmt: skip
_LIMITS = {"--memory": "memory_mib", "--cpus": "cpus", "--pids": "pids", "--disk": "disk_mib"}
_RULES = {"--network": "mode", "--allow": "allow", "--deny": "deny", "--resolve": "resolve"}
VALUED = frozenset(
    (
        "--env",
        "--cwd",
        "--timeout",
        "--workspace",
        "--image",
        "--user",
        "--secret",
        "--volume",
        *_RULES,
        *_TEXTS,
        *_LIMITS,
    )
)
_OF_EXEC = frozenset(("--env", "--cwd", "--timeout", "--user", "--tty", "--json"))


def scan(arguments: "list[str]") -> "Options | None":
    """`run` or `exec` and what follows; None for anything that is not plainly right, which is `main`'s to explain."""
    options = Options()
    words = iter(arguments)
    verb = next(words)
    for word in words:
        if word == "--":
            break
        if word[:1] != "-":
            if verb == "exec" and options.sandbox is None:
                options.sandbox = word
                continue
            words = iter([word, *words])
            break
        flag, equals, value = word.partition("=")
        if verb == "exec" and flag not in _OF_EXEC:
            return None
        if flag in VALUED:
            text = value if equals else next(words, None)
            if text is None or not apply(options, flag, text):
                return None
        elif word in ("--tty", "--json", "--keep"):
            setattr(options, word[2:], True)
        elif word == "--overlay":
            options.spec["overlay"] = True
        else:
            return None
    options.request["command"] = list(words)
    missing = not options.request["command"] or (verb == "exec" and options.sandbox is None)
    return None if missing or contradicts(options) else options


def contradicts(options: Options) -> bool:
    network = options.spec.get("policy", {}).get("network", {})
    return network.get("mode") == "off" and "allow" in network


def apply(options: Options, flag: str, text: str) -> bool:
    """Take one flag with its value; False where it needs more than this file can say."""
    if flag in _TEXTS:
        options.spec[_TEXTS[flag]] = text
    elif flag in _LIMITS or flag == "--timeout":
        value = number(text)
        if value is None:
            return False
        if flag == "--timeout":
            options.request["timeout_s"] = value
        else:
            options.resources[_LIMITS[flag]] = value
    elif flag == "--env":
        name, equals, value_text = text.partition("=")
        if equals:
            options.request["env"][name] = value_text
        elif name in os.environ:
            options.request["env"][name] = os.environ[name]
    elif flag == "--workspace":
        options.spec["workspace"] = os.path.abspath(text)
    elif flag in _RULES:
        return apply_rule(options.spec.setdefault("policy", {}).setdefault("network", {}), flag, text)
    elif flag == "--secret":
        options.spec.setdefault("secrets", []).append(text)
    elif flag == "--volume":
        return apply_volume(options.spec.setdefault("volumes", {}), text)
    elif flag == "--image":
        if ":" in text and ":/" not in text:  # may be a relative path: rare enough to pay for the nouns
            from cloche import model

            text = model.absolute_image(text)
        options.spec["image"] = text
    else:
        options.request[flag[2:]] = text
    return True


def apply_volume(volumes: "dict[str, Any]", text: str) -> bool:
    name, _, path = text.partition(":")
    read_only = path.endswith(":ro")
    path = path[:-3] if read_only else path
    volumes[path] = {"volume": name, "read_only": read_only}
    return bool(name) and path[:1] == "/"


def apply_rule(network: "dict[str, Any]", flag: str, text: str) -> bool:
    if flag == "--network":
        network["mode"] = text
        return text in ("off", "rules", "open")
    if flag == "--resolve":
        # As curl writes it: HOST:PORT:ADDR:PORT, where ADDR may be an IPv6 address in brackets.
        host, _, rest = text.partition(":")
        port, _, target = rest.partition(":")
        network.setdefault("resolve", {})[f"{host}:{port}"] = target
        return bool(host and port and target)
    network.setdefault(_RULES[flag], []).append(text)
    return True


def complete(options: Options) -> None:
    """What follows from the flags: the directory to start in, the terminal."""
    workspace = options.spec.get("workspace")
    if workspace is not None and "PATH" in os.environ:
        options.spec["path"] = os.environ["PATH"]  # to find toolchains by; commands do not get it
    if workspace is not None and "cwd" not in options.request:
        here = os.getcwd()
        inside = here == workspace or here.startswith(workspace.rstrip("/") + "/")
        options.request["cwd"] = here if inside else workspace
    if options.tty:
        options.request["pty"] = terminal_size()
        options.request["env"].setdefault("TERM", "xterm-256color")
    options.request["open_stdin"] = True


def terminal_size() -> "list[int]":
    for fd in (0, 1, 2):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        if size.columns and size.lines:
            return [size.columns, size.lines]
    return [80, 24]


# ── the wire ───────────────────────────────────────────────────────────────────────────────────────


def encode(value: "Any") -> str:
    """JSON of what a call is made of. Bytes that are no text ride as lone surrogates, as Python has them in argv."""
    from _json import encode_basestring_ascii as quote

    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote(key)}:{encode(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(encode(item) for item in value) + "]"


def call(method: str, arguments: "dict[str, Any]", channel: int = CHANNEL) -> bytes:
    body = {"method": method, "protocol": framing.PROTOCOL, "version": __version__, "arguments": arguments}
    return framing.pack(framing.CALL, channel, encode(body).encode())


def socket_path(environment: "Any" = os.environ) -> "str | None":
    """Where a keeper would listen; None if that takes more to say (`settings` knows)."""
    address = environment.get("CLOCHE_URL", "")
    if address:
        return address[5:].removeprefix("//") if address[:5] == "unix:" else None
    home = environment.get("CLOCHE_HOME")
    if not home:
        base = environment.get("XDG_STATE_HOME", "")
        if base[:1] != "/":
            if environment.get("HOME", "")[:1] != "/":
                return None
            base = environment["HOME"] + "/.local/state"
        home = base + "/cloche"
    path = home + "/cloche.sock"
    return path if home[:1] == "/" and len(os.fsencode(path)) <= 107 else None


def connect(path: str) -> "_socket.socket | None":
    """A socket to the server at `path`, if one of our own uid listens there."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
        credentials = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    except OSError:
        sock.close()
        return None
    # The command, its environment and its input go to whoever listens here: it must be us, or root.
    if int.from_bytes(credentials[4:8], sys.byteorder) not in (os.geteuid(), 0):
        sock.close()
        return None
    return sock


# ── one command, attached ──────────────────────────────────────────────────────────────────────────


class Session:
    """Relays between this process and a server until the command ends. Afterwards: `result`, `error`, or neither."""

    def __init__(self, sock: "_socket.socket", options: Options) -> None:
        self.sock = sock
        self.options = options
        self.started = b""
        self.result = self.error = b""
        self.detached = False
        self.captured: list[tuple[int, bytes]] = []
        self._buffer = b""
        self._poll = select.poll()
        self._reading = False
        self._room = framing.WINDOW
        self._interrupts = 0
        self._gone: dict[int, int] = {}
        self._held = b""
        self._saved: Any = None

    def run(self) -> None:
        wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        caught = [*_FORWARDED, _signal.SIGWINCH] if self.options.tty else [*_FORWARDED]
        handlers = [
            (n, _signal.signal(n, _nothing)) for n in caught if _signal.getsignal(n) != _signal.SIG_IGN
        ]
        _signal.signal(
            _signal.SIGTTIN, _signal.SIG_IGN
        )  # a background job reads nothing, instead of stopping
        try:
            self._send(call("run", self.options.arguments()))
            self._poll.register(wake, select.POLLIN)
            self._poll.register(self.sock.fileno(), select.POLLIN)
            self._relay(wake)
        finally:
            self._restore_terminal()
            for number_, handler in handlers:
                _signal.signal(number_, handler)
            _signal.set_wakeup_fd(before)
            os.close(wake)
            os.close(wake_write)

    def _relay(self, wake: int) -> None:
        link = self.sock.fileno()
        while not (self.result or self.error or self.detached):
            for fd, _ in self._poll.poll():
                if fd == wake:
                    self._on_signals(os.read(wake, 4096))
                elif fd == 0:
                    self._on_input()
                elif fd != link:
                    self.on_other(fd)
                elif not self._on_frames():
                    return

    def on_other(self, fd: int) -> None:
        """Something else that a further kind of session waits for."""

    # what the server says

    def _on_frames(self) -> bool:
        try:
            data = self.sock.recv(_CHUNK)
        except OSError:
            return False
        if not data:
            return False
        data = self._buffer + data if self._buffer else data
        size, start = framing.HEADER.size, 0
        while len(data) - start >= size:
            length, kind, _ = framing.HEADER.unpack_from(data, start)
            end = start + size + length
            if len(data) < end:
                break
            self._take(kind, data[start + size : end])
            start = end
        self._buffer = data[start:]
        return True

    def _take(self, kind: int, body: bytes) -> None:
        if kind in (framing.STDOUT, framing.STDERR):
            self._write(1 if kind == framing.STDOUT else 2, body)
        elif kind == framing.TAKEN:
            self._room += framing.COUNT.unpack(body)[0]
            self._watch_input()
        elif kind == framing.RESULT:
            self.result = body
        elif kind == framing.ERROR:
            self.error = body
        elif kind == framing.ITEM and not self.started:
            self.started = body
            self._begin_input()

    def _write(self, fd: int, data: bytes) -> None:
        if fd in self._gone:
            self._gone[fd] += len(data)
            if self._gone[fd] - len(data) <= _PATIENCE < self._gone[fd]:
                self._signal(_signal.SIGKILL, tree=True)  # it ignores SIGPIPE and would write for ever
            return
        if not write_all(fd, data):
            self._gone[fd] = len(data)
            self._signal(_signal.SIGPIPE)

    # what the user says

    def _begin_input(self) -> None:
        if self.options.tty and os.isatty(0):
            import termios
            import tty

            self._saved = termios.tcgetattr(0)
            tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is not thrown away
        self._reading = True
        self._watch_input()

    def _watch_input(self) -> None:
        if self._reading and self._room > 0:
            try:
                self._poll.register(0, select.POLLIN)
            except OSError:
                self._reading = False

    def _on_input(self) -> None:
        try:
            data = os.read(0, min(_CHUNK, self._room))
        except BlockingIOError:
            return
        except OSError:  # a terminal that is not ours to read (EIO), or one that hung up
            self._reading = False
            self._poll.unregister(0)
            return
        if not data:
            self._reading = False
            self._poll.unregister(0)
        elif self.options.detachable and not (data := self._without_detach(data)):
            return
        if not self.detached:
            self._send(framing.pack(framing.INPUT, CHANNEL, data))
        self._room -= len(data)
        if self._reading and self._room <= 0:
            self._poll.unregister(0)

    def _without_detach(self, data: bytes) -> bytes:
        data, self._held = self._held + data, b""
        if _DETACH in data:
            data = data[: data.index(_DETACH)]
            self.detached = True
            self._control({"stay": True})
            if data:
                self._send(framing.pack(framing.INPUT, CHANNEL, data))
            return b""
        if data[-1:] == _DETACH[:1]:
            data, self._held = data[:-1], data[-1:]
        return data

    def _on_signals(self, numbers: bytes) -> None:
        for number_ in numbers:
            if number_ == _signal.SIGWINCH:
                columns, rows = terminal_size()
                self._control({"columns": columns, "rows": rows})
            elif number_ != _signal.SIGINT:
                self._signal(number_)
            else:
                self._on_interrupt()

    def _on_interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._signal(_signal.SIGINT)
        elif self._interrupts == 2:
            self._signal(_signal.SIGKILL, tree=True)
        else:
            self.error = (
                b'{"code":"connection_lost","message":"interrupted"}'  # the connection's end is the command's
            )

    def _signal(self, number_: int, tree: bool = False) -> None:
        self._control({"signal": number_, "tree": tree})

    def _control(self, order: "dict[str, Any]") -> None:
        self._send(framing.pack(framing.CONTROL, CHANNEL, encode(order).encode()))

    def _send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError:
            pass  # the end of the connection is noticed where it is read

    def _restore_terminal(self) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self._saved)


def _nothing(*_: object) -> None:
    """The wake-up descriptor does the work; a handler must exist for it to be written."""


def write_all(fd: int, data: bytes) -> bool:
    """False if nobody reads `fd` any more. A descriptor that somebody made non-blocking is waited for."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
        except OSError:
            return False
    return True


# ── telling the end ────────────────────────────────────────────────────────────────────────────────


def conclude(session: Session) -> int:
    """Say what there is to say, and the exit code."""
    if session.result:
        # {"code":N,"quiet":true,…}: the server says first what nearly everybody needs.
        head, _, rest = session.result.partition(b",")
        code = int(head[len(b'{"code":') :])
        if session.options.json or not rest.startswith(b'"quiet":true'):
            from cloche.cli import results

            results.show(session.result, as_json=session.options.json)
        return code
    from cloche.cli import results

    return results.fail(session.error, started=bool(session.started), as_json=session.options.json)


def main() -> int:
    hold_standard_streams()
    arguments = sys.argv[1:]
    if arguments[:1] in (["run"], ["exec"]):
        options = scan(arguments)
        path = socket_path()
        if options is not None and path is not None:
            complete(options)
            sock = connect(path)
            if sock is not None:
                code = attempt(options, sock)
                if code is not None:
                    leave(code)
            elif arguments[0] == "run" and not options.keep and not os.environ.get("CLOCHE_URL"):
                from cloche.cli import here

                leave(here.run(options))
    from cloche.cli import main as everything

    return everything.main(arguments)


def attempt(options: Options, sock: "_socket.socket") -> "int | None":
    """Run through a server; None if it does not want to, and nothing has happened yet."""
    session = Session(sock, options)
    session.run()
    if not session.started and not session.result:
        if b'"server_version_mismatch"' in session.error:
            return None
        if not session.error and "workspace" not in options.spec and options.sandbox is None:
            return None  # it left just as we came; without a workspace a second try cannot do anything twice
    return conclude(session)


def hold_standard_streams() -> None:
    """A closed 0, 1 or 2 would be given to our socket, and the command's output written into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # nor to a socket of what we start


def leave(code: int, act: "Callable[[int], Any]" = os._exit) -> None:
    """Without the interpreter's own farewell, which costs a tenth of its start."""
    act(code)
