"""The bootstrap of Python contexts, run for real in plain subprocesses of every interpreter this machine has."""

import base64
import fcntl
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.guest import interpreter


def interpreters() -> list[str]:
    """Ours, the system's, and one of each version that pyenv has."""
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    found = [sys.executable, "/usr/bin/python3"]
    for minor in range(8, 16):
        found += sorted(glob.glob(f"{root}/versions/3.{minor}.*/bin/python"))[-1:]
    return [path for path in found if os.access(path, os.X_OK)]


class Context:
    """The host's side of one context, with nothing but the protocol."""

    def __init__(self, python: str) -> None:
        self.channel, there = socket.socketpair()
        source = interpreter.open_source()
        # High numbers first, so that neither is in the way of the other.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (there.fileno(), source)]
        place = 'exec 3<&{0} 4<&{1} {0}<&- {1}<&-; exec "$@"'.format(*high)
        self.process = subprocess.Popen(
            ["bash", "-c", place, "bash", *interpreter.command(python)],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        there.close()
        for fd in (source, *high):
            os.close(fd)
        self.ready = self.receive()

    def send(self, **message: Any) -> None:
        payload = json.dumps(message).encode()
        self.channel.sendall(len(payload).to_bytes(4, "big") + payload)

    def receive(self) -> dict[str, Any] | None:
        header = self._read(4)
        return json.loads(self._read(int.from_bytes(header, "big"))) if header else None

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.channel.recv(size - len(data))
            if not part:
                return b""
            data += part
        return data

    def frames(self) -> list[dict[str, Any]]:
        """All frames up to and without `done`."""
        frames: list[dict[str, Any]] = []
        while True:
            frame = self.receive()
            assert frame is not None, "the context ended"
            if frame["op"] == "done":
                return frames
            frames.append(frame)

    def start(self, code: str, **more: Any) -> None:
        """Send a run and wait until it has begun."""
        self.send(op="run", id="r", code=textwrap.dedent(code), **more)
        frame = self.receive()
        assert frame is not None
        assert frame["op"] == "started"

    def run(self, code: str, **more: Any) -> list[dict[str, Any]]:
        self.start(code, **more)
        return self.frames()

    def value(self, code: str, **more: Any) -> Any:
        """The text of the one result; fails on an error."""
        [frame] = self.run(code, **more)
        assert frame["op"] == "result", frame
        return frame["data"]["text/plain"]

    def error(self, code: str, **more: Any) -> dict[str, Any]:
        frame = self.run(code, **more)[-1]
        assert frame["op"] == "error", frame
        return frame

    def output(self, size: int) -> bytes:
        """What is in the pipe now: `size` bytes at most, without waiting for more."""
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), size)

    def started(self) -> None:
        """Wait until the code has said so on its output."""
        assert self.output(100) == b"started\n"

    def asleep(self) -> None:
        """Wait until the code blocks in a system call: a signal just before one is noticed only after it."""
        self.started()
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            try:
                self.process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture(params=interpreters(), ids=lambda path: path.replace(os.path.expanduser("~"), "~"))
def every(request: pytest.FixtureRequest) -> Iterator[Context]:
    """A context in each interpreter."""
    context = Context(request.param)
    yield context
    context.close()


@pytest.fixture
def context() -> Iterator[Context]:
    """A context in the interpreter of the tests."""
    context = Context(sys.executable)
    yield context
    context.close()


# -- in every interpreter


def test_ready_tells_process_and_version(every: Context) -> None:
    assert every.ready is not None
    assert every.ready["op"] == "ready"
    assert every.ready["pid"] == every.process.pid
    assert every.value("import sys; '%d.%d.%d' % sys.version_info[:3]") == repr(every.ready["version"])


def test_state_is_kept_and_the_last_expression_is_the_result(every: Context) -> None:
    assert every.run("x = 41") == []
    assert every.run("x + 1") == [
        {"op": "result", "id": "r", "main": True, "data": {"text/plain": "42"}, "extra": {}}
    ]
    assert every.value("_ * 2") == "84"


def without_markers(traceback: str) -> str:
    """Without the lines of ~ and ^ that newer versions put beneath a call."""
    return "".join(
        line for line in traceback.splitlines(keepends=True) if line.strip("~^ \n") or line == "\n"
    )


