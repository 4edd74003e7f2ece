"""The bootstrap of stateful *Python* contexts: what `run_code` talks to.

`source()` is fed as text to the template's own interpreter (any CPython from 3.8, standard library only), which knows
nothing of this package. Started as `command(python)` with

    descriptor 3   the channel: a connected AF_UNIX stream socket
    descriptor 4   `open_source()`, a sealed memfd; all contexts may share one
    0, 1, 2        /dev/null and two pipes; the host reads what the code prints from the pipes, not from the channel

Frames on the channel are a length (4 bytes, big-endian) and that much JSON in UTF-8.

    host → context
      {"op": "run", "id", "code", "env": {} | null, "cwd": path | null, "name": file name in tracebacks | null}
            `env` holds for this run only (null removes a variable); `cwd` moves the context, which stays there
      {"op": "env", "set": {name: value | null}}    for this and all later runs; no answer
      {"op": "preload", "modules": [name, …]}       import them before any run; answered by `preloaded`
      {"op": "fork", "id", "count", "mark"}         become `count` more contexts, each with all that this one has in memory;
            `count` messages of one byte follow, each with three descriptors: a channel, and what becomes 1 and 2
    context → host
      {"op": "ready", "pid", "version"}             once
      {"op": "started", "id", "count"}              once per run, its first frame; `count` numbers the runs from 1
      {"op": "result", "id", "main", "data", "extra"}
            one per display and figure, and (`main`) one for the value of the last expression; `data` maps a MIME type
            to text, to base64 for bytes, to a JSON value for types in JSON; `extra` is {} or {"notes": [text, …]}
      {"op": "error", "id", "name", "value", "traceback"}
      {"op": "done", "id", "count"}                 once per run, its last frame
      {"op": "preloaded", "value"}                  what went wrong with the imports, or ""
      {"op": "forked", "id", "count", "errno"}      how many there are; fewer than asked for with the reason. Each says
            `ready` on its own channel
      {"op": "refused", "id", "code"}               `not_supported` or `context_has_threads`

Python's and C's standard output are flushed before every frame of a run, so bytes in the pipes precede the frame that
follows them. Output is buffered by line: threads do not tear each other's lines, and `-u` would cost a system call per
argument of `print`. A half line waits for its end, a flush, a fork, or the end of the run.

Nothing here is a boundary. The code it runs shares the process, may write any frame it likes or close the channel; the
host believes nothing it reads. What is guarded against is accident: forked children are mute and end where the code
ends, the channel is a high descriptor that no child inherits, `SystemExit` ends a run and not the context.

**Interrupts.** SIGINT raises KeyboardInterrupt only below `attempt`, the one door to foreign code, and never inside
`Channel.write`, where it would tear a frame. Flags would leave gaps of an instruction or two, so the handler looks at
the stack instead. Between `started` and `done` no signal is lost; outside it is ignored, so one that crosses `done` on
its way does not hit the next run. Hence a host that wants to interrupt waits for `started`. CPython itself can
delay it: a signal that falls between its last look and a blocking system call is noticed after the call. A repeated
signal ends such a call.

**Forks.** A process with one thread is copied by the kernel; with more, only the thread that asks would be, and what the
others held locked would stay so: it is refused. The copies are children of a helper that ends at once, so they belong to
nobody inside: the code's own `os.wait` does not meet them. What libraries keep outside of memory (an event loop's selector,
connections, generators seeded once) is as it is after any fork; the context's own event loop is left to the original.

**Bounds.** Text is cut at `MAX_TEXT` characters (text/plain, text/markdown) or left out (types that a cut would break),
bytes over `MAX_BINARY` and JSON over `MAX_TEXT` are left out; a note in `extra` says so. Built-in containers are
spelled piece by piece up to the bound, so a list of a billion numbers costs a megabyte and not a gigabyte.

**Time.** Starting counts, so a first result needs no module that imports `re`: modules with an underscore are the C
halves of those whose Python half does, linecache is filled when somebody loads it, and what concerns figures and tables
(`charts.py`) is a string that is compiled when one first appears. To compile the rest would take as long as half of an
interpreter's start; `source` brings it compiled as well, for an interpreter of the host's own version.
"""

