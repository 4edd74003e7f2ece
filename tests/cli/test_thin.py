"""The thin client's promise is its weight: what it loads, and that it says by itself only what is plainly right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.cli import thin

HEAVY = {
    "argparse", "ast", "asyncio", "base64", "collections", "concurrent", "ctypes", "dataclasses", "enum", "functools",
    "inspect", "json", "json.decoder", "logging", "msgspec", "pathlib", "re", "selectors", "signal", "socket", "subprocess",
    "tempfile", "threading", "traceback", "typing",
}  # fmt: skip

PROGRAM = """
import sys
before = set(sys.modules)
sys.path[:0] = {path!r}
sys.argv = ["cloche", *{words!r}]
from cloche.cli import thin
def leave(code):
    sys.stderr.write("\\n".join(sorted(set(sys.modules) - before)))
    sys.stderr.flush()
    import os
    os._exit(code)
thin.leave = leave
thin.main()
"""


@pytest.mark.parametrize(
    "words",
    [["run", "--env", "A=b", "--", "echo", "hi"], ["exec", "one", "--", "echo", "hi"]],
    ids=["run", "exec"],
)
def test_a_run_through_a_keeper_loads_next_to_nothing(kept, words):
    assert kept("create", "--name", "one").returncode == 0
    program = PROGRAM.format(path=[str(Path(__file__).parents[2] / "src")], words=words)
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program],
        capture_output=True,
        env=kept.environment,
        timeout=50,
        input=b"",
    )
    assert (ran.returncode, ran.stdout) == (0, b"hi\n")
    loaded = set(ran.stderr.decode().split())
    assert loaded & HEAVY == set()
    assert {name for name in loaded if name.startswith("cloche")} == {
        "cloche", "cloche.cli", "cloche.cli.thin", "cloche.framing"
    }  # fmt: skip
    assert len(loaded) <= 14, loaded


UNUSED = {
    "_posixsubprocess", "_ssl", "argparse", "ast", "dis", "lzma", "shutil", "tempfile", "tokenize", "typing_extensions",
}  # fmt: skip


def test_a_run_without_a_keeper_loads_nothing_that_it_does_not_use(bare):
    """The first run in a state directory formats a disk and makes a skeleton; every other pays for its imports only."""
    assert bare("run", "--", "true").returncode == 0
    program = PROGRAM.format(path=[str(Path(__file__).parents[2] / "src")], words=["run", "--", "echo", "hi"])
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program],
        capture_output=True,
        env=bare.environment,
        timeout=50,
        input=b"",
    )
    assert (ran.returncode, ran.stdout) == (0, b"hi\n")
    loaded = set(ran.stderr.decode().split())
    assert "cloche.drivers.beginning" in loaded
    assert loaded & UNUSED == set()


# ── the scan ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "words",
    [
        ["run"], ["run", "--"], ["run", "--nope", "--", "x"], ["run", "--memory"], ["run", "--memory", "x", "--", "y"],
        ["run", "--memory", "nan", "--", "y"], ["run", "--memory", "inf", "--", "y"], ["run", "--network", "opn", "--", "y"],
        ["run", "--policy", "f", "--", "y"], ["run", "--help"], ["run", "-h"], ["run", "--allow=x", "--network=off", "--", "y"], ["run", "--resolve", "a:1", "--", "y"],
        ["run", "--tty=yes", "--", "y"], ["run", "--jsn", "y"], ["exec"], ["exec", "id"], ["exec", "id", "--"],
        ["exec", "--keep", "id", "--", "x"], ["exec", "--profile", "x", "id", "--", "y"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_not_plainly_right_is_left_to_the_parser(words):
    assert thin.scan(words) is None


def test_the_scan_takes_flags_in_both_spellings_up_to_the_command():
    options = thin.scan(
        ["run", "--memory=64", "--cpus", "0.5", "--tty", "--overlay", "echo", "--json", "--", "x"]
    )
    assert options is not None
    assert (options.resources, options.tty, options.json) == ({"memory_mib": 64, "cpus": 0.5}, True, False)
    assert options.spec == {"overlay": True}
    assert options.request["command"] == ["echo", "--json", "--", "x"]


def test_exec_takes_its_sandbox_and_then_the_command():
    options = thin.scan(["exec", "--cwd", "/tmp", "box", "ls", "-l"])
    assert options is not None
    assert (options.sandbox, options.request["command"]) == ("box", ["ls", "-l"])
    assert options.arguments()["request"]["cwd"] == "/tmp"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -3,
        1.5,
        "",
        'a"\\\n\x00é漢😀',
        [],
        [1, "a", None],
        {},
        {"a": {"b": [True]}, "é": "x"},
    ],
    ids=repr,
)
def test_what_is_written_is_json(value):
    assert json.loads(thin.encode(value)) == value


def test_bytes_that_are_no_text_ride_as_surrogates():
    assert json.loads(thin.encode("a\udcff")) == "a\udcff"


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"CLOCHE_HOME": "/a"}, "/a/cloche.sock"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/cloche/cloche.sock"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/cloche/cloche.sock"),
        ({"CLOCHE_URL": "unix:/u.sock", "CLOCHE_HOME": "/a"}, "/u.sock"),
        ({"CLOCHE_URL": "unix:///u.sock"}, "/u.sock"),
        ({"CLOCHE_URL": "http://localhost:7777", "CLOCHE_HOME": "/a"}, None),
        ({"CLOCHE_HOME": "relative"}, None),
        ({"CLOCHE_HOME": "/" + "x" * 107}, None),
        ({}, None),
    ],
    ids=str,
)
def test_where_a_keeper_would_listen(environment, path):
    assert thin.socket_path(environment) == path


def test_modules_that_come_later_are_as_ever_when_they_come():
    """The engine in process leaves imports of asyncio for later; whoever looks gets the real thing."""
    program = (
        "import sys; sys.path[:0] = {path!r}\n"
        "from cloche.cli import here\n"
        "asyncio = here._import_asyncio()\n"
        "assert 'ssl' not in sys.modules and 'ast' not in sys.modules and 'locale' not in sys.modules\n"
        "import inspect, linecache, platform, subprocess, traceback, msgspec\n"
        "assert len(traceback.extract_stack()) == 1\n"
        "assert subprocess.run(['true']).returncode == 0\n"
        "assert platform.system() == 'Linux' and platform.python_version()\n"
        "assert inspect.signature(here.run) and linecache.getline(here.__file__, 1)\n"
        "assert msgspec.json.schema(int) == {{'type': 'integer'}}\n"
        "async def fail(): raise ValueError('said')\n"
        "try: asyncio.run(fail())\n"
        "except ValueError: assert 'said' in traceback.format_exc()\n"
        "import ssl\n"
    ).format(path=[str(Path(__file__).parents[2] / "src")])
    ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=50)
    assert (ran.returncode, ran.stderr) == (0, b"")