def test_traceback_is_the_users_alone(every: Context) -> None:
    every.run("def f():\n    raise ValueError('no')")
    error = every.error("x = 1\nf()")
    error["traceback"] = without_markers(error["traceback"])
    assert error == {
        "op": "error",
        "id": "r",
        "name": "ValueError",
        "value": "no",
        "traceback": "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 2, in <module>\n'
        "    f()\n"
        '  File "<cell 1>", line 2, in f\n'
        "    raise ValueError('no')\n"
        "ValueError: no\n",
    }


def test_traceback_of_a_cause_is_clean_too(every: Context) -> None:
    code = """
    try:
        raise KeyError('k')
    except KeyError as e:
        raise ValueError('v') from e
    """
    assert every.error(code)["traceback"] == (
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 3, in <module>\n'
        "    raise KeyError('k')\n"
        "KeyError: 'k'\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 5, in <module>\n'
        "    raise ValueError('v') from e\n"
        "ValueError: v\n"
    )


@pytest.mark.parametrize("code", ["a = 1\nif if\n", "a = 1\nreturn 3\n"], ids=["parser", "compiler"])
def test_syntax_error_shows_line_and_caret(every: Context, code: str) -> None:
    error = every.error(code)
    lines = error["traceback"].splitlines()
    assert error["name"] == "SyntaxError"
    assert lines[0] == '  File "<cell 1>", line 2'
    assert lines[1].strip() == code.splitlines()[1]
    assert set(lines[2].strip()) == {"^"}
    assert lines[3].startswith("SyntaxError: ")
    assert every.value("1 + 1") == "2"


def test_code_may_await(every: Context) -> None:
    every.run("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * 2")
    assert every.value("y = await f(2)\nawait f(y)") == "8"
    assert (
        every.value("loop = asyncio.get_running_loop()\nawait f(1)\nloop is asyncio.get_running_loop()")
        == "True"
    )
    every.run("async def g():\n    raise ValueError('g')")
    assert without_markers(every.error("await g()")["traceback"]) == (
        "Traceback (most recent call last):\n"
        '  File "<cell 5>", line 1, in <module>\n'
        "    await g()\n"
        '  File "<cell 4>", line 2, in g\n'
        "    raise ValueError('g')\n"
        "ValueError: g\n"
    )


def test_interrupt_ends_the_run_only(every: Context) -> None:
    every.run("kept = 1")
    every.start("import time\nprint('started')\nwhile True: time.sleep(60)")
    every.asleep()
    every.interrupt()
    [error] = every.frames()
    assert error["name"] == "KeyboardInterrupt"
    assert 'File "<cell 2>", line 3' in error["traceback"]
    assert "<cloche>" not in error["traceback"]
    assert every.value("kept") == "1"


def test_interrupt_reaches_code_that_awaits(every: Context) -> None:
    every.start("import asyncio\nprint('started')\nawait asyncio.sleep(600)")
    every.asleep()
    every.interrupt()
    [error] = every.frames()
    assert error["name"] == "KeyboardInterrupt"
    assert every.value("await asyncio.sleep(0, 5)") == "5"


def test_forked_child_is_silent_and_ends(every: Context) -> None:
    code = """
    import os
    pid = os.fork()
    if pid:
        print(os.waitpid(pid, 0)[1] >> 8)
    else:
        display('from the child')
        print('child')
        raise SystemExit(7)
    """
    assert every.run(code) == []
    assert every.output(100) == b"child\n7\n"
    assert every.value("1") == "1"


def test_source_can_be_inspected(every: Context) -> None:
    every.run("def f():\n    return 'here'")
    assert every.value("import inspect; inspect.getsource(f)") == repr("def f():\n    return 'here'\n")


def test_main_is_the_users(every: Context) -> None:
    names = every.value("sorted(n for n in globals() if not n.startswith('__'))")
    assert names == "[]"
    assert every.value("__name__, __import__('sys').argv") == "('__main__', [''])"
    every.run("class C: pass")
    assert every.value("import pickle; type(pickle.loads(pickle.dumps(C()))) is C") == "True"


def test_multiprocessing_by_fork_works(every: Context) -> None:
    every.run("import multiprocessing\ndef double(x): return 2 * x")
    code = """
    with multiprocessing.get_context('fork').Pool(2) as pool:
        r = pool.map(double, [1, 2])
    r
    """
    assert every.value(code) == "[2, 4]"


