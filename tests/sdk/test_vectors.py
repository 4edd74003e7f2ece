"""The shared vectors twice over: through the Python SDK, and as plain HTTP requests; the TypeScript suite is the third.

The Python SDK speaks frames with a server, not these routes, so what a vector says about the wire is checked by the other two and what it
says about results by all three.
"""

import base64
import json
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import cloche
from cloche import errors, model
from tests.sdk import vectors
from tests.server import conftest as server

pytestmark = [pytest.mark.timeout(300)]
ALL = vectors.load()


@pytest.fixture(scope="module")
def served() -> Iterator[server.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = server.serve(Path(home))
        try:
            yield made
        finally:
            assert server.stop(made) == 0


# ── the files themselves ───────────────────────────────────────────────────────────────────────────


def test_there_are_vectors_of_every_noun_and_refusals_among_them():
    names = [name for name, _ in ALL]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    steps = [step for _, vector in ALL for step in vector["steps"]]
    assert {name.partition("/")[0] for name in names} == {
        "contexts", "executions", "files", "images", "policies", "pools", "processes", "runs", "sandboxes", "snapshots", "volumes",
    }  # fmt: skip
    assert len(ALL) >= 60
    assert sum("error" in step for step in steps) >= 40


def test_a_vector_says_only_what_is_read():
    for name, vector in ALL:
        assert set(vector) <= {"name", "about", "box", "steps", "without"}, name
        for step in vector["steps"]:
            assert set(step) <= {"call", "arguments", "save", "take", "result", "error", "wire"}, name
            assert not ("result" in step and "error" in step), name
            for request in step["wire"]:
                assert set(request) <= {
                    "method", "path", "query", "body", "raw", "idempotent", "status", "answer", "events", "save", "take",
                }, name  # fmt: skip


def test_a_wrong_expectation_fails():
    for expected, actual in (
        ({"a": 1}, {"a": 2}), ({"a": 1}, {}), ([1], [1, 2]), ({"$match": "^x"}, "y"), ({"$has": [{"a": 1}]}, [{"a": 2}]),
        ({"$length": 1}, []), ({"$min": 2}, 1), ({"$type": "string"}, 1), (None, 0), (b"x", b"y"),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            vectors.compare(expected, actual, "it")


# ── through the SDK ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "vector", [pytest.param(v, id=name) for name, v in ALL if "python" not in v.get("without", {})]
)
def test_the_sdk(served, vector, monkeypatch):
    monkeypatch.setenv("CLOCHE_API_KEY", served.key)
    names: dict[str, Any] = {"unique": uuid.uuid4().hex[:8]}
    box = vector.get("box", {})
    if box is not False:
        names["box"] = cloche.Sandbox(server=served.url, **vectors.fill(box, names))
    try:
        for step in vector["steps"]:
            _perform(step, names, served.url)
    finally:
        if "box" in names:
            with suppress(errors.NotFound, errors.SandboxLost):
                names["box"].delete()


def _perform(step: dict[str, Any], names: dict[str, Any], url: str) -> None:
    arguments = vectors.fill(step.get("arguments", {}), names)
    problem = outcome = None
    try:
        outcome = _call(step["call"], arguments, names, url, step.get("take"))
    except errors.ClocheError as raised:
        problem = raised
    if "error" in step:
        assert problem is not None, f"{step['call']} did not fail with {step['error']!r}"
        told = {"class": type(problem).__name__, "retryable": problem.retryable, **problem.to_dict()}
        vectors.compare(step["error"], told, step["call"])
        return
    assert problem is None, f"{step['call']}: {problem!r}"
    if "save" in step:
        names[step["save"]] = outcome
    if "result" in step:
        vectors.compare(vectors.fill(step["result"], names), outcome, step["call"])


def _call(
    name: str, arguments: dict[str, Any], names: dict[str, Any], url: str, take: dict[str, str] | None
) -> Any:
    match name:
        case "Sandbox.create":
            return cloche.Sandbox(server=url, **arguments)
        case "Pool.create":
            return cloche.Pool(server=url, **arguments)
        case "put_template":
            return cloche.put_template(cloche.Template(**arguments["template"]), server=url)
        case "run":
            return cloche.run(server=url, **arguments)
    noun, _, verb = name.rpartition(".")
    if noun in ("Sandbox", "Snapshot", "Volume", "Pool", "Image"):
        return getattr(getattr(cloche, noun), verb)(server=url, **arguments)
    outcome = getattr(vectors.find(names, noun), verb)(**arguments)
    if verb in ("exec_stream", "stream"):
        return _gathered(outcome, take or {})
    if verb in ("run_code_stream", "run_stream"):
        return _told(outcome)
    return b"".join(outcome) if arguments.get("format") == "stream" else outcome


def _gathered(events: Iterable[model.StreamEvent], take: dict[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {"stdout": b"", "stderr": b""}
    for event in events:
        if isinstance(event, model.Output):
            told[event.stream] += event.data
        elif isinstance(event, model.Exited):
            told["result"] = event.result
        if take and all(text.encode() in told[stream] for stream, text in take.items()):
            break
    return told


def _told(events: Iterable[model.CodeEvent]) -> dict[str, Any]:
    told: dict[str, Any] = {"stdout": "", "stderr": "", "shown": []}
    for event in events:
        match event:
            case model.CodeOutput(stream=stream, text=text):
                told[stream] += text
            case model.CodeShown(result=shown):
                told["shown"].append(shown)
            case model.CodeFailed(error=failed):
                told["failed"] = failed
            case model.CodeEnded(result=whole):
                told["result"] = whole
    return told


# ── over the wire ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vector", [pytest.param(v, id=name) for name, v in ALL])
def test_the_wire(served, vector):
    names: dict[str, Any] = {"unique": uuid.uuid4().hex[:8]}
    with served.client() as http:
        box = vector.get("box", {})
        if box is not False:
            made = http.post("/v1/sandboxes", json=vectors.fill(box, names))
            names["box"] = made.raise_for_status().json()
        try:
            for step in vector["steps"]:
                for request in step["wire"]:
                    _send(http, step, request, names, last=request is step["wire"][-1])
        finally:
            if "box" in names:
                http.delete(f"/v1/sandboxes/{names['box']['id']}")


def _send(
    http: httpx.Client, step: dict[str, Any], request: dict[str, Any], names: dict[str, Any], last: bool
) -> None:
    where = f"{request['method']} {request['path']}"
    said = {
        key: vectors.fill(request[key], names) for key in ("path", "query", "body", "raw") if key in request
    }
    raw = said.get("raw")
    content = raw.encode() if isinstance(raw, str) else raw
    headers = {"Idempotency-Key": uuid.uuid4().hex} if request.get("idempotent") else {}
    with http.stream(
        request["method"], said["path"], params=said.get("query"), json=said.get("body"), content=content, headers=headers
    ) as response:  # fmt: skip
        streams = response.headers.get("content-type", "").startswith("text/event-stream")
        answer = (
            _events(response, request.get("take", {}))
            if streams
            else _content(response.read(), response.headers)
        )
    code = step.get("error", {}).get("code") if last else None
    status = request.get("status", errors.TABLE[code].http if isinstance(code, str) else None)
    if isinstance(status, dict):
        vectors.compare(status, response.status_code, where)
    elif status is not None:
        assert response.status_code == status, f"{where}: {answer!r}"
    else:
        assert response.is_success or step.get("error"), f"{where}: {answer!r}"
    if last and "save" in step:
        names[step["save"]] = answer
    for name, path in request.get("save", {}).items():
        whole, _, field = name.partition(".")
        if field:
            names[whole] = {**names.get(whole, {}), field: vectors.find(answer, path)}
        else:
            names[whole] = vectors.find(answer, path)
    if (expected := _expected(step, request, last)) is not None:
        vectors.compare(vectors.fill(expected, names), answer, where)


def _expected(step: dict[str, Any], request: dict[str, Any], last: bool) -> Any:
    for key in ("events", "answer"):
        if key in request:
            return request[key]
    if not last:
        return None
    if "error" in step:
        return {"error": {"code": step["error"]["code"]}}
    result = step.get("result")
    return result if isinstance(result, dict) else None


def _content(data: bytes, headers: httpx.Headers) -> Any:
    return json.loads(data) if headers.get("content-type") == "application/json" else Content(data)


class Content(bytes):
    """A body that equals its text too: a vector writes bytes only where it must."""

    def __eq__(self, other: object) -> bool:
        return bytes(self) == (other.encode() if isinstance(other, str) else other)

    __hash__ = bytes.__hash__


def _events(response: httpx.Response, take: dict[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {"stdout": b"", "stderr": b""}
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            data = json.loads(line[6:])
            if kind in ("stdout", "stderr"):
                told[kind] += data["text"].encode() if "text" in data else base64.b64decode(data["data"])
            elif kind in ("exit", "error", "failed"):
                told["result" if kind == "exit" else kind] = data
        if take and all(text.encode() in told[stream] for stream, text in take.items()):
            break
    return told
