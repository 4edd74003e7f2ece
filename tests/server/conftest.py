"""A real `cloche serve` for the whole session, and clients of it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx
import pytest

SOURCES = str(Path(__file__).parents[2] / "src")
BOOT = f"import sys; sys.path[:0] = [{SOURCES!r}]; sys.argv[0] = 'cloche'; from cloche.cli.thin import main; sys.exit(main())"
PATIENCE_S = 50


class Served(NamedTuple):
    url: str
    key: str
    home: Path
    process: "subprocess.Popen[str]"
    environment: dict[str, str]

    def client(self, key: str | None = None, **more: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False, **more)

    def cloche(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            argv(*words), capture_output=True, text=True, env=self.environment, timeout=PATIENCE_S
        )


class Clock:
    """A moment that moves when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def argv(*words: str) -> list[str]:
    return [sys.executable, "-I", "-c", BOOT, *words]


def serve(home: Path, *words: str, settings: str = "", stderr: IO[str] | None = None) -> Served:
    (home / "c/cloche").mkdir(parents=True, exist_ok=True)
    (home / "c/cloche/settings.toml").write_text(settings)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "CLOCHE_HOME": str(home / "s"), "CLOCHE_KEEPER": "off",
        "XDG_CONFIG_HOME": str(home / "c"),
    }  # fmt: skip
    process = subprocess.Popen(
        argv("serve", "--port", "0", "--json", *words), env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start"
    told = json.loads(line)
    return Served(told["url"], Path(told["key_file"]).read_text().strip(), home, process, environment)


def stop(served: Served) -> int:
    served.process.send_signal(signal.SIGTERM)
    code = served.process.wait(PATIENCE_S)
    assert served.process.stdout is not None
    served.process.stdout.close()
    return code


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = serve(Path(home))
        try:
            yield made
        finally:
            assert stop(made) == 0


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def box(http: httpx.Client) -> Iterator[str]:
    """A sandbox, by its id."""
    made = http.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
    yield made
    http.delete(f"/v1/sandboxes/{made}")