def test_rich_forms_of_a_value(every: Context) -> None:
    every.run(
        """
        class Rich:
            def __repr__(self): return 'rich'
            def _repr_html_(self): return '<b>x</b>'
            def _repr_markdown_(self): return '**x**'
            def _repr_latex_(self): return '$x$'
            def _repr_svg_(self): return '<svg/>'
            def _repr_png_(self): return b'\\x89PNG'
            def _repr_jpeg_(self): return (b'\\xff\\xd8', {'width': 1})
            def _repr_json_(self): return {'a': [1, None]}
            def _repr_javascript_(self): return None
        """
    )
    [result] = every.run("Rich()")
    assert result["data"] == {
        "text/plain": "rich",
        "text/html": "<b>x</b>",
        "text/markdown": "**x**",
        "text/latex": "$x$",
        "image/svg+xml": "<svg/>",
        "image/png": base64.b64encode(b"\x89PNG").decode(),
        "image/jpeg": base64.b64encode(b"\xff\xd8").decode(),
        "application/json": {"a": [1, None]},
    }
    assert result["extra"] == {}


# -- values


@pytest.mark.parametrize(
    "expression",
    [
        "[]",
        "[1, 'a', None, 2.5, b'x']",
        "{'a': {1: (2,), 'b': ()}, (1, 2): [[]]}",
        "{1}",
        "frozenset({1})",
        "set()",
        "(lambda l: (l.append(l), l)[1])([1])",
        "(lambda d: (d.__setitem__('d', d), d)[1])({})",
        "(lambda a: [a, a])([1])",
        "type('L', (list,), {'__repr__': lambda self: 'mine'})([1])",
        "int",
    ],
)
def test_text_is_the_repr(context: Context, expression: str) -> None:
    assert context.value(expression) == repr(eval(expression))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1;", False),
        ("1 ;  # quiet", False),
        ("'ä' * 2;", False),
        ("None", False),
        ("1  # ; loud", True),
        ("x = 1", False),
        ("x = 1; 2", True),
        ("def f(): return 1", False),
        ("", False),
        ("# only a comment", False),
        ("    1 + 1\n    2 + 2", True),
    ],
)
def test_what_is_shown(context: Context, code: str, shown: bool) -> None:
    context.send(op="run", id="r", code=code)
    assert [frame["op"] for frame in context.frames()] == ["started"] + ["result"] * shown


def test_display_shows_in_order(context: Context) -> None:
    frames = context.run("display(1, 'two')\ndisplay({'text/html': '<i>'}, raw=True)\n3")
    assert [(frame["main"], frame["data"]) for frame in frames] == [
        (False, {"text/plain": "1"}),
        (False, {"text/plain": "'two'"}),
        (False, {"text/html": "<i>"}),
        (True, {"text/plain": "3"}),
    ]


def test_mimebundle_comes_first_and_may_hold_any_type(context: Context) -> None:
    context.run(
        """
        class Both:
            def _repr_mimebundle_(self, include=None, exclude=None):
                return {'text/plain': 'p', 'text/html': 'first', 'application/vnd.x+json': {'k': 1}}, {}
            def _repr_html_(self): return 'second'
        """
    )
    [result] = context.run("Both()")
    assert result["data"] == {"text/plain": "p", "text/html": "first", "application/vnd.x+json": {"k": 1}}


def test_broken_reprs_become_words(context: Context) -> None:
    context.run(
        """
        class Broken:
            def __repr__(self): raise ValueError('oops')
            def _repr_html_(self): raise KeyError('html')
            def _repr_json_(self): return {'x': float('nan'), 'y': object()}
            def _repr_mimebundle_(self, **_): return 5
        """
    )
    [result] = context.run("Broken()")
    assert result["data"] == {"text/plain": "<Broken object whose repr failed: ValueError: oops>"}
    assert [note.split(":")[0] for note in result["extra"]["notes"]] == [
        "_repr_mimebundle_",
        "text/html",
        "application/json",
    ]
    assert context.value("[Broken()]") == "<list object whose repr failed: ValueError: oops>"


def test_object_that_answers_to_every_name_is_plain(context: Context) -> None:
    [result] = context.run("from unittest.mock import MagicMock; MagicMock(name='m')")
    assert list(result["data"]) == ["text/plain"]


