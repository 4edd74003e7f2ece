"""The package as an ordinary user of this host has it: built, installed where anybody can read it, and run as nobody known.

Runs as root start it all over as uid 12345, from a wheel in an environment of its own. That takes a while, so it begins
with a driver's module and goes on beside the module's tests; the last one waits for the report.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
UID = 12345
AS_USER = ("setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups")


class Package(NamedTuple):
    """An installed wheel, and a user to run it as."""

    python: str
    home: Path

    def command(self, *arguments: str) -> list[str]:
        clean = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", f"HOME={self.home}", f"TMPDIR={self.home}"]
        return [
            *clean,
            f"CLOCHE_HOME={self.home}/s",
            "CLOCHE_KEEPER=off",
            f"PYTHON={self.python}",
            *arguments,
        ]

    def as_user(self, *arguments: str) -> list[str]:
        return [*AS_USER, *self.command(*arguments)]


@pytest.fixture(scope="session")
def package() -> Iterator[Package]:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    python = _reachable_python()
    place = Path(tempfile.mkdtemp(prefix="cl-"))
    try:
        place.chmod(0o755)
        home = place / "h"
        home.mkdir()
        os.chown(home, UID, UID)
        wheel = _wheel()
        # Below a umask that lets others read, whatever the caller's is.
        making = [
            python,
            "-I",
            str(ROOT / "scripts" / "environment.py"),
            str(place / "e"),
            "--wheel",
            str(wheel),
        ]
        _run(["sh", "-c", 'umask 022; exec "$@"', "sh", *making])
        yield Package(str(place / "e" / "bin" / "python"), home)
    finally:
        shutil.rmtree(place)


def _reachable_python() -> str:
    """The running interpreter if anybody may run it, else the system's."""
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    probe = ["-I", "-c", "import sys, venv; sys.exit(sys.version_info < (3, 11))"]
    for python in (base, "/usr/bin/python3", "/usr/local/bin/python3"):
        # By way of env: setpriv itself still has root's rights when it executes.
        tried = subprocess.run([*AS_USER, "env", python, *probe], capture_output=True)
        if tried.returncode == 0:
            return python
    pytest.skip("no Python from 3.11 on that an ordinary user can reach")


def _wheel() -> Path:
    """A wheel of the sources as they are, built once for as long as they stay so."""
    digest = hashlib.sha256()
    for file in [ROOT / "pyproject.toml", *sorted((ROOT / "src").rglob("*.py"))]:
        digest.update(file.read_bytes())
    cache = ROOT / ".cache" / "wheels" / digest.hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may want it at once
        if not list(cache.glob("*.whl")):
            _run([sys.executable, "-m", "build", "--wheel", "--outdir", str(cache), str(ROOT)])
            _forget_old(cache.parent)
    return next(cache.glob("*.whl"))


def _forget_old(wheels: Path) -> None:
    """All but the latest few: another worker may be installing one that is just out of date."""
    for old in sorted(wheels.iterdir(), key=lambda path: path.stat().st_mtime)[:-4]:
        shutil.rmtree(old)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


Report = Callable[[], dict[str, Any]]


@pytest.fixture(scope="module")
def ordinary_report(request: pytest.FixtureRequest, package: Package) -> Iterator[Report]:
    """The conformance report of the module's driver, as an ordinary user gets it."""
    command = package.as_user(
        package.python, "-m", "cloche.testing.conformance", "--json", request.module.DRIVER
    )
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as talk:
        running = subprocess.Popen(command, stdout=said, stderr=talk, cwd=package.home)

        def report() -> dict[str, Any]:
            running.wait()
            said.seek(0)
            talk.seek(0)
            text = said.read()
            assert text.startswith("{"), text[-1000:] + talk.read()[-2000:]
            found: dict[str, Any] = json.loads(text)
            return found

        yield report
        running.terminate()
        running.wait()


@pytest.fixture(scope="module", autouse=True)
def _begin_early(request: pytest.FixtureRequest) -> None:
    if os.geteuid() == 0 and hasattr(request.module, "DRIVER"):
        request.getfixturevalue("ordinary_report")
