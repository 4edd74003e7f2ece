"""The real clients: each pinned pair of SDKs in an environment of its own below `.cache`, driven by a worker there.

A worker is a small program that takes source text on its input and tells what `answer` was, or what was raised. It keeps its names between
calls, so that a test reads like a user's program; what became of it is then asked of our own API.
"""

import fcntl
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import conftest as server

ROOT = Path(__file__).parents[3]
PAIRS = {
    "newest": ("e2b==2.63.0", "e2b-code-interpreter==2.11.5"),
    "2.45": ("e2b==2.45.1", "e2b-code-interpreter==2.9.1"),
    "2.31": ("e2b==2.31.0", "e2b-code-interpreter==2.8.1"),
}
PATIENCE_S = 120
WORKER = """
import json, sys, traceback
names = {}
out = sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    names.pop("answer", None)
    try:
        exec(compile(json.loads(line), "program", "exec"), names)
        told = {"answer": names.get("answer")}
    except BaseException as problem:
        told = {"raised": type(problem).__name__, "words": str(problem), "trace": traceback.format_exc()}
    out.write(json.dumps(told, default=str) + "\\n")
    out.flush()
"""

served, http = server.served, server.http


class Raised(Exception):
    """What the SDK raised: the name of its class, and its words."""

    def __init__(self, name: str, words: str, trace: str) -> None:
        super().__init__(f"{name}: {words}\n{trace}")
        self.name = name
        self.words = words


class Client:
    """A program that uses the SDK."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, source: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(textwrap.dedent(source)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the client's program ended"
        told = json.loads(line)
        if "raised" in told:
            raise Raised(told["raised"], told["words"], told["trace"])
        return told["answer"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait(PATIENCE_S)


def environment_of(pair: str) -> Path:
    """The Python that has a pair of SDKs; made once, by whoever comes first."""
    place = ROOT / ".cache" / "e2b" / f"{pair}-{sys.version_info.major}.{sys.version_info.minor}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = " ".join(PAIRS[pair])
        done = place / "done"
        if not done.exists() or done.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True, timeout=PATIENCE_S)
            pip = [str(place / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *PAIRS[pair]], check=True, timeout=5 * PATIENCE_S)
            done.write_text(wanted)
    return place / "bin/python"


def client_of(
    pair: str,
    served: server.Served,
    key: str | None = None,
    variables: dict[str, str] | None = None,
    command: list[str] | None = None,
) -> Client:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(served.home),
        "E2B_API_KEY": (key or served.key).replace("cl_", "e2b_"),
        "E2B_API_URL": served.url,
        "E2B_SANDBOX_URL": served.url,
        "PYTHONDONTWRITEBYTECODE": "1",
        **(variables or {}),
    }
    return Client(command or [str(environment_of(pair)), "-c", WORKER], environment)


@pytest.fixture(scope="session")
def program(served: server.Served) -> Iterator[Client]:
    """A program that has imported the newest SDKs."""
    made = client_of("newest", served)
    try:
        made("import e2b, asyncio, time\nfrom e2b_code_interpreter import Sandbox")
        yield made
    finally:
        made.close()


@pytest.fixture
def box(program: Client) -> Iterator[str]:
    """`box` in the program: a sandbox that the SDK made. Here: its id."""
    yield program("box = Sandbox.create(timeout=600)\nanswer = box.sandbox_id")
    program("box.kill()")