@pytest.mark.parametrize(
    "code",
    ["[0] * 10**8", "'x' * 10**7", "{i: 'y' * 1000 for i in range(10**5)}"],
    ids=["list", "str", "dict"],
)
def test_huge_text_is_cut_with_a_note(context: Context, code: str) -> None:
    [result] = context.run(code)
    text = result["data"]["text/plain"]
    assert text.endswith(f"\n[cut after {interpreter.MAX_TEXT} characters]")
    assert len(text) < interpreter.MAX_TEXT + 100
    assert result["extra"] == {"notes": [f"text/plain: cut after {interpreter.MAX_TEXT} characters"]}


def test_huge_list_is_not_spelled_out(context: Context) -> None:
    context.run("x = [0] * (3 * 10**7)")
    context.run("import resource; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss")
    context.run("x")
    grown = context.value("resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before")
    assert int(grown) < 60_000  # KiB; its repr would be 90 MB of text and as much again to copy it


def test_what_a_cut_would_break_is_left_out(context: Context) -> None:
    context.run(
        """
        class Huge:
            def __repr__(self): return 'huge'
            def _repr_html_(self): return 'h' * (2 << 20)
            def _repr_png_(self): return bytes(9 << 20)
            def _repr_json_(self): return ['j'] * (1 << 20)
            def _repr_markdown_(self): return 'm' * (2 << 20)
        """
    )
    [result] = context.run("Huge()")
    assert set(result["data"]) == {"text/plain", "text/markdown"}
    assert len(result["extra"]["notes"]) == 4


def test_lone_surrogates_do_not_break_the_frame(context: Context) -> None:
    [result] = context.run("display({'text/html': 'a\\ud800b\\x00'}, raw=True)")
    assert result["data"] == {"text/html": "a?b\x00"}
    context.run("print('\\ud800 é')")
    assert context.output(100) == "\\ud800 é\n".encode()


# -- errors


def test_system_exit_is_an_error_and_the_context_survives(context: Context) -> None:
    error = context.error("import sys; sys.exit(3)")
    assert (error["name"], error["value"]) == ("SystemExit", "3")
    assert context.error("exit()")["name"] == "SystemExit"
    assert context.value("1") == "1"


def test_input_says_that_there_is_none(context: Context) -> None:
    error = context.error("input('name? ')")
    assert error["name"] == "EOFError"
    assert "no standard input" in error["value"]
    assert "<cloche>" not in error["traceback"]


def test_exception_that_cannot_be_described(context: Context) -> None:
    error = context.error("class E(Exception):\n    def __str__(self): raise ValueError\nraise E")
    assert (error["name"], error["value"]) == ("E", "<exception str() failed>")


def test_traceback_printed_by_the_code_has_its_lines(context: Context) -> None:
    context.run("import traceback\ntry:\n    1/0\nexcept Exception:\n    print(traceback.format_exc())")
    assert b"    1/0\n" in context.output(4096)


def test_name_is_shown_in_tracebacks(context: Context) -> None:
    assert 'File "notebook.py", line 1' in context.error("1/0", name="notebook.py")["traceback"]


def test_deep_recursion_is_an_error(context: Context) -> None:
    assert context.error("def f(): f()\nf()")["name"] == "RecursionError"


def test_future_statement_holds_from_then_on(context: Context) -> None:
    context.run("from __future__ import annotations")
    assert context.value("def f(x: nowhere): pass\nf.__annotations__") == "{'x': 'nowhere'}"


# -- interrupts


def test_interrupt_while_idle_is_ignored(context: Context) -> None:
    """Also one that the context gets to see only together with the next run."""
    for number in range(50):
        context.interrupt()
        assert context.value(f"{number}") == f"{number}"


def test_interrupt_after_the_start_is_never_lost(context: Context) -> None:
    """It may arrive before any of the code has run; it is meant for it all the same."""
    for _ in range(50):
        context.start("while True: pass")
        context.interrupt()
        assert [frame["name"] for frame in context.frames()] == ["KeyboardInterrupt"]


def test_interrupt_does_not_tear_frames(context: Context) -> None:
    context.start("print('started')\nwhile True: display('x' * 100_000)")
    context.started()
    for _ in range(5):
        assert context.receive()
    context.interrupt()
    assert context.frames()[-1]["name"] == "KeyboardInterrupt"
    assert context.value("1") == "1"


