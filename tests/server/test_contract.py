"""The description of our HTTP API is a contract: it is what the server does, it is checked in, and it does not break unannounced."""

import base64
import copy
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import typing
from html.parser import HTMLParser
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from cloche import errors, rpc
from cloche.cli import serving
from cloche.server.http import examples, openapi, operations, reference
from cloche.server.http.routes import TABLE
from tests.server import conftest

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads(openapi.encoded(TABLE))
OPERATIONS = list(TABLE.operations.values())


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made


diff = script("openapi_diff")


def described(made: operations.Operation) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][made.path.replace(":path", "")][made.method.lower()]
    return found


# ── what is checked in ─────────────────────────────────────────────────────────────────────────────


def test_the_copy_in_the_documentation_has_not_drifted():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/generate_openapi", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_break_is_unannounced():
    released = json.loads((ROOT / "docs/reference/openapi.released.json").read_text())
    announced = (ROOT / "docs/reference/api-changes.md").read_text()
    silent = [line for line in diff.breaks(released, DOCUMENT) if line not in announced]
    assert silent == [], "announce each in docs/reference/api-changes.md, word for word, or take it back"


# ── what it says ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_an_operation_is_described_whole(made):
    found = described(made)
    assert found["operationId"] == made.name
    assert found["summary"].strip()
    assert found["tags"][0] in [tag["name"] for tag in DOCUMENT["tags"]]
    for code in made.errors:
        assert code in errors.TABLE, f"{made.name} names an error that is none: {code}"
    answers = [diff._resolved(given, DOCUMENT) for given in found["responses"].values()]
    told = [code for answer in answers for code in answer.get("x-codes", [])]
    assert set(openapi.codes(made)) <= set(told)
    if made.streams:
        assert made.events, "a stream says what its events are called"


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_every_example_is_of_its_type(made):
    if made.body not in (None, bytes):
        body = described(made)["requestBody"]["content"]["application/json"]["examples"]["usual"]["value"]
        msgspec.convert(body, made.body)
    if (
        made.result not in (bytes, type(None))
        and typing.get_origin(made.result) is not operations.Stream
        and made.scope
    ):
        answer = described(made)["responses"][str(made.status)]["content"]["application/json"]["examples"][
            "usual"
        ]
        msgspec.convert(answer["value"], made.result)
    for kind in made.events.values():
        msgspec.convert(examples.of(kind), kind)


def test_everything_that_the_sdk_can_is_an_operation():
    sources = "".join(file.read_text() for file in (ROOT / "src/cloche/server/http").rglob("*.py"))
    used = set(re.findall(r"backend\.(\w+)\(", sources))
    assert set(rpc.methods()) - used == {"read_file"}  # which is the stream of a file, whole


def test_every_reference_leads_somewhere():
    for target in set(re.findall(r'"\$ref":\s*"([^"]+)"', openapi.encoded(TABLE).decode())):
        diff._resolved({"$ref": target}, DOCUMENT)


def test_fields_have_their_words():
    fields = DOCUMENT["components"]["schemas"]["Create"]["properties"]
    assert "coding agent" in fields["mode"]["description"]


# ── the page ───────────────────────────────────────────────────────────────────────────────────────


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.inline: dict[str, list[str]] = {"style": [], "script": []}
        self._in = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self._in = tag
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        self.loads += [
            value or "" for name, value in attributes if name == "src" or (tag == "link" and name == "href")
        ]
        assert not any(name.startswith("on") or name == "style" for name in given)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in self.inline:
            self.inline[self._in].append(data)


