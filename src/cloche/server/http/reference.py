"""The OpenAPI document as one page for people, made here: no script, font or style from anywhere else, so it works offline and behind
any policy of content. All text is escaped; the only script is the search, and the page's policy names it by its hash.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shlex
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2024;--soft:#5c6670;--line:#dfe3e8;--panel:#f6f8fa;--accent:#0b6e4f}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e4e7ea;--soft:#9aa4ae;--line:#2c3238;--panel:#1c2126;--accent:#5fd0a8}}
*{box-sizing:border-box}html{scroll-padding-top:1rem}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif;display:grid;grid-template-columns:20rem minmax(0,1fr)}
nav{position:sticky;top:0;height:100vh;overflow:auto;border-right:1px solid var(--line);padding:1rem;background:var(--panel);font-size:.875rem}
nav h2{font-size:.75rem;text-transform:uppercase;letter-spacing:.06em;color:var(--soft);margin:1rem 0 .25rem}
nav a{display:block;padding:.1rem 0;color:inherit;text-decoration:none;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
nav a:hover,nav a:focus{color:var(--accent)}
input{width:100%;padding:.5rem;font:inherit;border:1px solid var(--line);border-radius:.375rem;background:var(--back);color:inherit}
main{padding:1.5rem 2rem 6rem;max-width:62rem}
section{border-top:1px solid var(--line);padding:1.25rem 0}
h1{margin:0}h3{margin:0 0 .25rem;font-size:1.125rem}h4{margin:1rem 0 .25rem;font-size:.875rem;color:var(--soft)}
code,pre{font:.875rem/1.45 ui-monospace,monospace}
pre{background:var(--panel);border:1px solid var(--line);border-radius:.375rem;padding:.75rem;overflow:auto;max-height:26rem;margin:.25rem 0}
table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}
.method{display:inline-block;min-width:4rem;font-weight:600;color:var(--accent)}
.soft{color:var(--soft)}a{color:var(--accent)}
@media(max-width:50rem){body{display:block}nav{position:static;height:auto;max-height:45vh}}
@media print{nav{display:none}body{display:block}}
"""
SCRIPT = """
const box=document.getElementById("search"),parts=[...document.querySelectorAll("[data-words]")],none=document.getElementById("none");
const look=()=>{const words=box.value.toLowerCase().split(/\\s+/).filter(Boolean);let shown=0;
for(const part of parts){const hit=words.every(word=>part.dataset.words.includes(word));part.hidden=!hit;if(hit&&part.tagName==="SECTION")shown++}
for(const group of document.querySelectorAll("nav div"))group.hidden=!group.querySelector("a:not([hidden])");none.hidden=shown>0};
box.addEventListener("input",look);document.addEventListener("keydown",event=>{
if(event.key==="/"&&document.activeElement!==box){event.preventDefault();box.focus()}if(event.key==="Escape"&&document.activeElement===box){box.value="";look()}});
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@functools.lru_cache(maxsize=2)
def page(encoded: bytes) -> bytes:
    """The page of an encoded document."""
    document = json.loads(encoded)
    return "".join(_Page(document).whole()).encode()


class _Page:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        order = [tag["name"] for tag in document["tags"]]
        found = [
            (method.upper(), path, described)
            for path, methods in document["paths"].items()
            for method, described in methods.items()
        ]
        self._operations = sorted(found, key=lambda one: order.index(one[2]["tags"][0]))

    def whole(self) -> Iterator[str]:
        info = self._document["info"]
        title = f"{info['title']} {info['version']}: HTTP API"
        yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        yield f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><nav>"
        yield '<input id="search" type="search" placeholder="Search  ( / )" aria-label="Search operations" autocomplete="off">'
        yield from self._contents()
        yield f"</nav><main><h1>{escape(title)}</h1>"
        for paragraph in info["description"].split("\n\n"):
            yield f"<p>{_marked(paragraph)}</p>"
        yield '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>. Keys go in <code>Authorization: Bearer cl_…</code> or '
        yield '<code>X-API-Key</code>.</p><p id="none" hidden>Nothing matches.</p>'
        for method, path, described in self._operations:
            yield from self._operation(method, path, described)
        yield "<h2>Schemas</h2>"
        for name, schema in self._document["components"]["schemas"].items():
            yield from self._schema(name, schema)
        yield f"</main><script>{SCRIPT}</script></body></html>"

    def _contents(self) -> Iterator[str]:
        for tag in self._document["tags"]:
            yield f"<div><h2 title='{escape(tag['description'])}'>{escape(tag['name'])}</h2>"
            for method, path, described in self._operations:
                if tag["name"] in described["tags"]:
                    shown = f"{method} {path}: {described['summary']}"
                    words = _words(method, path, described)
                    yield f'<a href="#{escape(described["operationId"])}" title="{escape(shown)}" data-words="{words}">'
                    yield f"{escape(described['operationId'].replace('_', ' '))}</a>"
            yield "</div>"
        yield '<div><h2>Schemas</h2><a href="#schemas" hidden></a>'
        for name in self._document["components"]["schemas"]:
            yield f'<a href="#{escape(name)}" data-words="{escape(name.lower())}">{escape(name)}</a>'
        yield "</div>"

    # ── an operation ──────────────────────────────────────────────────────────────────────────────

    def _operation(self, method: str, path: str, described: dict[str, Any]) -> Iterator[str]:
        name = escape(described["operationId"])
        yield f'<section id="{name}" data-words="{_words(method, path, described)}">'
        yield f'<h3><span class="method">{method}</span><code>{escape(path)}</code></h3><p>{_marked(described["summary"])}'
        scope = described.get("x-scope")
        needs = f"needs the scope <code>{escape(scope)}</code>" if scope else "needs no key"
        yield f' <span class="soft">{needs} · <a href="#{name}">{name}</a></span></p>'
        for paragraph in filter(None, described.get("description", "").split("\n\n")):
            yield f"<p>{_marked(paragraph)}</p>"
        yield f"<pre>{escape(self._curl(method, path, described))}</pre>"
        yield from self._parameters(described.get("parameters", []))
        yield from self._body(described.get("requestBody"))
        yield from self._responses(described["responses"])
        yield "</section>"

    def _parameters(self, parameters: list[dict[str, Any]]) -> Iterator[str]:
        if not parameters:
            return
        yield "<h4>Parameters</h4><table>"
        for one in parameters:
            schema = one["schema"]
            words = one.get("description") or schema.get("description", "")
            must = "required" if one["required"] else _default(schema)
            yield f"<tr><td><code>{escape(one['name'])}</code></td><td class=soft>{one['in']}</td><td>{self._kind(schema)}</td>"
            yield f"<td>{must}</td><td>{_marked(words)}</td></tr>"
        yield "</table>"

    def _body(self, body: dict[str, Any] | None) -> Iterator[str]:
        if body is None:
            return
        for media, content in body["content"].items():
            need = "" if body["required"] else ", may be left out"
            yield f"<h4>Body: <code>{escape(media)}</code>{need}</h4><p>{self._kind(content['schema'])}</p>"

    def _responses(self, responses: dict[str, Any]) -> Iterator[str]:
        yield "<h4>Answers</h4><table>"
        for status, given in responses.items():
            answer = self._resolved(given)
            codes = answer.get("x-codes")
            words = (
                " ".join(f"<code>{escape(code)}</code>" for code in codes)
                if codes and status != "default"
                else _marked(answer["description"])
            )
            kinds = [
                f"<code>{escape(media)}</code> {self._kind(content['schema'])}"
                for media, content in answer.get("content", {}).items()
                if not codes
            ]
            yield f"<tr><td><code>{status}</code></td><td>{words} {' '.join(kinds)}</td></tr>"
        yield "</table>"
        for given in responses.values():
            for content in self._resolved(given).get("content", {}).values():
                yield from self._events(content)
                if "$ref" not in given and "x-codes" not in given:
                    for example in content.get("examples", {}).values():
                        value = example.get("value")
                        text = (
                            value
                            if isinstance(value, str)
                            else json.dumps(value, indent=2, ensure_ascii=False)
                        )
                        yield f"<pre>{escape(text)}</pre>"

    def _events(self, content: dict[str, Any]) -> Iterator[str]:
        events = content.get("x-events", {})
        if events:
            yield "<h4>Events</h4><table>"
            for name, schema in events.items():
                yield f"<tr><td><code>{escape(name)}</code></td><td>{self._kind(schema)}</td></tr>"
            yield "</table>"

    def _curl(self, method: str, path: str, described: dict[str, Any]) -> str:
        query = []
        for one in described.get("parameters", []):
            if one["in"] == "path":
                path = path.replace("{" + one["name"] + "}", str(one.get("example", "NAME")))
            elif one["in"] == "query" and one["required"]:
                query.append(f"{one['name']}={one.get('example', 'VALUE')}")
        address = "http://127.0.0.1:7777" + path + ("?" + "&".join(query) if query else "")
        words = [
            "curl",
            *(["-N"] if self._streams(described) else []),
            *(["-X", method] if method != "GET" else []),
        ]
        line = " ".join([*words, shlex.quote(address)])
        if described.get("x-scope"):
            line += ' \\\n  -H "Authorization: Bearer $CLOCHE_API_KEY"'
        for media, content in (described.get("requestBody") or {}).get("content", {}).items():
            line += f" \\\n  -H 'Content-Type: {media}'"
            example = next(iter(content.get("examples", {}).values()), None)
            line += " \\\n  " + (
                "--data-binary @FILE"
                if example is None
                else "-d " + shlex.quote(json.dumps(example["value"]))
            )
        return line

    def _streams(self, described: dict[str, Any]) -> bool:
        return any(
            "text/event-stream" in self._resolved(given).get("content", {})
            for given in described["responses"].values()
        )

    # ── schemas ───────────────────────────────────────────────────────────────────────────────────

    def _schema(self, name: str, schema: dict[str, Any]) -> Iterator[str]:
        yield f'<section id="{escape(name)}" data-words="{escape(name.lower())}"><h3><code>{escape(name)}</code></h3>'
        yield f"<p>{_marked(schema.get('description', ''))}</p><table>"
        for field, kind in schema.get("properties", {}).items():
            must = "required" if field in schema.get("required", ()) else _default(kind)
            yield f"<tr><td><code>{escape(field)}</code></td><td>{self._kind(kind)}</td><td>{must}</td>"
            yield f"<td>{_marked(kind.get('description', ''))}</td></tr>"
        yield "</table></section>"

    def _kind(self, schema: dict[str, Any]) -> str:
        """A type in a few words."""
        if "$ref" in schema:
            name = escape(schema["$ref"].rsplit("/", 1)[1])
            return f'<a href="#{name}"><code>{name}</code></a>'
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return " or ".join(self._kind(one) for one in schema[word])
        if "enum" in schema:
            return " | ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
        if schema.get("type") == "array":
            if "prefixItems" in schema:
                return "[" + ", ".join(self._kind(one) for one in schema["prefixItems"]) + "]"
            return f"list of {self._kind(schema.get('items', {}))}"
        more = schema.get("additionalProperties")
        if schema.get("type") == "object" and isinstance(more, dict):
            return f"map of {self._kind(more)}"
        return escape(str(schema.get("format") or schema.get("type") or "any")) + _bounds(schema)

    def _resolved(self, given: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in given:
            return given
        found: Any = self._document
        for step in given["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return dict(found)


def _bounds(schema: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    told = [f"{sign} {schema[word]:g}" for word, sign in signs.items() if word in schema]
    return f" <span class=soft>{escape(', '.join(told))}</span>" if told else ""


def _default(schema: dict[str, Any]) -> str:
    shown = schema.get("default")
    if shown in (None, {}, []):
        return "<span class=soft>optional</span>"
    return f"<span class=soft>default <code>{escape(json.dumps(shown))}</code></span>"


def _marked(text: str) -> str:
    """Text with `code` in it."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(part if number % 2 == 0 else f"<code>{part}</code>" for number, part in enumerate(parts))


def _words(method: str, path: str, described: dict[str, Any]) -> str:
    text = f"{method} {path} {described['operationId']} {described['summary']} {described.get('description', '')}"
    return escape(" ".join(text.lower().split()))