from __future__ import annotations

import _ast
import _signal  # type: ignore[import-not-found]  # `signal` without the enums
import _thread
import builtins
import os
import sys

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from types import CodeType, FrameType, ModuleType
    from typing import Any, NoReturn

    Message = dict[str, Any]

CHANNEL_FD = 3
SOURCE_FD = 4
MAX_FRAME = 64 << 20
MAX_TEXT = 1 << 20
MAX_BINARY = 8 << 20
MAX_NOTES = 16
MAX_CELLS = 1000  # sources kept for tracebacks
CHART = "application/vnd.cloche.chart+json"  # E2B's `chart`
TABLE = "application/vnd.cloche.table+json"  # E2B's `data`: a data frame by column

FILENAME = "<cloche>"  # what tracebacks would show of this module, were it not left out
CHARTS = ""  # the text of charts.py; `source` fills it in

_REPRS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/pdf", "_repr_pdf_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
)
_CUT = ("text/plain", "text/markdown")
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}
_ONLY_AST = 0x400
_TOP_LEVEL_AWAIT = 0x2000
_CO_COROUTINE = 0x80


# -- the host's half ----------------------------------------------------------------------------------------------


def source() -> bytes:
    """What descriptor 4 holds: the bytecode's magic number, its length, the bytecode, the text."""
    import importlib.util
    import marshal

    directory = os.path.dirname(os.path.abspath(__file__))
    texts = []
    for name in ("interpreter.py", "charts.py"):
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            texts.append(file.read())
    text = f"{texts[0]}\nCHARTS = {texts[1]!r}\nserve({CHANNEL_FD})\n"
    code = marshal.dumps(compile(text, FILENAME, "exec", dont_inherit=True, optimize=2))
    return importlib.util.MAGIC_NUMBER + len(code).to_bytes(4, "big") + code + text.encode()