def test_the_page_stands_alone(http):
    answer = http.get("/docs", headers={"Authorization": ""})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Page()
    page.feed(answer.text)
    assert page.loads == []
    assert len(set(page.ids)) == len(page.ids)
    assert {link for link in page.links if not link.startswith("#")} == {"/openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} - {"schemas"} <= set(page.ids)
    assert {made.name for made in OPERATIONS} <= set(page.ids)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    for kind, texts in page.inline.items():
        (text,) = texts
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert http.get("/docs", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_text_in_the_page_is_text():
    bad = copy.deepcopy(DOCUMENT)
    bad["info"]["description"] = "<script>alert(1)</script>"
    bad["paths"] = {"/<b>": {"get": {**described(OPERATIONS[0]), "summary": "<i>x</i> `<u>`"}}}
    page = reference.page(json.dumps(bad).encode()).decode()
    assert "<script>alert" not in page
    assert "<i>x</i>" not in page
    assert "<code>&lt;u&gt;</code>" in page


def test_the_document_is_served_without_a_key(http):
    answer = http.get("/openapi.json", headers={"Authorization": ""})
    assert answer.json() == DOCUMENT
    assert http.get("/openapi.json", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


# ── what is a break, and what is not ───────────────────────────────────────────────────────────────

NOUN = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "phase": {"enum": ["on", "off"]}, "size": {"type": "integer"}},
    "required": ["id"],
}
BODY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer", "minimum": 1, "maximum": 9}, "mode": {"enum": ["a", "b"]},
                   "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "more": {"type": "object", "additionalProperties": {"type": "integer"}}},
    "required": ["name"],
}  # fmt: skip
BASE = {
    "paths": {
        "/things": {
            "post": {
                "operationId": "make_thing",
                "x-scope": "things",
                "parameters": [
                    {"name": "limit", "in": "query", "required": False, "schema": {"type": "integer", "maximum": 9}},
                    {"name": "If-Match", "in": "header", "required": False, "schema": {"type": "string"}},
                ],
                "requestBody": {"required": False, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}},
                "responses": {
                    "201": {"headers": {"ETag": {}}, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Noun"}}}},
                    "409": {"x-codes": ["thing_exists"]},
                },
            },
            "get": {
                "operationId": "follow_things",
                "security": [],
                "responses": {
                    "200": {"content": {"text/event-stream": {"schema": {"type": "string"}, "x-events": {"made": {"$ref": "#/components/schemas/Noun"}}}}}
                },
            },
        },
        "/gone": {"get": {"operationId": "gone", "responses": {"204": {}}}},
    },
    "components": {"schemas": {"Noun": NOUN, "Body": BODY}},
}  # fmt: skip
POST = ("paths", "/things", "post")
GET = ("paths", "/things", "get")
IN = ("components", "schemas", "Body")
OUT = ("components", "schemas", "Noun")
GONE = object()


def changed(*changes: tuple[tuple[Any, ...], Any]) -> dict[str, Any]:
    new = copy.deepcopy(BASE)
    for path, value in changes:
        place: Any = new
        for step in path[:-1]:
            place = place[step]
        if value is GONE:
            del place[path[-1]]
        else:
            place[path[-1]] = value
    return new