def test_code_may_catch_an_interrupt(context: Context) -> None:
    code = """
    import signal
    try:
        print('started')
        while True: signal.pause()
    except KeyboardInterrupt:
        print('caught')
    """
    context.start(code)
    context.asleep()
    context.interrupt()
    assert context.frames() == []
    assert context.output(100) == b"caught\n"


# -- surroundings


def test_output_precedes_the_frame_that_follows_it(context: Context) -> None:
    context.run("import sys; print('half', end=''); sys.stderr.write('err')")
    assert context.output(100) == b"half"
    context.run("import ctypes; _ = ctypes.CDLL(None).printf(b'from C')")
    assert context.output(100) == b"from C"


def test_environment_of_a_run_and_of_the_context(context: Context) -> None:
    context.send(op="env", set={"KEPT": "1", "BOTH": "a"})
    look = "import os; [os.environ.get(n) for n in ('KEPT', 'BOTH', 'RUN')]"
    assert context.value(look, env={"RUN": "2", "BOTH": "b"}) == "['1', 'b', '2']"
    assert context.value(look) == "['1', 'a', None]"
    assert context.value("import subprocess; subprocess.getoutput('echo $KEPT')") == "'1'"
    context.send(op="env", set={"KEPT": None, "": "no name"})
    assert context.value(look) == "[None, 'a', None]"


def test_directory_of_a_run_stays(context: Context, tmp_path: Path) -> None:
    context.run("", cwd=str(tmp_path))
    assert context.value("import os; os.getcwd()") == repr(str(tmp_path))
    assert context.error("1", cwd="/nowhere")["name"] == "FileNotFoundError"
    (tmp_path / "here.py").write_text("x = 5")
    assert context.value("import here; here.x") == "5"


def test_channel_is_not_inherited(context: Context) -> None:
    assert context.value("import subprocess; subprocess.getoutput('ls /proc/self/fd').split()") == str(
        list("0123")
    )


def test_runs_are_counted(context: Context) -> None:
    for number, code in ((1, "1/0"), (2, "")):
        context.send(op="run", id=f"n{number}", code=code)
        assert context.receive() == {"op": "started", "id": f"n{number}", "count": number}
        while (frame := context.receive()) is not None and frame["op"] != "done":
            pass
        assert frame == {"op": "done", "id": f"n{number}", "count": number}


def test_thread_may_print_and_display_after_the_end(context: Context) -> None:
    code = """
    import threading
    gate = threading.Event()
    def late():
        gate.wait()
        print('late')
        display('late')
    thread = threading.Thread(target=late)
    thread.start()
    """
    assert context.run(code) == []
    frames = context.run("gate.set(); thread.join()")
    assert [frame["data"]["text/plain"] for frame in frames] == ["'late'"]
    assert context.output(100) == b"late\n"


def test_a_fork_with_threads_is_refused(context: Context) -> None:
    context.run(
        "import threading; gate = threading.Event(); threading.Thread(target=gate.wait, daemon=True).start()"
    )
    context.send(op="fork", id="f", count=0)
    assert context.receive() == {"op": "refused", "id": "f", "code": "context_has_threads"}
    context.send(op="dance", id="d")
    assert context.receive() == {"op": "refused", "id": "d", "code": "not_supported"}


def test_hard_exit_is_the_end_of_the_channel(context: Context) -> None:
    context.start("import os; os._exit(4)")
    assert context.receive() is None
    assert context.process.wait() == 4


def test_context_ends_with_its_host_although_threads_live(context: Context) -> None:
    context.run("import threading; threading.Thread(target=threading.Event().wait).start()")
    context.channel.close()
    assert context.process.wait() == 0


def test_start_imports_nothing_heavy(context: Context) -> None:
    loaded = context.value(
        "import sys; sorted({'re', 'json', 'typing', 'traceback', 'asyncio'} & set(sys.modules))"
    )
    bare = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "import sys; print(sorted({'re','json','typing','traceback','asyncio'} & set(sys.modules)))",
        ],
        text=True,
    )
    assert loaded == bare.strip()


def test_shared_source_cannot_be_written() -> None:
    fd = interpreter.open_source()
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
        assert os.pread(fd, 1 << 24, 0) == interpreter.source()
    finally:
        os.close(fd)


