"""What a server says when it starts is true, and what `deploy/` has is fit to start one."""

import configparser
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche import settings
from cloche.cli import main
from tests.server import conftest
from tests.server.conftest import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
GUIDE = Path(__file__).parents[2] / "docs/guides/deploying.md"


class Unit(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def unit() -> Unit:
    made = Unit(strict=True, interpolation=None)
    made.read(DEPLOY / "cloche.service")
    return made


def environment(home: Path) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home), "CLOCHE_HOME": str(home / "s"),
        "CLOCHE_KEEPER": "off", "XDG_CONFIG_HOME": str(home / "c"),
    }  # fmt: skip


@contextmanager
def served(words: list[str], around: list[str], home: Path, **more: str) -> Iterator["subprocess.Popen[str]"]:
    """A server of its own, started by these words; it must end well."""
    process = subprocess.Popen(
        [*around, *conftest.argv(*words)],
        env={**environment(home), **more},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


# ── cloche serve ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "many"], "many"),
        (["--host", "0.0.0.0", "--port", "0"], "--tls-cert"),
        (["--host", "203.0.113.7", "--port", "0", "--insecure"], "cannot listen"),
        (["--config", "/nonexistent/settings.toml"], "/nonexistent/settings.toml"),
        (["--prot", "1"], "--port"),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path, words, said):
    ended = subprocess.run(
        conftest.argv("serve", *words),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode not in (0, 1)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_three_lines_to_try_work_as_they_are_printed(tmp_path):
    with served(["serve", "--port", "0"], [], tmp_path) as process:
        assert process.stdout is not None
        told: list[str] = []
        while len([line for line in told if line.startswith("  ")]) < 3:
            line = process.stdout.readline()
            assert line, told
            told.append(line)
        assert re.fullmatch(rf"serving on http://127\.0\.0\.1:\d+ and {tmp_path}/s/cloche\.sock\n", told[0])
        assert told[1] == f"the key is in {tmp_path}/s/keys/default.key\n"
        lines = [line.strip() for line in told if line.startswith("  ")]
        results = [
            subprocess.run(
                ["bash", "-c", line],
                env=environment(tmp_path),
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            for line in lines
        ]
        for line, result in zip(lines, results, strict=True):
            assert result.returncode == 0, (line, result.stderr)
        assert "Linux" in json.loads(results[0].stdout)["stdout"]
        assert [line for line in results[1].stdout.splitlines() if line.startswith("event: ")] == [
            "event: start", "event: stdout", "event: stdout", "event: stdout", "event: exit",
        ]  # fmt: skip
        assert results[2].stdout == "hello from a sandbox\n"


def test_its_address_socket_and_settings_are_where_they_were_asked_for(tmp_path):
    config = tmp_path / "other.toml"
    config.write_text('[server]\nhost = "127.0.0.9"\nmax_body_mib = 1\nport = 1\n')
    words = [
        "serve",
        "--json",
        "--config",
        str(config),
        "--port",
        "0",
        "--socket",
        str(tmp_path / "mine.sock"),
    ]
    with served(words, [], tmp_path) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["url"].startswith("http://127.0.0.9:")
        assert not told["url"].endswith(":1")
        assert told["socket"] == str(tmp_path / "mine.sock")
        ran = subprocess.run(
            conftest.argv("run", "--", "echo", "by its name"), capture_output=True, text=True, timeout=PATIENCE_S,
            env={**environment(tmp_path), "CLOCHE_URL": f"unix:{tmp_path}/mine.sock"},
        )  # fmt: skip
        assert ran.stdout == "by its name\n", ran.stderr
    assert not (tmp_path / "mine.sock").exists()


# ── deploy/ ────────────────────────────────────────────────────────────────────────────────────────


def test_the_unit_s_command_is_one_of_ours(unit):
    program, verb, *words = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "cloche"
    known = {option for flag in main.flags_of(verb) for option in flag.option_strings}
    assert {word for word in words if word.startswith("--")} <= known
    assert float(unit["Service"]["TimeoutStopSec"]) > settings.Server().drain_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(tmp_path, unit):
    text = (DEPLOY / "cloche.service").read_text()
    copy = tmp_path / "cloche.service"
    copy.write_text(text.replace(unit["Service"]["ExecStart"].split()[0], sys.executable))
    ended = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "cloche.service" not in ended.stderr, ended.stderr


@pytest.mark.root
def test_the_unit_s_capabilities_are_enough_and_it_says_when_it_is_ready(tmp_path, unit):
    """Started as the unit would: with its bounding set, and a manager that listens."""
    names = [name.removeprefix("CAP_").lower() for name in unit["Service"]["CapabilityBoundingSet"].split()]
    kept = "-all," + ",".join(f"+{name}" for name in names)
    around = ["setpriv", "--bounding-set", kept, "--inh-caps", "-all", "--no-new-privs"]
    manager = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(manager)
        heard.settimeout(PATIENCE_S)
        with served(["serve", "--port", "0", "--json"], around, tmp_path, NOTIFY_SOCKET=manager) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert heard.recv(1000).decode().split("\n") == ["READY=1", f"STATUS=serving on {told['url']}"]
            key = Path(told["key_file"]).read_text().strip()
            made = conftest.Served(told["url"], key, tmp_path, process, environment(tmp_path))
            with made.client() as client:
                rules = {"network": {"mode": "rules", "allow": ["allowed.example"]}}
                info = client.post("/v1/sandboxes", json={"policy": rules}).raise_for_status().json()
                assert info["isolation"]["level"] == "namespaces"
                assert {limit["enforcement"] for limit in info["limits"].values()} == {"enforced"}
                command = "id -u; curl -s --max-time 20 http://denied.example/ | grep -c denied"
                url = f"/v1/sandboxes/{info['id']}"
                assert client.post(f"{url}/exec", json={"command": command}).json()["stdout"] == "1000\n1\n"
                assert client.post(f"{url}/suspend").status_code == 200
                assert client.post(f"{url}/snapshots", json={}).status_code == 201
                asked = {"command": "id -u", "user": "root"}
                assert client.post(f"{url}/exec", json=asked).json()["stdout"] == "0\n"
        assert heard.recv(1000) == b"STOPPING=1"


def test_the_container_s_recipe_uses_what_is_there():
    """No engine for containers runs here; what can be held is that its files, its command and its variables exist."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {
        "FROM",
        "RUN",
        "COPY",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in steps} <= known
    assert steps[0][0] == "FROM"
    for name, rest in steps:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (DEPLOY.parent / source).exists(), source
    by_name = dict(steps)
    assert json.loads(by_name["ENTRYPOINT"]) == ["cloche"]
    verb, *words = json.loads(by_name["CMD"])
    options = {option for flag in main.flags_of(verb) for option in flag.option_strings}
    assert {word for word in words if word.startswith("--")} <= options
    assert words[words.index("--port") + 1] == by_name["EXPOSE"]
    assert by_name["ENV"].startswith("CLOCHE_HOME=" + by_name["VOLUME"])


def test_the_guide_names_files_that_are_there():
    for path in re.findall(r"\]\(([^)#:]+)", GUIDE.read_text()):
        assert (GUIDE.parent / path).resolve().exists(), path