BREAKS: dict[str, tuple[list[Any], str]] = {
    "a path goes": ([(("paths", "/gone"), GONE)], "/gone: the path is gone"),
    "an operation goes": ([(POST, GONE)], "POST /things: the operation is gone"),
    "an operation id changes": ([((*POST, "operationId"), "create")], "operationId was 'make_thing' and is 'create'"),
    "another scope is needed": ([((*POST, "x-scope"), "admin")], "x-scope was 'things' and is 'admin'"),
    "a key is needed": ([((*GET, "security"), [{"key": []}])], "needs a key now"),
    "a parameter goes": ([((*POST, "parameters"), [])], "the query parameter limit is gone"),
    "a parameter is required": ([((*POST, "parameters", 0, "required"), True)], "the query parameter limit is required now"),
    "a new parameter is required": (
        [((*GET, "parameters"), [{"name": "at", "in": "query", "required": True, "schema": {}}])], "at is new and required",
    ),
    "a parameter's type changes": ([((*POST, "parameters", 0, "schema"), {"type": "string"})], "integer is not taken any more"),
    "a parameter's bound tightens": ([((*POST, "parameters", 0, "schema", "maximum"), 5)], "maximum is 5 now"),
    "a body is required": ([((*POST, "requestBody", "required"), True)], "the body is required now"),
    "a body goes": ([((*POST, "requestBody"), GONE)], "the body is gone"),
    "a body is new and required": ([((*GET, "requestBody"), {"required": True, "content": {}})], "a body is required now"),
    "a media type goes": ([((*POST, "requestBody", "content"), {"text/plain": {}})], "no longer application/json"),
    "a field of the body goes": ([((*IN, "properties", "count"), GONE)], "the body.count is gone"),
    "a field of the body is required": ([((*IN, "required"), ["name", "mode"])], "the body.mode is required now"),
    "a new field of the body is required": (
        [((*IN, "properties", "new"), {"type": "string"}), ((*IN, "required"), ["name", "new"])], "the body.new is new and required",
    ),
    "a field of the body is of another type": ([((*IN, "properties", "name"), {"type": "integer"})], "name: string is not taken any more"),
    "null is not taken": ([((*IN, "properties", "note"), {"type": "string"})], "note: null is not taken any more"),
    "a value of the body goes": ([((*IN, "properties", "mode"), {"enum": ["a"]})], 'mode: the value "b" is gone'),
    "text becomes a choice": ([((*IN, "properties", "name"), {"enum": ["x"]})], "only some values are taken now"),
    "a bound appears": ([((*IN, "properties", "name", "maxLength"), 5)], "maxLength is 5 now"),
    "a lower bound rises": ([((*IN, "properties", "count", "minimum"), 2)], "minimum is 2 now"),
    "a pattern appears": ([((*IN, "properties", "name", "pattern"), "^a")], "pattern is '^a' now"),
    "the values of a map narrow": (
        [((*IN, "properties", "more", "additionalProperties"), {"type": "string"})], "more, values: integer is not taken",
    ),
    "unknown fields are refused": ([((*IN, "additionalProperties"), False)], "unknown fields are refused now"),
    "a status changes": (
        [((*POST, "responses", "200"), BASE["paths"]["/things"]["post"]["responses"]["201"]), ((*POST, "responses", "201"), GONE)],  # type: ignore[index]
        "the answer 201 is gone",
    ),
    "an answer's media type goes": ([((*POST, "responses", "201", "content"), {"text/plain": {}})], "no longer application/json"),
    "a header goes": ([((*POST, "responses", "201", "headers"), {})], "no header ETag any more"),
    "a field of the answer goes": ([((*OUT, "properties", "size"), GONE)], "the answer 201.size is gone"),
    "a field of the answer may be missing": ([((*OUT, "required"), [])], "the answer 201.id may be left out now"),
    "a field of the answer is of another type": ([((*OUT, "properties", "size"), {"type": "string"})], "size: may be string now"),
    "a field of the answer may be null": (
        [((*OUT, "properties", "id"), {"anyOf": [{"type": "string"}, {"type": "null"}]})], "id: may be null now",
    ),
    "a value of the answer goes": ([((*OUT, "properties", "phase"), {"enum": ["on"]})], 'phase: the value "off" is gone'),
    "an error has another status": (
        [((*POST, "responses", "409"), GONE), ((*POST, "responses", "412"), {"x-codes": ["thing_exists"]})], "thing_exists was 409 and is 412",
    ),
    "an event goes": ([((*GET, "responses", "200", "content", "text/event-stream", "x-events"), {})], "the event made is gone"),
}  # fmt: skip