# -- figures and tables: with the libraries where they are installed, with stand-ins everywhere


@pytest.fixture
def plotting(context: Context) -> Context:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; scripts/test may install it")
    context.run("import matplotlib.pyplot as plt")
    return context


STAND_IN = """
import os, sys
os.makedirs('matplotlib', exist_ok=True)
open('matplotlib/__init__.py', 'w').close()
with open('matplotlib/figure.py', 'w') as f:
    f.write('''
class Figure:
    def __init__(self, number): self.number, self.axes = number, []
    def __repr__(self): return '<Figure %d>' % self.number
    def savefig(self, buffer, **_): buffer.write(b'png %d' % self.number)
''')
with open('matplotlib/pyplot.py', 'w') as f:
    f.write('''
from matplotlib.figure import Figure
_all = {}
def figure(number=None):
    return _all.setdefault(number or len(_all) + 1, Figure(number or len(_all) + 1))
def get_fignums(): return sorted(_all)
def close(figure): _all.pop(figure.number, None)
def show(): raise AssertionError('not ours')
''')
"""


@pytest.fixture
def pretending(context: Context, tmp_path: Path) -> Context:
    """A context that finds a pyplot of ours before any other."""
    context.run(STAND_IN, cwd=str(tmp_path))
    return context


def png(number: int) -> str:
    return base64.b64encode(b"png %d" % number).decode()


def test_open_figures_are_published_once_after_the_run(pretending: Context) -> None:
    frames = pretending.run("import matplotlib.pyplot as plt\nf, g = plt.figure(1), plt.figure(2)\n'value'")
    assert [(frame["main"], frame["data"].get("image/png")) for frame in frames] == [
        (True, None),
        (False, png(1)),
        (False, png(2)),
    ]
    assert pretending.run("") == []


def test_show_publishes_there_and_then_even_in_the_importing_cell(pretending: Context) -> None:
    code = "from matplotlib import pyplot\npyplot.figure(1)\npyplot.show()\ndisplay('between')\npyplot.figure(2)\npyplot.show()"
    frames = pretending.run(code)
    assert [frame["data"].get("image/png") for frame in frames] == [png(1), None, png(2)]


def test_figure_as_the_last_value_is_shown_once(pretending: Context) -> None:
    [frame] = pretending.run("import matplotlib.pyplot as plt\nplt.figure(3)")
    assert frame["main"]
    assert frame["data"] == {"text/plain": "<Figure 3>", "image/png": png(3)}


def test_figures_are_published_after_an_error_too(pretending: Context) -> None:
    frames = pretending.run("import matplotlib.pyplot as plt\nplt.figure(1)\n1/0")
    assert [frame["op"] for frame in frames] == ["result", "error"]


def test_failing_to_describe_a_chart_is_a_note(pretending: Context) -> None:
    [frame] = pretending.run("import matplotlib.pyplot as plt\nf = plt.figure(1)\nf.axes = 5")
    assert frame["data"]["image/png"] == png(1)
    assert "left out" in frame["extra"]["notes"][0]


def test_figure_that_cannot_be_drawn_is_an_error_once(pretending: Context) -> None:
    error = pretending.error("import matplotlib.pyplot as plt\nf = plt.figure(1)\nf.savefig = None")
    assert error["name"] == "TypeError"
    assert pretending.run("") == []


def test_backend_needs_no_display(context: Context) -> None:
    assert context.value("import os; os.environ['MPLBACKEND']") == "'Agg'"


def chart_of(plotting: Context, code: str) -> dict[str, Any]:
    frame = plotting.run(code)[-1]
    assert frame["op"] == "result", frame
    assert base64.b64decode(frame["data"]["image/png"]).startswith(b"\x89PNG")
    assert frame["extra"] == {}, frame["extra"]
    return frame["data"][interpreter.CHART]


def test_line_chart(plotting: Context) -> None:
    chart = chart_of(
        plotting,
        "plt.plot([1, 2], [3.5, float('nan')], label='a'); plt.axhline(3)\n"
        "plt.xlabel('Time (s)'); plt.ylabel('Volts'); plt.title('T'); plt.show()",
    )
    assert chart["type"] == "line"
    assert chart["elements"] == [{"label": "a", "points": [[1.0, 3.5], [2.0, None]]}]
    assert (chart["title"], chart["x_label"], chart["x_unit"]) == ("T", "Time (s)", "s")
    assert (chart["y_label"], chart["y_unit"], chart["x_scale"]) == ("Volts", None, "linear")
    assert len(chart["x_ticks"]) == len(chart["x_tick_labels"])


