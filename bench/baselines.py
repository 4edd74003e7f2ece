"""What a row is compared with, timed by the same client in the same run: the floor, bubblewrap, plain processes.

bubblewrap gets the mounts of a Cloche sandbox as far as it can make them (0.8 has no overlays, so the root is bound
read-only and the private directories are tmpfs), every namespace, and our own filter. It does without limits, disk,
Landlock and a uid range, so what stands beside us does less than we do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from cloche.images import host
from cloche.linux import mounts, seccomp

ECHO = ["/bin/echo", "x"]


def elapsed(work: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    before = time.perf_counter()
    work()
    return (time.perf_counter() - before) * 1e3


class Floor:
    """bench/floor.c, compiled into a temporary directory and asked for one round at a time."""

    def __init__(self, directory: str) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise LookupError("there is no C compiler (cc) for bench/floor.c")
        program = os.path.join(directory, "floor")
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "floor.c")
        subprocess.run([compiler, "-O2", "-o", program, source], check=True, capture_output=True)
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def measure(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b".")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise LookupError("the floor cannot be measured: this host refuses clone() with all namespaces")
        return float(line) / 1e3

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def first_byte(command: list[str], *, pass_fds: tuple[int, ...] = ()) -> float:
    """Milliseconds from the call of Popen to the first byte of the command's output."""
    before = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0, pass_fds=pass_fds
    ) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        taken = (time.perf_counter() - before) * 1e3
        process.stdout.read()
    if not byte:
        raise LookupError(f"{command[0]} printed nothing (exit {process.returncode})")
    return taken


class Bubblewrap:
    """bwrap with the same mounts and the same filter."""

    def __init__(self, home: str) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise LookupError("bubblewrap is not installed")
        image = host.prepare(os.path.join(home, "images"))
        self._filter = tempfile.TemporaryFile()  # noqa: SIM115
        self._filter.write(seccomp.build("moderate"))
        self._filter.flush()
        self._command = [program, *self._mounts(image), *self._rest()]

    def _mounts(self, image: host.HostImage) -> list[str]:
        made = ["--ro-bind", image.skeleton, "/"]
        for layer in sorted(image.layers, key=lambda path: path.count("/")):
            made += ["--ro-bind", layer, layer]
        for path in mounts.PRIVATE:
            made += ["--tmpfs", path]
        made += ["--dev", "/dev", "--tmpfs", "/dev/shm", "--proc", "/proc"]
        for name in mounts.MASKED:
            if os.path.isfile(f"/proc/{name}"):
                made += ["--ro-bind", "/dev/null", f"/proc/{name}"]
        return made

    def _rest(self) -> list[str]:
        environment = [word for pair in host.environment().items() for word in ("--setenv", *pair)]
        return [
            "--unshare-all", "--uid", "1000", "--gid", "1000", "--hostname", "cloche", "--cap-drop", "ALL",
            "--new-session", "--die-with-parent", "--clearenv", *environment, "--chdir", "/workspace",
            "--seccomp", str(self._filter.fileno()), "--",
        ]  # fmt: skip

    def measure(self) -> float:
        self._filter.seek(0)  # the descriptor's offset is shared with the bwrap that read it before
        return first_byte([*self._command, *ECHO], pass_fds=(self._filter.fileno(),))

    def close(self) -> None:
        self._filter.close()


class Calculator:
    """A plain Python child that evaluates what it is sent: what `run_code` would cost without a sandbox."""

    def __init__(self) -> None:
        program = "import sys\nfor line in sys.stdin: print(repr(eval(line)), flush=True)"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, line: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def run_true() -> None:
    subprocess.run(["true"], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def write_and_run(path: str, text: str) -> None:
    """Replace a program and run it, as `files.write` and `exec` do inside."""
    draft = path + ".new"
    with open(draft, "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o755)
    os.replace(draft, path)
    subprocess.run([path], check=True, stdin=subprocess.DEVNULL, capture_output=True)
