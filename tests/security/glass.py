"""What the security tests share: sandboxes, programs to run in them, and canaries outside of them.

A forbidden thing is *tried by a program inside*, and the test looks for its effect outside: the canary's token in
what came out, the canary's bytes, mode and life on the host. What a program says about its own failure proves nothing.
"""

import functools
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloche import errors, model
from cloche.drivers import spawning
from cloche.policy import PROFILES
from cloche.sdk import portal
from cloche.sdk.sandboxes import AsyncProcess, AsyncSandbox

__all__ = ["PROFILES"]

RANGE = spawning.is_privileged()
"""Whether sandboxes have a range of uids here, and so a root user inside."""

needs_range = pytest.mark.skipif(
    not RANGE, reason="user='root' inside needs a range of uids, which only root has"
)
users = pytest.mark.parametrize("user", ["user", pytest.param("root", marks=needs_range)])
profiles = pytest.mark.parametrize("profile", PROFILES)
identities = pytest.mark.parametrize(
    ("profile", "user"),
    [
        *((profile, "user") for profile in PROFILES),
        *(
            pytest.param(profile, "root", marks=needs_range)
            for profile in PROFILES
            if profile != "restrictive"
        ),
    ],
)
"""Whom a profile has inside; `restrictive` has no root."""


def wait(work: Coroutine[Any, Any, Any]) -> Any:
    return portal.run(work)


class Box:
    """A sandbox as a blocking object."""

    def __init__(self, **options: Any) -> None:
        self.handle: AsyncSandbox = wait(AsyncSandbox.create(**options))

    @property
    def id(self) -> str:
        return self.handle.id

    def exec(self, command: "str | list[str]", **options: Any) -> model.ExecResult:
        return wait(self.handle.exec(command, **options))

    def start(self, command: "str | list[str]", **options: Any) -> AsyncProcess:
        return wait(self.handle.start(command, **options))

    def out(self, command: "str | list[str]", **options: Any) -> str:
        """The output of a command that must succeed."""
        result = self.exec(command, **options)
        assert result.exit_code == 0, (
            result.exit_code,
            result.signal,
            result.stdout[-500:],
            result.stderr[-1500:],
        )
        return result.stdout

    def python(self, source: str, *arguments: str, **options: Any) -> model.ExecResult:
        return self.exec(["python3", "-I", "-c", PRELUDE + source, *arguments], **options)

    def report(self, source: str, *arguments: str, **options: Any) -> Any:
        """What a Python program inside printed as JSON; it must have come to its end."""
        result = self.python(source, *arguments, **options)
        assert result.exit_code == 0, (
            result.exit_code,
            result.signal,
            result.stdout[-500:],
            result.stderr[-1500:],
        )
        return json.loads(result.stdout)

    def read(self, path: str, **options: Any) -> bytes:
        return wait(self.handle.files.read(path, format="bytes", **options))

    def write(self, path: str, data: "str | bytes", **options: Any) -> Any:
        return wait(self.handle.files.write(path, data, **options))

    def install(self, source: str, path: str = "/tmp/program", *flags: str) -> str:
        """Compile C on the host and put the program inside."""
        self.write(path, compile_c(source, *flags), mode=0o755)
        return path

    @property
    def files(self) -> Any:
        return Blocking(self.handle.files)

    def works(self) -> bool:
        """Whether it still serves: a command, a file, a result."""
        token = secrets.token_hex(4)
        self.write(f"/tmp/{token}", token)
        return self.out(["cat", f"/tmp/{token}"]) == token

    def delete(self) -> None:
        try:
            wait(self.handle.delete())
        except (errors.NotFound, errors.SandboxLost):
            pass  # what was tried inside may have ended it


class Blocking:
    """The methods of an asynchronous handle, waited for."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)
        return lambda *positional, **named: wait(method(*positional, **named))


@contextmanager
def box(**options: Any) -> Iterator[Box]:
    made = Box(**options)
    try:
        yield made
    finally:
        made.delete()


# Raw system calls by number, because the interesting ones have no wrapper. `nr` differs by architecture only for
# calls older than the common table.
PRELUDE = """
import ctypes, errno, fcntl, json, os, signal, socket, stat, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ARM = os.uname().machine == "aarch64"
def call(nr, *args):
    fixed = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return libc.syscall(ctypes.c_long(nr), *fixed)
def say(value):
    print(json.dumps(value))
def tried(work):
    try:
        return work()
    except BaseException as problem:
        return None
"""


@functools.cache
def compile_c(source: str, *flags: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        target = f"{directory}/program"
        command = ["gcc", "-O1", "-w", "-x", "c", "-", "-o", target, *flags]
        subprocess.run(command, input=source.encode(), check=True, capture_output=True)
        return Path(target).read_bytes()


class Canary:
    """A file on the host that no sandbox shows, and whose token nothing inside may learn."""

    def __init__(self, directory: "str | Path") -> None:
        self.token = "canary-" + secrets.token_hex(12)
        self.path = os.path.join(str(directory), self.token[:15])
        with open(self.path, "w") as file:
            file.write(self.token)
        os.chmod(self.path, 0o666)  # the worst case: only the glass protects it
        self._before = self._look()
        self._beside = sorted(os.listdir(directory))

    def _look(self) -> "tuple[int, ...]":
        info = os.stat(self.path)
        return (
            info.st_ino,
            info.st_mode,
            info.st_uid,
            info.st_gid,
            info.st_size,
            info.st_mtime_ns,
            info.st_nlink,
        )

    def is_untouched(self) -> bool:
        if not os.path.exists(self.path) or self._look() != self._before:
            return False
        directory = os.path.dirname(self.path)
        ours = [name for name in os.listdir(directory) if name.startswith(self.token[:15])]
        return Path(self.path).read_text() == self.token and ours == [os.path.basename(self.path)]

    def is_unknown_to(self, *texts: "str | bytes") -> bool:
        needle = self.token.encode()
        return all(needle not in (text.encode() if isinstance(text, str) else text) for text in texts)

    def remove(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)


class CanaryProcess:
    """A process on the host that no sandbox may signal, trace or see."""

    def __init__(self) -> None:
        self.token = "canary-" + secrets.token_hex(12)
        environment = {"CANARY": self.token}
        self.process = subprocess.Popen(
            [self.token], executable="/bin/cat", stdin=subprocess.PIPE, env=environment
        )
        self.pid = self.process.pid

    @property
    def state(self) -> str:
        """The letter of its state, and how its end came, if it did."""
        if self.process.poll() is not None:
            return f"ended {self.process.returncode}"
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    @property
    def is_well(self) -> bool:
        traced = [
            line
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if line.startswith("TracerPid")
        ]
        return self.state in ("S", "R", "D") and traced == ["TracerPid:\t0"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


async def _until(process: AsyncProcess, text: bytes) -> bytes:
    said = b""
    async for event in process.stream():
        if isinstance(event, model.Output):
            said += event.data
            if text in said:
                break
    return said


def until(process: AsyncProcess, text: bytes) -> bytes:
    """What a process wrote up to `text`, or all of it."""
    return wait(_until(process, text))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mib() -> float:
    """Memory of this process, where the engine lives."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)