def test_scatter_chart_with_log_and_category_scales(plotting: Context) -> None:
    chart = chart_of(plotting, "plt.scatter(['a', 'b'], [1, 100]); plt.yscale('log')")
    assert chart["type"] == "scatter"
    assert chart["elements"] == [{"label": "", "points": [["a", 1.0], ["b", 100.0]]}]
    assert (chart["x_scale"], chart["y_scale"], chart["x_ticks"]) == ("categorical", "log", ["a", "b"])


def test_dates_are_iso(plotting: Context) -> None:
    chart = chart_of(
        plotting, "import datetime as d; plt.plot([d.datetime(2024, 1, 2), d.datetime(2024, 1, 3)], [1, 2])\n"
    )
    assert chart["x_scale"] == "datetime"
    assert chart["elements"][0]["points"][0] == ["2024-01-02T00:00:00+00:00", 1.0]


def test_bar_chart_with_groups(plotting: Context) -> None:
    chart = chart_of(
        plotting,
        "import numpy as np; x = np.arange(2)\n"
        "plt.bar(x - .2, [1, 2], .4, label='g'); plt.bar(x + .2, [3, 4], .4, label='h'); plt.xticks(x, ['A', 'B']); plt.show()",
    )
    assert chart["type"] == "bar"
    assert [(e["label"], e["group"], e["value"]) for e in chart["elements"]] == [
        ("A", "g", 1),
        ("B", "g", 2),
        ("A", "h", 3),
        ("B", "h", 4),
    ]


def test_pie_chart(plotting: Context) -> None:
    chart = chart_of(
        plotting, "plt.pie([90, 10], labels=['No', 'Yes'], autopct='%d'); plt.title('P'); plt.show()"
    )
    assert chart == {
        "type": "pie",
        "title": "P",
        "elements": [{"label": "No", "angle": 324, "radius": 1}, {"label": "Yes", "angle": 36, "radius": 1}],
    }


@pytest.mark.parametrize("style", ["", ", patch_artist=True", ", notch=True"])
def test_box_chart(plotting: Context, style: str) -> None:
    chart = chart_of(
        plotting,
        f"plt.boxplot([[1, 2, 3, 4, 5], [2, 2, 3, 4, 40]]{style}); plt.xticks([1, 2], ['a', 'b']); plt.show()",
    )
    assert chart["type"] == "box_and_whisker"
    assert chart["elements"] == [
        {"label": "a", "min": 1.0, "first_quartile": 2.0, "median": 3.0, "third_quartile": 4.0, "max": 5.0, "outliers": []},
        {"label": "b", "min": 2.0, "first_quartile": 2.0, "median": 3.0, "third_quartile": 4.0, "max": 4.0, "outliers": [40]},
    ]  # fmt: skip


def test_several_axes_are_a_superchart(plotting: Context) -> None:
    chart = chart_of(
        plotting,
        "f, (a, b) = plt.subplots(1, 2); f.suptitle('S'); a.plot([1, 2]); b.bar(['x'], [1]); plt.show()",
    )
    assert (chart["type"], chart["title"]) == ("superchart", "S")
    assert [element["type"] for element in chart["elements"]] == ["line", "bar"]


def test_unknown_and_empty_figures(plotting: Context) -> None:
    assert chart_of(plotting, "plt.imshow([[1, 2]]); plt.show()")["type"] == "unknown"
    [frame] = plotting.run("plt.figure(); plt.show()")
    assert interpreter.CHART not in frame["data"]


def test_data_frame_has_html_text_and_columns(context: Context) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed; scripts/test may install it")
    [frame] = context.run(
        "import pandas as pd; pd.DataFrame({'a': [1, 2], 't': [pd.Timestamp(2024, 1, 2), pd.NaT]})"
    )
    assert "<table" in frame["data"]["text/html"]
    assert "2024-01-02" in frame["data"]["text/plain"]
    assert frame["data"][interpreter.TABLE] == {"a": [1, 2], "t": ["2024-01-02T00:00:00", None]}
