"""The package as an ordinary user of this host has it: built, installed where anybody can read it, and run as nobody known.

Runs as root start it all over as uid 12345, from a wheel in an environment of its own. That takes a while, so it begins
with the session and goes on beside the other tests; who needs a report waits for it.
"""

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
DRIVERS = {
    "namespaces": "cloche.drivers.namespaces:NamespacesDriver",
    "bubblewrap": "cloche.drivers.bubblewrap:BubblewrapDriver",
    "process": "cloche.drivers.process:ProcessDriver",
}


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
    if not list(cache.glob("*.whl")):
        shutil.rmtree(cache.parent, ignore_errors=True)
        cache.mkdir(parents=True)
        _run([sys.executable, "-m", "build", "--wheel", "--outdir", str(cache), str(ROOT)])
    return next(cache.glob("*.whl"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


Reports = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def ordinary_reports(package: Package) -> Iterator[Reports]:
    """The conformance report of each rung, as an ordinary user gets it: a line of one process, in order."""
    line = 'for driver; do "$PYTHON" -m cloche.testing.conformance --json "$driver"; done'
    with open(package.home / "talk", "w+") as talk:
        shell = package.as_user("sh", "-c", line, "sh", *DRIVERS.values())
        running = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=talk, text=True, cwd=package.home)
        known: dict[str, dict[str, Any]] = {}

        def report(name: str) -> dict[str, Any]:
            assert running.stdout is not None
            while name not in known:
                said = running.stdout.readline()
                if not said.startswith("{"):
                    pytest.fail(f"{said}{Path(talk.name).read_text()[-2000:]}", pytrace=False)
                known[list(DRIVERS)[len(known)]] = json.loads(said)
            return known[name]

        yield report
        running.terminate()
        running.communicate()


@pytest.fixture(scope="session", autouse=True)
def _begin_early(request: pytest.FixtureRequest) -> None:
    if os.geteuid() == 0 and any("ordinary_reports" in item.fixturenames for item in request.session.items):  # type: ignore[attr-defined]
        request.getfixturevalue("ordinary_reports")