def open_source() -> int:
    """`source()` as a descriptor that any number of contexts may be given, one after the other or at once."""
    import fcntl

    fd = os.memfd_create("cloche-context", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(source())
    # SAFETY: a sandbox may reach this descriptor while its context starts; written to, it would carry code into the
    # next sandbox. Sealed, nobody can change it, us included (test_shared_source_cannot_be_written).
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    return fd


def command(python: str = "python3") -> list[str]:
    """What to execute. The code gets a namespace of its own, so that `__main__` is the user's and starts empty."""
    read = f"__import__('os').pread({SOURCE_FD},1<<24,0)"
    magic = "__import__('_frozen_importlib_external').MAGIC_NUMBER"
    compiled = "__import__('marshal').loads(d[8:])"  # stops at the end of the code
    text = f"compile(d[8+int.from_bytes(d[4:8],'big'):],{FILENAME!r},'exec')"
    load = f"(lambda d:{compiled} if d[:4]=={magic} else {text})"
    return [python, "-c", f"exec({load}({read}),{{'__name__':'cloche_context'}})"]


# -- the channel --------------------------------------------------------------------------------------------------


HIGH_FD = min(1023, os.sysconf("SC_OPEN_MAX") - 1) if os.sysconf("SC_OPEN_MAX") > 0 else 1023


class Channel:
    """Frames to and from the host; mute in every process but the one that was started."""

    fd: int
    pid: int

    def __init__(self, fd: int) -> None:
        self.adopt(fd)  # high, so that code which closes "all" low descriptors misses it
        self.encode, self.decode = codec()
        self.lock = _thread.allocate_lock()  # threads of the user may display, too
        os.register_at_fork(before=flush, after_in_child=self.drop)

    def drop(self) -> None:
        """A child that the code forked has no channel; nor has the helper that makes copies, and it has none twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def adopt(self, fd: int) -> None:
        """Become the channel of a copy."""
        self.fd = os.dup2(fd, HIGH_FD, inheritable=False)
        os.close(fd)
        self.pid = os.getpid()

    def own(self) -> bool:
        return os.getpid() == self.pid

    def send(self, message: Message) -> None:
        payload = self.encode(message).encode("utf-8", "replace")
        if len(payload) > MAX_FRAME:
            small = {"data": {}, "extra": {"notes": ["left out: too large for one frame"]}}
            payload = self.encode(dict(message, **small)).encode()
        self.write(payload)

    def write(self, payload: bytes) -> None:
        if not self.own():
            return
        frame = memoryview(len(payload).to_bytes(4, "big") + payload)
        with self.lock:
            try:
                while frame:
                    frame = frame[os.write(self.fd, frame) :]
            except OSError:  # the host has gone
                os._exit(0)

    def receive(self) -> Message | None:
        header = self._read(4)
        payload = self._read(int.from_bytes(header, "big")) if header else b""
        message: Message | None = self.decode(payload.decode()) if payload else None
        return message

    def _read(self, size: int) -> bytes:
        """`size` bytes, or none at the end of the stream."""
        parts = []
        while size:
            part = os.read(self.fd, min(size, 1 << 20))
            if not part:
                return b""
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def codec() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    """JSON by the C half of the json module, or by all of it should that half ever change."""
    try:
        import _json

        scan = _json.make_scanner(Scanning)  # type: ignore[arg-type]
        quote = _json.encode_basestring
        encoder = _json.make_encoder(None, str, quote, None, ": ", ", ", False, False, False)
        sample = {"a": [1, None, "é"]}
        if scan("".join(encoder(sample, 0)), 0)[0] == sample:
            return (lambda value: "".join(encoder(value, 0))), (lambda text: scan(text, 0)[0])
    except (ImportError, AttributeError, TypeError):
        pass
    import json

    return (lambda value: json.dumps(value, ensure_ascii=False)), json.loads


class Scanning:
    """The settings that the C scanner asks for."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012 - asked for by some versions, never used


def flush() -> None:
    """Push out what Python and C still hold, so that it precedes the next frame."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:  # closed or replaced by the code: its affair
            pass
    if (
        "ctypes" in sys.modules
    ):  # who prints from C has it loaded, as a rule; to load it here would cost everyone
        flush_c()


def flush_c(cache: list[Any] = []) -> None:  # noqa: B006 - the cache
    """Flush C's stdout. Not fflush(NULL), which waits for any stream that some thread is blocked in reading."""
    import ctypes

    try:
        if not cache:
            libc = ctypes.CDLL(None)
            cache += [libc.fflush, ctypes.c_void_p.in_dll(libc, "stdout")]
        cache[0](cache[1])
    except Exception:  # a libc without that symbol, or a ctypes still being imported
        pass


# -- foreign code -------------------------------------------------------------------------------------------------


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Call foreign code: (value, None) or (None, what it raised). The one place below which SIGINT is felt."""
    try:
        return function(*arguments), None
    except BaseException as failure:
        return None, failure


def interruptible(frame: FrameType | None) -> bool:
    """Whether an exception raised in this frame lands in `attempt` and tears no frame of the channel."""
    if frame is None or frame.f_code is attempt.__code__:
        return False
    while frame is not None:
        if frame.f_code is Channel.write.__code__:
            return False
        if frame.f_code is attempt.__code__:
            return True
        frame = frame.f_back
    return False


def no_input(prompt: object = "", /) -> NoReturn:
    raise EOFError(
        "input() is not available: a code context has no standard input; put the value into the code"
    )


# -- reprs --------------------------------------------------------------------------------------------------------


def pieces(value: Any, active: tuple[int, ...] = ()) -> Iterator[str]:
    """The repr of a value; a built-in container comes piece by piece, so that the reader may stop."""
    kind = type(value)
    if kind in (str, bytes) and len(value) > MAX_TEXT:
        yield repr(value[:MAX_TEXT])
    elif kind not in _BRACKETS or not value:
        yield repr(value)
    elif id(value) in active:
        yield "...".join(_BRACKETS[kind])
    else:
        left, right = _BRACKETS[kind]
        yield left
        yield from members(value, (*active, id(value)))
        yield ",)" if kind is tuple and len(value) == 1 else right


def members(value: Any, active: tuple[int, ...]) -> Iterator[str]:
    comma = ""
    if type(value) is dict:
        for key, member in value.items():
            yield comma
            yield from pieces(key, active)
            yield ": "
            yield from pieces(member, active)
            comma = ", "
        return
    for member in value:
        yield comma
        yield from pieces(member, active)
        comma = ", "


def plain(value: Any) -> str:
    """The repr, bounded, or words about why there is none."""
    parts = []
    length = 0
    try:
        for piece in pieces(value):
            parts.append(piece)
            length += len(piece)
            if length > MAX_TEXT:
                break
        return "".join(parts)
    except Exception as failure:
        return f"<{type(value).__name__} object whose repr failed: {summary(failure)}>"


def summary(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {words(failure)}"


def words(failure: BaseException) -> str:
    try:
        return clipped(str(failure))
    except Exception:
        return "<exception str() failed>"


def clipped(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n[cut after {MAX_TEXT} characters]"


class Bundle:
    """One value in all the forms that it can take, each within its bound."""

    def __init__(self) -> None:
        self.data: Message = {}
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text[:1000])

    def add(self, mime: str, value: Any) -> None:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
            value = value[0]  # Jupyter's (data, metadata)
        if value is None or mime in self.data or len(self.data) >= len(_REPRS) + 8:
            return
        kept = self._json(mime, value) if mime.endswith(("/json", "+json")) else self._bounded(mime, value)
        if kept is not None:
            self.data[mime] = kept

    def add_all(self, forms: dict[str, Any]) -> None:
        for mime, form in forms.items():
            self.try_add(str(mime), lambda form=form: form)

    def try_add(self, mime: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.add(mime, function(*arguments))
        except Exception as failure:
            self.note(f"{mime}: left out: {summary(failure)}")

    def _bounded(self, mime: str, value: Any) -> str | None:
        if isinstance(value, (bytes, bytearray, memoryview)):
            import binascii

            if len(value) <= MAX_BINARY:
                return binascii.b2a_base64(value, newline=False).decode()
            self.note(f"{mime}: left out: {len(value)} bytes, the limit is {MAX_BINARY}")
        elif isinstance(value, str):
            binary = mime.startswith("image/") and not mime.endswith("xml")
            limit = MAX_BINARY * 4 // 3 + 4 if binary else MAX_TEXT  # base64 already
            if len(value) <= limit:
                return str(value)
            if mime in _CUT:
                self.note(f"{mime}: cut after {limit} characters")
                return clipped(value)
            self.note(f"{mime}: left out: {len(value)} characters, the limit is {limit}")
        return None

    def _json(self, mime: str, value: Any) -> Any:
        import json

        text = json.dumps(value, allow_nan=False)
        if len(text) <= MAX_TEXT:
            return json.loads(text)  # plain values only: whatever posed as a dict is one now
        self.note(f"{mime}: left out: {len(text)} characters, the limit is {MAX_TEXT}")
        return None


def bundle(value: Any) -> Bundle:
    """What Jupyter would show of a value: its own reprs, a figure's picture, a table's columns.

    Reprs are asked of the type: an object that answers to every name (a mock, a proxy) has none of them.
    """
    result = Bundle()
    add_special(result, value)
    if hasattr(type(value), "_repr_mimebundle_"):
        add_mimebundle(result, value)
    for mime, method in _REPRS:
        if mime not in result.data and hasattr(type(value), method):
            result.try_add(mime, lambda method=method: getattr(value, method)())
    if "text/plain" not in result.data:
        result.add("text/plain", plain(value))
    return result


def add_mimebundle(result: Bundle, value: Any) -> None:
    try:
        forms = value._repr_mimebundle_(include=None, exclude=None)
        result.add_all(forms[0] if isinstance(forms, tuple) else forms or {})
    except Exception as failure:
        result.note(f"_repr_mimebundle_: {summary(failure)}")


def add_special(result: Bundle, value: Any) -> None:
    """Figures and tables, if their libraries are loaded at all. A figure that cannot be drawn is the code's error."""
    figures, frames = sys.modules.get("matplotlib.figure"), sys.modules.get("pandas")
    if issubclass(type(value), getattr(figures, "Figure", ())):
        charts = load_charts()
        result.add("image/png", charts["picture"](value))
        result.try_add(CHART, charts["chart"], value)
    elif issubclass(type(value), getattr(frames, "DataFrame", ())):
        result.try_add(TABLE, load_charts()["table"], value)


def load_charts(cache: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006 - the cache
    if not cache:
        cache["__name__"] = "cloche_charts"
        exec(compile(CHARTS, FILENAME, "exec"), cache)  # noqa: S102 - our own text
    return cache


# -- errors -------------------------------------------------------------------------------------------------------


def describe(failure: BaseException, cells: Container[str]) -> tuple[str, str, str]:
    """Name, value and a traceback as the interpreter would print it, without frames of ours."""
    import linecache
    import traceback

    if isinstance(failure, SyntaxError) and failure.text is None and failure.filename in cells:
        failure.text = (
            linecache.getline(str(failure.filename), failure.lineno or 0) or None
        )  # errors of the compiler
    report = traceback.TracebackException(type(failure), failure, failure.__traceback__)
    prune(report)
    first = next((index for index, frame in enumerate(report.stack) if frame.filename in cells), 0)
    del report.stack[:first]  # the event loop's, under a cell that awaits
    lines = report.format() if report.stack else report.format_exception_only()
    return type(failure).__name__, words(failure), clipped("".join(lines))


def prune(report: Any) -> None:
    """Drop our frames from a TracebackException and from all that it is chained to."""
    pending, seen = [report], set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack[:] = [frame for frame in one.stack if frame.filename != FILENAME]
        pending += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


# -- imports to be adjusted ---------------------------------------------------------------------------------------


class Adjusting:
    """A finder that lets others find a module and adjusts it once it is loaded.

    Needed because one cell both imports pyplot and calls `show`, which has to publish there and then: two plots in a
    cell are two figures.
    """

    def __init__(self, adjustments: dict[str, Callable[[ModuleType], None]]) -> None:
        self.adjustments = adjustments

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        adjust = self.adjustments.get(name)
        if adjust is None:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = AdjustingLoader(spec.loader, adjust)  # type: ignore[assignment]
        return spec


class AdjustingLoader:
    def __init__(self, loader: Any, adjust: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.adjust = adjust

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.adjust(module)


# -- the context --------------------------------------------------------------------------------------------------


class Context:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.namespace = sys.modules["__main__"].__dict__
        self.count = 0
        self.run_id = ""
        self.busy = False  # from just before `started` to just before `done`
        self.interrupted = False  # SIGINT came when it could not be raised
        self.cells: dict[str, str] = {}
        self.future_flags = 0
        self.loop: Any = None
        self.left_behind: Any = None

    def install(self) -> None:
        """Make this process look like a place to run code in."""
        sys.argv = [""]
        for stream in (sys.stdout, sys.stderr):
            text: Any = stream
            text.reconfigure(encoding="utf-8", errors="backslashreplace")
            text.reconfigure(line_buffering=True, write_through=False)  # even under PYTHONUNBUFFERED
        os.environ.setdefault("MPLBACKEND", "Agg")
        builtins.display = self.display  # type: ignore[attr-defined]
        builtins.input = no_input
        adjustments = {
            "linecache": self._adjust_linecache,
            "matplotlib.pyplot": self._adjust_pyplot,
            "IPython.core.display_functions": self._adjust_ipython,
        }
        sys.meta_path.insert(0, Adjusting(adjustments))
        _signal.signal(_signal.SIGINT, self.on_interrupt)

    def _adjust_linecache(self, linecache: Any) -> None:
        for name, code in self.cells.items():
            add_lines(linecache, name, code)

    def _adjust_pyplot(self, pyplot: Any) -> None:
        pyplot.show = lambda *args, **kwargs: self.publish_figures()

    def _adjust_ipython(self, module: Any) -> None:
        module.display = self.display

    # signals

    def on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if interruptible(frame):
            raise KeyboardInterrupt
        self.interrupted = self.busy

    def raise_interrupt(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    # requests

    def serve(self) -> None:
        while True:
            message = self.channel.receive()
            if message is None:
                flush()
                os._exit(0)  # without waiting for threads: the host has gone
            self.handle(message)

    def handle(self, message: Message) -> None:
        operation = message.get("op")
        if operation == "run":
            self.run(message)
        elif operation == "env":
            set_environment(message.get("set") or {})
        elif operation == "preload":
            _, failure = attempt(preload, message["modules"])
            flush()
            self.channel.send({"op": "preloaded", "value": "" if failure is None else summary(failure)})
        elif operation == "fork":
            self.fork(message)
        else:
            self.channel.send({"op": "refused", "id": message.get("id"), "code": "not_supported"})

    # copies

    def fork(self, request: Message) -> None:
        """Make copies of this context; returns in the original and in each of them."""
        count = int(request["count"])
        if len(os.listdir("/proc/self/task")) > 1:
            self.skip(count)
            self.channel.send({"op": "refused", "id": request["id"], "code": "context_has_threads"})
            return
        line = os.dup(self.channel.fd)
        reading, writing = os.pipe()
        helper = os.fork()
        if helper == 0:
            os.close(reading)
            if self.copy(count, int(request.get("mark", -1)), line, writing):
                return
            os._exit(0)
        os.close(line)
        os.close(writing)
        told = os.read(reading, 12)
        os.close(reading)
        os.waitpid(helper, 0)
        taken, made, problem = (int.from_bytes(told[at : at + 4], "big") for at in (0, 4, 8))
        self.skip(count - taken)
        self.channel.send({"op": "forked", "id": request["id"], "count": made, "errno": problem})

    def skip(self, count: int) -> None:
        """Let go of descriptors that nobody will take."""
        while count > 0:
            count -= len(os.read(self.channel.fd, count)) or count

    def copy(self, count: int, mark: int, line: int, told: int) -> bool:
        """In the helper: one fork after the other. True in each copy; False when all are made.

        What a copy touches first it must copy, page by page: hence imports and encoders are used here, before.
        """
        import _socket
        import gc
        import resource

        gc.freeze()  # a collection in a copy would write to every object that there is
        limit = resource.setrlimit
        link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, line)
        taken = made = problem = 0
        try:
            while made < count:
                fds = receive_descriptors(link)
                taken += 1
                if os.fork() == 0:
                    os.close(told)
                    link.close()
                    if mark > 0:
                        attempt(limit, resource.RLIMIT_RTTIME, (mark - made, mark - made))
                    self.become(fds)
                    return True
                made += 1
                for fd in fds:
                    os.close(fd)
        except OSError as failure:  # no process or descriptor more
            problem = failure.errno or 5
        os.write(told, b"".join(number.to_bytes(4, "big") for number in (taken, made, problem)))
        return False

    def become(self, fds: list[int]) -> None:
        """In a copy: a channel, streams and a session of its own."""
        channel, output, errors = fds
        os.setsid()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        self.channel.adopt(channel)
        # Its selector is shared with the original's: to close or collect it here would take the original's apart.
        self.left_behind, self.loop = self.loop, None
        self.channel.write(b'{"op":"ready","pid":%d}' % self.channel.pid)

    def run(self, request: Message) -> None:
        self.count += 1
        self.run_id = request["id"]
        before = set_environment(request.get("env") or {})
        self.busy = True
        self.channel.send({"op": "started", "id": self.run_id, "count": self.count})
        _, failure = attempt(self.execute, request)
        if not self.channel.own():
            self.leave(failure)
        _, trouble = attempt(self.publish_figures)  # after a failure, too: a half-drawn figure tells much
        if failure is None:
            failure = trouble
        if failure is not None:
            self.report(failure)
        set_environment(before)
        flush()
        self.busy = self.interrupted = False  # before `done`: a signal sent after it is meant for nobody
        self.channel.send({"op": "done", "id": self.run_id, "count": self.count})

    def report(self, failure: BaseException) -> None:
        described, trouble = attempt(describe, failure, self.cells)
        if trouble is not None:
            name = type(failure).__name__
            described = (name, "", f"{name}: its description failed: {type(trouble).__name__}\n")
        name, value, text = described
        flush()
        self.channel.send({"op": "error", "id": self.run_id, "name": name, "value": value, "traceback": text})

    def leave(self, failure: BaseException | None) -> NoReturn:
        """The end of a child that the code forked and that ran out of code: as of any script."""
        status = 0
        if isinstance(failure, SystemExit):
            status = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
        elif failure is not None:
            status = 1
            described, _ = attempt(describe, failure, self.cells)
            attempt(sys.stderr.write, described[2] if described else "")
        flush()
        os._exit(status & 0xFF)

    # code

    def execute(self, request: Message) -> None:
        self.raise_interrupt()
        if request.get("cwd"):
            os.chdir(request["cwd"])
        name = request.get("name") or f"<cell {self.count}>"
        code = dedent(request["code"])
        self.remember(name, code)
        body, last = self.compile(code, name)
        value = self.evaluate([part for part in (body, last) if part is not None])
        if last is not None and value is not None:
            builtins._ = value  # type: ignore[attr-defined]  # where the REPL puts it: a `_` of the user's wins
            self.publish(value, main=True)

    def remember(self, name: str, code: str) -> None:
        """Let tracebacks and inspect find the source."""
        linecache: Any = sys.modules.get("linecache")
        self.cells[name] = code
        oldest = next(iter(self.cells)) if len(self.cells) > MAX_CELLS else None
        if oldest is not None:
            del self.cells[oldest]
        if hasattr(linecache, "cache"):
            linecache.cache.pop(oldest, None)
            add_lines(linecache, name, code)

    def compile(self, code: str, name: str) -> tuple[CodeType | None, CodeType | None]:
        """All but the last expression, and the last expression if its value is wanted."""
        flags = _TOP_LEVEL_AWAIT | self.future_flags
        tree: Any = compile(code, name, "exec", _ONLY_AST | flags, True)
        last = None
        if tree.body and isinstance(tree.body[-1], _ast.Expr) and not silenced(code, tree.body[-1]):
            last = tree.body.pop().value
        body = compile(tree, name, "exec", flags, True) if tree.body else None
        if body is not None and "__future__" in code:
            flags |= self._futures(body)
        return body, compile(_ast.Expression(last), name, "eval", flags, True) if last is not None else None

    def _futures(self, code: CodeType) -> int:
        """As at the prompt, a future statement holds for all code that comes after it."""
        import __future__

        for feature in __future__.all_feature_names:
            self.future_flags |= getattr(__future__, feature).compiler_flag & code.co_flags
        return self.future_flags

    def evaluate(self, parts: list[CodeType]) -> Any:
        """The value of the last part. If one of them awaits, all of them find the loop running."""
        if any(part.co_flags & _CO_COROUTINE for part in parts):
            return self.wait_for(self.evaluate_async(parts))
        value = None
        for part in parts:
            value = eval(part, self.namespace)  # noqa: S307 - the purpose of this module
        return value

    async def evaluate_async(self, parts: list[CodeType]) -> Any:
        value = None
        for part in parts:
            value = eval(part, self.namespace)  # noqa: S307
            if part.co_flags & _CO_COROUTINE:
                value = await value
        return value

    def wait_for(self, coroutine: Any) -> Any:
        """Run a cell that awaits on the context's own loop, which stands still between such cells."""
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # KeyboardInterrupt left the loop, not the task
                task.cancel()
                attempt(self.loop.run_until_complete, task)
            raise

    # results

    def display(self, *values: Any, raw: bool = False, **ignored: Any) -> None:
        """Show values as results, as in a notebook; `raw` values are MIME bundles already."""
        for value in values:
            if raw:
                forms = Bundle()
                forms.add_all(value)
                self.send_result(forms)
            else:
                self.publish(value)

    def publish(self, value: Any, main: bool = False) -> None:
        try:
            self.send_result(bundle(value), main)
        finally:
            close_figure(value)  # shown now, or never to be: hence not again at the end

    def send_result(self, forms: Bundle, main: bool = False) -> None:
        extra = {"notes": forms.notes} if forms.notes else {}
        flush()
        self.channel.send(
            {"op": "result", "id": self.run_id, "main": main, "data": forms.data, "extra": extra}
        )
        self.raise_interrupt()

    def publish_figures(self) -> None:
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        for number in getattr(pyplot, "get_fignums", tuple)():
            self.publish(pyplot.figure(number))


def add_lines(linecache: Any, name: str, code: str) -> None:
    lines = [f"{line}\n" for line in code.split("\n")]
    linecache.cache[name] = (len(code), None, lines, name)  # no time stamp: checkcache leaves it alone


def close_figure(value: Any) -> None:
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if issubclass(type(value), getattr(pyplot, "Figure", ())):
        pyplot.close(value)


def preload(modules: list[str]) -> None:
    for name in modules:
        __import__(name)


def receive_descriptors(link: Any) -> list[int]:
    """The three descriptors of one copy."""
    import _socket

    data, ancillary, _, _ = link.recvmsg(1, _socket.CMSG_SPACE(3 * 4))
    if not data or not ancillary or len(ancillary[0][2]) != 12:
        raise OSError(5, "no descriptors")
    return [int.from_bytes(ancillary[0][2][at : at + 4], sys.byteorder) for at in (0, 4, 8)]


def set_environment(values: dict[str, str | None]) -> dict[str, str | None]:
    """Set or, for null, remove variables; gives back what undoes it."""
    before: dict[str, str | None] = {}
    for name, value in values.items():
        before[name] = os.environ.get(name)
        try:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        except (ValueError, OSError):  # no name for a variable
            before.pop(name)
    return before


def dedent(code: str) -> str:
    """Code that is indented as a whole, as models like to send it, is meant without."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    margin = first[: len(first) - len(first.lstrip())]
    if not margin:
        return code
    return "\n".join(line[len(margin) :] if line.startswith(margin) else line for line in lines)


def silenced(code: str, statement: Any) -> bool:
    """Whether a semicolon follows the last expression."""
    line = code.encode("utf-8", "replace").splitlines()[statement.end_lineno - 1]
    return bool(line[statement.end_col_offset :].lstrip().startswith(b";"))


def serve(fd: int) -> None:
    os.close(SOURCE_FD)
    channel = Channel(fd)
    context = Context(channel)
    context.install()
    version = ".".join(map(str, sys.version_info[:3]))
    channel.send({"op": "ready", "pid": channel.pid, "version": version})
    context.serve()
