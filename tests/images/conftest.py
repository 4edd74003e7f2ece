"""A real registry on loopback, with and without a password, and engines with images of their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cloche import engine, model, wiring
from tests.images import layouts

# `htpasswd -nbB` of "cloche" / "glass": a test's own, for a registry that lives as long as the test.
HTPASSWD = "cloche:$2y$05$abcdefghijklmnopqrstuuVYVVhOr9hz7LkfTIS4MKNMtxM2Z7OWK\n"
CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {place}/data}}}}
http: {{addr: "127.0.0.1:{port}", debug: {{addr: "127.0.0.1:0"}}}}
{auth}
"""


class Registry(NamedTuple):
    host: str

    def push(self, layout: Path, name: str, *, auth_file: Path | None = None) -> str:
        """Put a layout's image there; its reference."""
        extra = ["--authfile", str(auth_file)] if auth_file else []
        subprocess.run(
            ["skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", *extra, f"oci:{layout}", f"docker://{self.host}/{name}"],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        return f"{self.host}/{name}"


def need(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here: scripts/install brings it")


def serve(place: Path, *, password: bool) -> Iterator[Registry]:
    need("docker-registry", "skopeo")
    for _ in range(5):  # a port that is free now may be taken in a moment
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (place / "htpasswd").write_text(HTPASSWD)
        auth = f"auth: {{htpasswd: {{realm: test, path: {place}/htpasswd}}}}" if password else ""
        (place / "config.yml").write_text(CONFIG.format(place=place, port=port, auth=auth))
        with (place / "log").open("wb") as log:
            child = subprocess.Popen(
                ["docker-registry", "serve", place / "config.yml"], stdout=log, stderr=log, cwd=place
            )
        try:
            if _answers(child, port):
                yield Registry(f"127.0.0.1:{port}")
                return
        finally:
            child.kill()
            child.wait()
    pytest.fail(f"the registry does not start: {(place / 'log').read_text()[-2000:]}")


def _answers(child: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 30
    while child.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    yield from serve(tmp_path_factory.mktemp("registry"), password=False)


@pytest.fixture(scope="module")
def locked_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    yield from serve(tmp_path_factory.mktemp("locked"), password=True)


def write_auth(path: Path, registry: Registry, password: str = "glass") -> Path:
    credentials = b64encode(f"cloche:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {registry.host: {"auth": credentials}}}))
    return path


@pytest.fixture
def home() -> Iterator[Path]:
    """A state directory of the test's own."""
    path = Path(tempfile.mkdtemp(prefix="cl-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A layout whose image has a shell and little else."""
    need("skopeo")
    layouts.write_layout(
        tmp_path / "small",
        layouts.small_root(),
        layouts.layer(
            layouts.entry("etc/greeting", b"hello\n"), layouts.entry("opt/mine", b"1\n", uid=1000, gid=1000)
        ),
        config={
            "Env": ["GREETING=hi", "PATH=/bin:/opt/bin", "HOME=/elsewhere"],
            "User": "app",
            "WorkingDir": "/opt",
            "Cmd": ["sh"],
        },
    )
    return tmp_path / "small"


Work = Callable[[engine.Engine], Awaitable[object]]
WithEngine = Callable[..., None]


@pytest.fixture
def with_engine(home: Path) -> WithEngine:
    """Run work on an engine with these settings of images, and close it."""
    environment = {**os.environ, "CLOCHE_HOME": str(home / "s"), "XDG_CONFIG_HOME": str(home / "c")}

    def run(work: Work, *, build: dict[str, object] | None = None, **chosen: object) -> None:
        (home / "c/cloche").mkdir(parents=True, exist_ok=True)
        groups = {"images": chosen, "build": {"allow": [], **(build or {})}}
        text = "".join(f"[{name}]\n{''.join(map(_line, group.items()))}" for name, group in groups.items())
        (home / "c/cloche/settings.toml").write_text(text)

        async def inside() -> None:
            made = wiring.make_engine(environment)
            try:
                await work(made)
            finally:
                await made.aclose()

        asyncio.run(inside())

    return run


def _line(pair: tuple[str, object]) -> str:
    name, value = pair
    if isinstance(value, dict):
        return f"{name} = {{ {', '.join(f'{key} = {json.dumps(inner)}' for key, inner in value.items())} }}\n"
    return f"{name} = {json.dumps(value)}\n"


async def pulled(made: engine.Engine, reference: str) -> model.ImageInfo:
    last = [progress async for progress in made.pull_image(reference)][-1]
    assert last.image is not None
    return last.image


async def output(made: engine.Engine, sandbox: str, line: str, user: str = "user") -> str:
    result = await made.exec(sandbox, model.ExecRequest(command=line, user=user))
    assert result.exit_code == 0, (line, result.stderr)
    return result.stdout