WIDENINGS: dict[str, list[Any]] = {
    "a path": [(("paths", "/new"), {"get": {"operationId": "n", "responses": {"200": {}}}})],
    "an operation": [(("paths", "/gone", "post"), {"operationId": "p", "responses": {"200": {}}})],
    "an optional parameter": [((*GET, "parameters"), [{"name": "x", "in": "query", "required": False, "schema": {}}])],
    "a wider bound": [((*POST, "parameters", 0, "schema", "maximum"), 99)],
    "no bound": [((*POST, "parameters", 0, "schema"), {"type": "integer"})],
    "a number for an integer": [((*IN, "properties", "count"), {"type": "number", "minimum": 1, "maximum": 9})],
    "no key": [((*POST, "security"), [])],
    "another media type": [((*POST, "requestBody", "content", "text/plain"), {"schema": {}})],
    "an optional body": [((*GET, "requestBody"), {"required": False, "content": {}})],
    "an optional field": [((*IN, "properties", "new"), {"type": "string"})],
    "a field that need not be given": [((*IN, "required"), [])],
    "another type that is taken": [((*IN, "properties", "name"), {"anyOf": [{"type": "string"}, {"type": "integer"}]})],
    "another value that is taken": [((*IN, "properties", "mode"), {"enum": ["a", "b", "c"]})],
    "a choice that becomes text": [((*IN, "properties", "mode"), {"type": "string"})],
    "a field of the answer": [((*OUT, "properties", "new"), {"type": "string"})],
    "a field that is always there": [((*OUT, "required"), ["id", "size"])],
    "a narrower answer": [((*OUT, "properties", "size"), {"type": "integer", "minimum": 0})],
    "another value of the answer": [((*OUT, "properties", "phase"), {"enum": ["on", "off", "paused"]})],
    "another status of failure": [((*POST, "responses", "429"), {"x-codes": ["rate_exceeded"]})],
    "another code of a status": [((*POST, "responses", "409", "x-codes"), ["thing_exists", "thing_busy"])],
    "another event": [((*GET, "responses", "200", "content", "text/event-stream", "x-events", "lost"), {"type": "object"})],
    "other words": [((*POST, "summary"), "Otherwise"), ((*IN, "description"), "Words")],
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_seen(name):
    changes, told = BREAKS[name]
    found = diff.breaks(BASE, changed(*changes))
    assert any(told in line for line in found), found


@pytest.mark.parametrize("name", WIDENINGS)
def test_a_widening_is_none(name):
    assert diff.breaks(BASE, changed(*WIDENINGS[name])) == []


def test_a_document_is_compared_with_itself_whatever_it_refers_to():
    looped = copy.deepcopy(BASE)
    looped["components"]["schemas"]["Noun"]["properties"]["child"] = {"$ref": "#/components/schemas/Noun"}  # type: ignore[index]
    assert diff.breaks(looped, looped) == []
    assert diff.breaks(DOCUMENT, DOCUMENT) == []


def test_the_diff_is_a_command(tmp_path):
    (tmp_path / "old").write_text(json.dumps(BASE))
    (tmp_path / "new").write_text(json.dumps(changed((POST, GONE))))
    command = [sys.executable, ROOT / "scripts/openapi_diff", tmp_path / "old"]
    broken = subprocess.run([*command, tmp_path / "new"], capture_output=True, text=True)
    assert (broken.returncode, broken.stdout) == (1, "POST /things: the operation is gone\n")
    assert subprocess.run([*command, tmp_path / "old"], capture_output=True).returncode == 0


# ── the lines that people paste ────────────────────────────────────────────────────────────────────


def pasted(served: conftest.Served, text: str, **variables: str) -> str:
    """A block of a page, run as it stands but for the address and the key."""
    text = text.replace("localhost:7777", served.url.removeprefix("http://"))
    text = text.replace("~/.local/state/cloche", str(served.home / "s"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        capture_output=True, text=True, timeout=50, env={**served.environment, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(page: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_lines_of_the_reference_work(served, http):
    out = pasted(served, blocks("reference/http.md")[0])
    assert '"name":"build"' in out
    assert '"stdout":"hello\\n"' in out
    assert http.get("/v1/sandboxes/build").status_code in (404, 410)


def test_the_lines_of_the_guide_work(served, http, box):
    try_it, *others = blocks("guides/server.md")
    out = pasted(served, try_it)
    assert '"stdout":"Linux ' in out
    assert [f'"text":"{n}\\n"' in out for n in (1, 2, 3)] == [True] * 3
    change = next(block for block in others if "If-Match" in block)
    out = pasted(served, change, ID=box, KEY=served.key)
    assert '"allow":["pypi.org"]' in out


def test_the_lines_that_serve_prints_work(served, capsys):
    serving._greet(served.url, "socket", str(served.home / "s/keys/default.key"), as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "/run " in line]
    assert '"stdout":"Linux ' in pasted(served, line)
