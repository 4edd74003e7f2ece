"""The command line as users have it: real processes, each test with a state directory of its own and no keeper left."""

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BOOT = "import sys; sys.path[:0] = {path!r}; sys.argv[0] = 'cloche'; from cloche.cli.thin import main; sys.exit(main())"
SOURCES = [str(Path(__file__).parents[2] / "src")]
PATIENCE_S = 50


class Cloche:
    """One state directory, and commands on it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = home / "s"
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(home), "CLOCHE_HOME": str(self.state), "CLOCHE_KEEPER": "off",
            "XDG_CONFIG_HOME": str(home / "c"),
        }  # fmt: skip
        self.keeper: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[Any]] = []

    @property
    def socket(self) -> Path:
        return self.state / "cloche.sock"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-I", "-c", BOOT.format(path=SOURCES), *words]

    def __call__(self, *words: str, stdin: Any = b"", env: dict[str, str] | None = None, **more: Any) -> Any:
        """Run to the end; output as bytes. `stdin` is bytes or a file."""
        given = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
        return subprocess.run(
            self.argv(*words), capture_output=True, env={**self.environment, **(env or {})}, timeout=PATIENCE_S,
            **given, **more,
        )  # fmt: skip

    def start(self, *words: str, **more: Any) -> "subprocess.Popen[bytes]":
        """Start it with pipes; the test talks to it and waits for words, never for a time."""
        process = subprocess.Popen(
            self.argv(*words), stdin=more.pop("stdin", subprocess.PIPE), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**self.environment, **more.pop("env", {})}, **more,
        )  # fmt: skip
        self.started.append(process)
        return process

    def settings(self, text: str) -> None:
        (self.home / "c/cloche").mkdir(parents=True)
        (self.home / "c/cloche/settings.toml").write_text(text)

    def start_keeper(self, version: str | None = None) -> "subprocess.Popen[bytes]":
        """A keeper as a child of ours, listening when this returns."""
        reading, writing = os.pipe()
        disguise = f"import cloche; cloche.__version__ = {version!r};" if version else ""
        program = f"import os, sys; sys.path[:0] = {SOURCES!r}; os.dup2({writing}, 3); {disguise}"
        program += "from cloche.cli.keeper import main; main()"
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", "-c", program, "", "tell"], env=self.environment, pass_fds=[writing]
        )
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.readline() == b"ready\n"
        return self.keeper

    def keeper_pid(self) -> int | None:
        """The holder of the lock, if it lives."""
        try:
            pid = int((self.state / "lock").read_text().split()[0])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            return None
        return pid if b"cloche.cli.keeper" in command else None

    def keepers(self) -> list[int]:
        """Every process that is or wants to be the keeper of this state directory."""
        home = f"CLOCHE_HOME={self.state}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if b"cloche.cli.keeper" in (entry / "cmdline").read_bytes():
                    found += (
                        [int(entry.name)] if home in (entry / "environ").read_bytes().split(b"\0") else []
                    )
            except OSError:
                continue
        return found

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        while pids := self.keepers():  # one that is only starting holds no lock yet
            for pid in pids:
                stop(pid)
        if self.keeper is not None:
            self.keeper.wait(PATIENCE_S)


def stop(pid: int) -> None:
    """End a keeper that is not our child, and wait until it is gone."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    os.kill(pid, signal.SIGTERM)
    select.select([watch], [], [], PATIENCE_S)
    os.close(watch)


@pytest.fixture
def bare() -> Iterator[Cloche]:
    """No keeper, and none is started."""
    with tempfile.TemporaryDirectory(prefix="cc-", ignore_cleanup_errors=True) as home:
        made = Cloche(Path(home))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def kept(bare: Cloche) -> Cloche:
    """With a keeper that listens."""
    bare.start_keeper()
    return bare


@pytest.fixture(params=["in process", "keeper"])
def cloche(bare: Cloche, request: pytest.FixtureRequest) -> Cloche:
    """Both ways; whatever is tested with this one must not differ."""
    if request.param == "keeper":
        bare.start_keeper()
    return bare


class Terminal:
    """A command on a terminal, as a person has it."""

    def __init__(self, cloche: Cloche, *words: str, columns: int = 100, rows: int = 30) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(self.master, (rows, columns))
        self.before = termios.tcgetattr(self.master)
        environment = {**cloche.environment, "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            cloche.argv(*words), stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def read_until(self, words: bytes) -> bytes:
        """What was shown up to and with `words`; the rest is kept."""
        while words not in self.seen:
            assert select.select([self.master], [], [], PATIENCE_S)[0], self.seen
            try:
                data = os.read(self.master, 65536)
            except OSError:
                data = b""
            assert data, f"the terminal closed after {self.seen!r}"
            self.seen += data
        before, _, self.seen = self.seen.partition(words)
        return before + words

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def wait(self) -> int:
        """The exit code; what is shown meanwhile is read, so that nothing waits for us."""
        watch = os.pidfd_open(self.process.pid)
        while watch not in (ready := select.select([watch, self.master], [], [], PATIENCE_S)[0]):
            assert ready, self.seen
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                break
        os.close(watch)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self.master)


@pytest.fixture
def on_terminal() -> Iterator[Any]:
    made: list[Terminal] = []

    def start(cloche: Cloche, *words: str, **more: Any) -> Terminal:
        made.append(Terminal(cloche, *words, **more))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()
