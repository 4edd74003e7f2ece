"""What the tests of the SDK share: programs that run in an interpreter of their own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def python() -> Python:
    """Run a program and give back what it said; it must succeed."""

    def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            env=_environment(), capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


@pytest.fixture
def start_python() -> Callable[[str], "subprocess.Popen[str]"]:
    """Start a program to talk to."""

    def start(program: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start
