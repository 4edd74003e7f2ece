"""Schemathesis against a running server: what the document promises, the server does, for every operation that it describes.

It makes thousands of requests from the document alone (its examples, every boundary of every schema, random ones, and chains of
operations), the same ones every time, and looks at each answer: no failure of ours, a status that is documented for that operation,
its media type, headers and schema; what the schema forbids is refused; without a key there is no answer.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cloche.server.http import openapi, wire
from cloche.server.http.routes import TABLE
from tests.server import conftest
from tests.server.test_http import events

ROOT = Path(__file__).parents[2]
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "missing_required_header", "unsupported_method",
    "allow_header_conformance", "ignored_auth", "use_after_free",
)  # fmt: skip
STREAMS = [made for made in TABLE.operations.values() if made.streams]


@pytest.fixture(scope="module")
def own() -> Iterator[conftest.Served]:
    """A server that nobody else uses: all of it may be changed and deleted."""
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = conftest.serve(Path(home))
        try:
            yield made
        finally:
            assert conftest.stop(made) == 0


@pytest.fixture(scope="module")
def here(own: conftest.Served) -> dict[str, str]:
    """One of each noun, by the name of its place in a path."""
    with own.client() as http:
        box = http.post("/v1/sandboxes", json={"timeout_s": 3600}).raise_for_status().json()["id"]
        at = f"/v1/sandboxes/{box}"
        ran = http.post(f"{at}/exec", json={"command": "echo hello > notes.txt"}).raise_for_status().json()
        context = http.post(f"{at}/contexts", json={}).raise_for_status().json()["id"]
        http.post(f"{at}/snapshots", json={"name": "kept"}).raise_for_status()
        http.post("/v1/volumes", json={"name": "kept", "size_mib": 8}).raise_for_status()
    return {
        "sandbox": box, "execution": ran["execution"], "context": context, "snapshot": "kept", "volume": "kept", "name": "base",
    }  # fmt: skip


def strict() -> dict[str, Any]:
    """The document without "any other error": every status must have been foreseen for its operation."""
    document = json.loads(openapi.encoded(TABLE))
    for methods in document["paths"].values():
        for described in methods.values():
            del described["responses"]["default"]
    return document


@pytest.mark.timeout(400)
def test_every_operation_keeps_its_word(own, here, tmp_path):
    (tmp_path / "openapi.json").write_text(json.dumps(strict()))
    excluded = [word for made in STREAMS for word in ("--exclude-operation-id", made.name)]
    (tmp_path / "schemathesis.toml").write_text(
        '[phases.coverage]\nunexpected-methods = ["PATCH"]\n[phases.stateful]\ngeneration = { max-examples = 50 }\n'
    )
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", tmp_path / "schemathesis.toml", "run", tmp_path / "openapi.json", "--url", own.url,
        "-H", f"Authorization: Bearer {own.key}", "--checks", ",".join(CHECKS), "--workers", "1",
        "--phases", "examples,coverage,fuzzing,stateful", "--generation-deterministic", "--max-examples", "4",
        "--continue-on-failure", "--suppress-health-check", "all", "--request-timeout", "50", "--warnings", "off", "--no-color",
        *excluded,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.server.contract_hooks",
        "CONTRACT_HERE": " ".join(f"{name}={value}" for name, value in here.items()),
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "*",
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    made = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", done.stdout)
    assert made is not None
    assert int(made[1]) == int(made[3]) == len(TABLE.operations) - len(STREAMS)
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None
    assert int(cases[1]) == int(cases[2]) > 2000
    assert own.process.poll() is None


# ── streams, which schemathesis would read to an end that does not come ────────────────────────────

BODIES: dict[str, Any] = {
    "run_stream": {"command": "echo out; echo err >&2; printf '\\377'"},
    "stream_code": {"code": "import sys\nprint('o')\nprint('e', file=sys.stderr)\ndisplay(1)\n1 / 0"},
    "pull_image": {"reference": "docker://127.0.0.1:1/no/such:1"},
    "build_image": {"recipe": {"from": "docker://127.0.0.1:1/no/such:1"}},
}
QUERIES = {"watch_files": {"path": "."}}


@pytest.mark.parametrize("made", STREAMS, ids=lambda made: made.name)
def test_a_stream_keeps_its_word(own, here, made):
    """What it answers is documented, and every event is one of those that it names, with data of that type."""
    path = made.path
    for name in made.places:
        path = path.replace("{" + name + "}", here.get(name, "none"))
    documented = openapi.document(TABLE)["paths"][made.path][made.method.lower()]["responses"]
    with (
        own.client() as http,
        http.stream(made.method, path, json=BODIES.get(made.name), params=QUERIES.get(made.name)) as response,
    ):
        assert str(response.status_code) in documented, response.read()
        assert response.headers["x-request-id"]
        if response.status_code != 200:
            kind = "application/json"
            assert response.headers["content-type"] == kind
            assert json.loads(response.read())["error"]["code"] in openapi.codes(made)
            return
        assert response.headers["content-type"].startswith("text/event-stream")
        told = watched(own, here, made.name, response)
    known = {**made.events, "error": wire.Broken}
    for name, data in told:
        assert name in known, f"{made.name} told {name}, which is not one of its events"
        msgspec.convert(data, known[name])
    assert told


def watched(
    own: conftest.Served, here: dict[str, str], name: str, response: httpx.Response
) -> list[tuple[str, Any]]:
    """Some events: all of a stream that ends, the first of one that does not."""
    if name == "watch_files":
        with own.client() as other:
            other.put(
                f"/v1/sandboxes/{here['sandbox']}/files", params={"path": "seen"}, content=b"x"
            ).raise_for_status()
    endless = name in ("watch_files", "follow_events", "follow_asks")
    told: list[tuple[str, Any]] = []
    for kind, data, _ in events(response):
        told.append((kind, data))
        if endless:
            break
    return told


def test_a_client_without_a_key_gets_no_stream(own, here):
    with httpx.Client(base_url=own.url, trust_env=False) as stranger:
        for made in STREAMS:
            path = re.sub(r"\{(\w+)\}", lambda found: here.get(found[1], "none"), made.path)
            assert stranger.request(made.method, path, json={}).status_code == 401, made.name
