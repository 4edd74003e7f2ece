"""E2B's control plane. `TABLE` is all of it: a row without a handler is a route that is known and not honoured, and says so.

Metadata are labels; those that begin with `e2b.` are this module's own and are not shown. A paused sandbox of E2B's stays until somebody
wants it, so its life is without end while it is paused (where policy allows that), and begins anew with `connect`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors, interfaces, model, rpc, settings
from cloche.compat.e2b import connect, faults, network, state

ENVD_VERSION = "0.6.1"
"""The newest whose every feature is here: 0.6.2 brought metadata of files."""
_MOST_FORKS = 100
_PAGE = 100
_HIDDEN = "e2b."
_AUTO_RESUME = "e2b.auto-resume"
_FOR_EVER = "9999-12-31T23:59:59Z"
_OURS = {"base": "base", "code-interpreter-v1": "base"}
"""E2B's public templates that every sandbox here is: a shell, and contexts for code."""
T = TypeVar("T")


class Call(NamedTuple):
    request: Request
    backend: interfaces.Backend
    key: str
    """The caller's key, by name."""
    state: state.State
    config: settings.Settings
    places: dict[str, str]

    @property
    def sandbox(self) -> str:
        return self.places["sandbox"]


Handler = Callable[[Call], Awaitable[Response]]


class Route(NamedTuple):
    method: str
    path: str
    name: str
    handler: Handler | None

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(self.path)))


# ── requests ───────────────────────────────────────────────────────────────────────────────────────


class AutoResume(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    enabled: bool = False


class Create(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    templateID: str
    timeout: float | None = None
    metadata: dict[str, str] = {}
    envVars: dict[str, str] = {}
    secure: bool = True
    allow_internet_access: bool | None = None
    autoPause: bool = False
    autoPauseMemory: bool | None = None
    autoResume: AutoResume | None = None
    network: network.Config | None = None
    mcp: Any = None
    iam: Any = None
    volumeMounts: list[Any] | None = None

    def refuse(self) -> None:
        """What would have to be ignored."""
        for field, asked in (
            ("autoPause", self.autoPause), ("mcp", self.mcp), ("iam", self.iam), ("volumeMounts", self.volumeMounts)
        ):  # fmt: skip
            if asked:
                raise faults.missing(field)


class Timeout(msgspec.Struct, kw_only=True):
    timeout: float | None = None


class Refresh(msgspec.Struct, kw_only=True):
    duration: float = 15


class Pause(msgspec.Struct, kw_only=True):
    memory: bool | None = None


class Fork(msgspec.Struct, kw_only=True):
    count: int = 1
    timeout: float | None = None


class Snapshot(msgspec.Struct, kw_only=True):
    name: str | None = None


async def _body(call: Call, kind: type[T]) -> T:
    data = await connect.read_all(call.request, call.config.server.max_body_mib << 20)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise faults.Fault(400, f"the body is not valid: {problem}", name="body_invalid") from None


# ── handlers ───────────────────────────────────────────────────────────────────────────────────────


async def _health(call: Call) -> Response:
    return Response(status_code=200)


async def _create_v1(call: Call) -> Response:
    return await _create(call, 15)


async def _create_v2(call: Call) -> Response:
    return await _create(call, 300)


async def _create(call: Call, default_s: float) -> Response:
    body = await _body(call, Create)
    body.refuse()
    rules = body.network or network.Config()
    if any(name.startswith(_HIDDEN) for name in body.metadata):
        raise faults.Fault(400, f"metadata may not begin with {_HIDDEN!r} here", name="metadata_invalid")
    said: dict[str, Any] = {
        "env": body.envVars,
        "labels": dict(body.metadata),
        "timeout_s": body.timeout or default_s,
        "stay": True,
        "policy": {"network": _network(call, rules, body.allow_internet_access)},
        **await _start(call, body.templateID),
    }
    if body.autoResume is not None and body.autoResume.enabled:
        said["labels"][_AUTO_RESUME] = "yes"
    spec = rpc.complete(said, call.config.defaults)

    async def make() -> str:
        return (await call.backend.create(spec)).id

    word = call.request.headers.get("idempotency-key")
    made = await (
        make() if word is None else call.state.once(call.key, word, msgspec.json.encode(body), make)
    )
    return faults.json(_sandbox(call, await call.backend.info(made)), 201)


def _network(call: Call, rules: network.Config, internet: bool | None) -> dict[str, Any]:
    if call.config.server.e2b_network == "off" and internet is None and rules == network.Config():
        return {"mode": "off"}
    return network.translate(rules, internet=internet)


async def _start(call: Call, template: str) -> dict[str, str]:
    """What a sandbox starts from: E2B has one name space for templates and snapshots."""
    if template in _OURS:
        return {"template": _OURS[template]}
    if template == "mcp-gateway":
        raise faults.missing("the template mcp-gateway")
    with suppress(errors.NotFound):
        return {"snapshot": (await call.backend.snapshot_info(template)).id}
    return {"template": template}


async def _list(call: Call) -> Response:
    query = call.request.query_params
    wanted = _wanted(call)
    since = _moment(call, "startedAfter")
    states = [word for word in query.get("state", "running,paused").split(",") if word]
    found = [
        info
        for info in sorted(await call.backend.list(), key=lambda info: (-info.created_at, info.id))
        if info.phase in ("running", "paused", "archived")
        and _state(info) in states
        and all(info.labels.get(name) == value for name, value in wanted.items())
        and query.get("template") in (None, "", info.template)
        and info.created_at > since
    ]
    if query.get("order") == "asc":
        found.reverse()
    return _page(
        call, found, _listed, {"x-total-running": str(sum(_state(info) == "running" for info in found))}
    )


def _page(
    call: Call, found: list[T], shown: Callable[[T], dict[str, Any]], headers: dict[str, str] | None = None
) -> Response:
    """Some of a list, and in a header where the next ones begin."""
    start, limit = _whole(call, "nextToken", 0), max(1, min(_whole(call, "limit", _PAGE), _PAGE))
    headers = headers or {}
    if start + limit < len(found):
        headers["x-next-token"] = str(start + limit)
    return faults.json([shown(one) for one in found[start : start + limit]], 200, headers)


def _whole(call: Call, field: str, default: int) -> int:
    given = call.request.query_params.get(field, "")
    if given and not (given.isascii() and given.isdigit()):
        raise faults.Fault(400, f"{field} is {given[:50]!r}, which is not a number", name="query_invalid")
    return int(given) if given else default


def _moment(call: Call, field: str) -> float:
    """A time of the query, in seconds; the beginning of time if it is not given."""
    given = call.request.query_params.get(field, "")
    try:
        return datetime.fromisoformat(given).timestamp() if given else 0.0
    except ValueError:
        raise faults.Fault(
            400, f"{field} is {given[:50]!r}, which is not a time", name="query_invalid"
        ) from None


def _wanted(call: Call) -> dict[str, str]:
    """The metadata to look for. Clients quote names and values, and then the whole."""
    pairs = parse_qsl(call.request.query_params.get("metadata", ""), keep_blank_values=True)
    return {unquote(name): unquote(value) for name, value in pairs}


async def _list_v1(call: Call) -> Response:
    wanted = _wanted(call)
    return faults.json(
        [
            _listed(info)
            for info in await call.backend.list()
            if info.phase == "running" and all(info.labels.get(n) == v for n, v in wanted.items())
        ]
    )


async def _info(call: Call) -> Response:
    info = await _alive(call)
    rules = (await call.backend.get_policy(info.id)).network
    detail = {
        **_listed(info),
        "envdAccessToken": call.state.issue(info.id, call.key, "access"),
        "domain": _domain(call),
        "lifecycle": {"autoResume": info.labels.get(_AUTO_RESUME) == "yes", "onTimeout": "kill"},
        "allowInternetAccess": rules.mode != "off",
        "network": {"allowOut": list(rules.allow), "denyOut": list(rules.deny), "allowPublicTraffic": True},
    }
    if info.phase != "running":
        detail["pauseMode"] = "full" if info.phase == "paused" else "filesystem"
        detail["network"] = {"allowPublicTraffic": True}
    return faults.json(detail)


async def _delete(call: Call) -> Response:
    info = await _alive(call)
    await call.backend.delete(info.id)
    call.state.forget(info.id)
    return Response(status_code=204)


async def _connect(call: Call) -> Response:
    body = await _body(call, Timeout)
    return await _bring_back(call, body.timeout or 300)


async def _resume(call: Call) -> Response:
    body = await _body(call, Timeout)
    if (await _alive(call)).phase == "running":
        raise faults.Fault(409, f"sandbox {call.sandbox} is running already", name="sandbox_running")
    return await _bring_back(call, body.timeout or 15)


async def _bring_back(call: Call, timeout_s: float) -> Response:
    """A connected sandbox runs, and has at least so long to live."""
    info = await _alive(call)
    slept = info.phase != "running"
    if slept:
        await call.backend.resume(info.id)
    if slept or (info.expires_at is not None and info.expires_at < time.time() + timeout_s):
        info = await call.backend.extend(info.id, timeout_s)
    return faults.json(_sandbox(call, info), 201 if slept else 200)


async def _timeout(call: Call) -> Response:
    body = await _body(call, Timeout)
    if body.timeout is None:
        raise faults.Fault(400, "the body needs `timeout`, in seconds", name="body_invalid")
    info = await _alive(call)
    if body.timeout == 0:
        await call.backend.delete(info.id)
        call.state.forget(info.id)
    else:
        await call.backend.extend(info.id, body.timeout)
    return Response(status_code=204)


async def _refresh(call: Call) -> Response:
    body = await _body(call, Refresh)
    info = await _alive(call)
    if info.expires_at is not None and info.expires_at < time.time() + body.duration:
        await call.backend.extend(info.id, body.duration)
    return Response(status_code=204)


async def _pause(call: Call) -> Response:
    body = await _body(call, Pause)
    info = await _alive(call)
    if info.phase != "running":
        raise faults.Fault(409, f"sandbox {info.id} is paused already", name="sandbox_paused")
    await call.backend.suspend(info.id, "archive" if body.memory is False else "pause")
    with suppress(errors.PolicyRefused):
        await call.backend.extend(info.id, None)
    return Response(status_code=204)


async def _fork(call: Call) -> Response:
    body = await _body(call, Fork)
    if not 1 <= body.count <= _MOST_FORKS:
        raise faults.Fault(400, f"count is {body.count}; it must be 1 to {_MOST_FORKS}", name="count_invalid")
    info = await _alive(call)
    made = []
    for child in await call.backend.fork(info.id, body.count):
        kept = child if body.timeout is None else await call.backend.extend(child.id, body.timeout)
        made.append({"sandbox": _sandbox(call, kept)})
    return faults.json(made, 201)


async def _snapshot(call: Call) -> Response:
    body = await _body(call, Snapshot)
    info = await _alive(call)
    made = await call.backend.snapshot(info.id, body.name)
    return faults.json(_kept(made.id, made.name), 201)


async def _snapshots(call: Call) -> Response:
    of = call.request.query_params.get("sandboxID")
    found = [made for made in await call.backend.snapshots() if of in (None, "", made.sandbox)]
    return _page(call, found, lambda made: _kept(made.id, made.name))


def _kept(identity: str, name: str | None) -> dict[str, Any]:
    return {"snapshotID": identity, "names": [name] if name else []}


async def _delete_snapshot(call: Call) -> Response:
    await call.backend.delete_snapshot(call.places["template"])
    return Response(status_code=204)


async def _put_network(call: Call) -> Response:
    body = await _body(call, network.Config)
    info = await _alive(call)
    rules = network.translate(body, internet=body.allow_internet_access)
    await call.backend.update_policy(info.id, {"network": rules})
    return Response(status_code=204)


async def _metrics(call: Call) -> Response:
    info = await _alive(call)
    return faults.json(
        [await sample(call.backend, info, call.state.of(info.id))] if info.phase == "running" else []
    )


async def _many_metrics(call: Call) -> Response:
    found: dict[str, Any] = {}
    for named in call.request.query_params.get("sandbox_ids", "").split(","):
        with suppress(errors.NotFound, errors.SandboxLost):
            info = await call.backend.info(named)
            if info.phase == "running":
                found[info.id] = await sample(call.backend, info, call.state.of(info.id))
    return faults.json({"sandboxes": found})


async def sample(backend: interfaces.Backend, info: model.SandboxInfo, held: state.Held) -> dict[str, Any]:
    """One measurement, now. Processor time is a share since the last one, or since the sandbox was made."""
    usage = await backend.usage(info.id)
    now = time.time()
    since, before_ms = held.usage or (info.created_at, 0.0)
    held.usage = now, usage.cpu_ms
    cpus = info.limits["cpus"].value
    used, total = await _disk(backend, info.id)
    return {
        "timestamp": _time(now),
        "timestampUnix": int(now),
        "cpuCount": max(1, round(cpus)),
        "cpuUsedPct": round(max(0.0, usage.cpu_ms - before_ms) / max(1.0, (now - since) * 1000) * 100, 2),
        "memUsed": int(usage.memory_mib * (1 << 20)),
        "memTotal": int(info.limits["memory_mib"].value) << 20,
        "memCache": 0,  # counted as used: the group's figure does not tell them apart
        "diskUsed": used,
        "diskTotal": total,
    }


async def _disk(backend: interfaces.Backend, sandbox: str) -> tuple[int, int]:
    """What is written and what fits, as the sandbox itself sees it."""
    asked = model.ExecRequest(command=["df", "-B1", "--output=used,size", "/home/user"], timeout_s=10)
    result = await backend.exec(sandbox, asked)
    try:
        used, size = result.stdout.split("\n")[1].split()
        return int(used), int(size)
    except (ValueError, IndexError):
        raise faults.Fault(500, "the sandbox's disk could not be measured", name="disk_unknown") from None


# ── answers ────────────────────────────────────────────────────────────────────────────────────────


async def _alive(call: Call) -> model.SandboxInfo:
    try:
        info = await call.backend.info(call.sandbox)
    except errors.ClocheError as problem:
        if not faults.is_gone(problem):
            raise
        call.state.forget(call.sandbox)
        raise faults.Fault(404, f"sandbox {call.sandbox!r} not found", name=problem.code) from None
    if info.phase in ("running", "paused", "archived"):
        return info
    raise faults.Fault(404, f"sandbox {call.sandbox!r} not found: it is {info.phase}", name="sandbox_lost")


def may_wake(info: model.SandboxInfo) -> bool:
    return info.labels.get(_AUTO_RESUME) == "yes"


def _sandbox(call: Call, info: model.SandboxInfo) -> dict[str, Any]:
    return {
        "templateID": info.template,
        "sandboxID": info.id,
        "clientID": "cloche",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": call.state.issue(info.id, call.key, "access"),
        "trafficAccessToken": call.state.issue(info.id, call.key, "traffic"),
        "domain": _domain(call),
    }


def _domain(call: Call) -> str:
    """Where `<port>-<sandbox>.` is put before: this server, by a name whose children lead to it too."""
    host = call.request.headers.get("host", "localhost")
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name, port = host, ""
    if name in ("127.0.0.1", "[::1]"):
        name = "localhost"
    return f"{name}:{port}" if port else name


def _listed(info: model.SandboxInfo) -> dict[str, Any]:
    return {
        "templateID": info.template,
        "alias": info.template,
        "sandboxID": info.id,
        "clientID": "cloche",
        "startedAt": _time(info.created_at),
        "endAt": _FOR_EVER if info.expires_at is None else _time(info.expires_at),
        "cpuCount": max(1, round(info.limits["cpus"].value)),
        "memoryMB": int(info.limits["memory_mib"].value),
        "diskSizeMB": int(info.limits["disk_mib"].value),
        "state": _state(info),
        "envdVersion": ENVD_VERSION,
        "metadata": {name: value for name, value in info.labels.items() if not name.startswith(_HIDDEN)},
    }


def _state(info: model.SandboxInfo) -> str:
    return "running" if info.phase == "running" else "paused"


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


TABLE: tuple[Route, ...] = (
    Route("GET", "/health", "health", _health),
    Route("POST", "/sandboxes", "create", _create_v1),
    Route("POST", "/v2/sandboxes", "create", _create_v2),
    Route("GET", "/sandboxes", "list", _list_v1),
    Route("GET", "/v2/sandboxes", "list", _list),
    Route("GET", "/sandboxes/metrics", "metrics of several", _many_metrics),
    Route("GET", "/sandboxes/{sandbox}", "info", _info),
    Route("DELETE", "/sandboxes/{sandbox}", "kill", _delete),
    Route("POST", "/sandboxes/{sandbox}/connect", "connect", _connect),
    Route("POST", "/v2/sandboxes/{sandbox}/connect", "connect", _connect),
    Route("POST", "/sandboxes/{sandbox}/resume", "resume", _resume),
    Route("POST", "/sandboxes/{sandbox}/timeout", "set timeout", _timeout),
    Route("POST", "/sandboxes/{sandbox}/refreshes", "refresh", _refresh),
    Route("POST", "/sandboxes/{sandbox}/pause", "pause", _pause),
    Route("POST", "/sandboxes/{sandbox}/fork", "fork", _fork),
    Route("POST", "/sandboxes/{sandbox}/snapshots", "snapshot", _snapshot),
    Route("GET", "/snapshots", "list snapshots", _snapshots),
    Route("POST", "/templates/tags", "template tags", None),
    Route("DELETE", "/templates/tags", "template tags", None),
    Route("DELETE", "/templates/{template}", "delete snapshot", _delete_snapshot),
    Route("PUT", "/sandboxes/{sandbox}/network", "replace network rules", _put_network),
    Route("GET", "/sandboxes/{sandbox}/metrics", "metrics", _metrics),
    Route("GET", "/sandboxes/{sandbox}/logs", "logs", None),
    Route("GET", "/v2/sandboxes/{sandbox}/logs", "logs", None),
    Route("POST", "/templates", "template builds", None),
    Route("GET", "/templates", "template list", None),
    Route("POST", "/v2/templates", "template builds", None),
    Route("GET", "/v2/templates", "template list", None),
    Route("POST", "/v3/templates", "template builds", None),
    Route("GET", "/templates/aliases/{alias}", "template aliases", None),
    Route("GET", "/templates/{template}", "templates", None),
    Route("PATCH", "/templates/{template}", "templates", None),
    Route("GET", "/templates/{template}/files/{hash}", "template builds", None),
    Route("POST", "/v2/templates/{template}/builds/{build}", "template builds", None),
    Route("GET", "/templates/{template}/builds/{build}/status", "template builds", None),
    Route("GET", "/templates/{template}/tags", "template tags", None),
    Route("GET", "/volumes", "volumes", None),
    Route("POST", "/volumes", "volumes", None),
    Route("GET", "/volumes/{volume}", "volumes", None),
    Route("DELETE", "/volumes/{volume}", "volumes", None),
    Route("GET", "/secrets", "secrets", None),
    Route("POST", "/secrets", "secrets", None),
    Route("GET", "/secrets/{secret}", "secrets", None),
    Route("POST", "/secrets/{secret}", "secrets", None),
    Route("DELETE", "/secrets/{secret}", "secrets", None),
    Route("GET", "/teams", "teams", None),
    Route("GET", "/teams/{team}/metrics", "teams", None),
    Route("GET", "/api-keys", "API keys", None),
    Route("POST", "/api-keys", "API keys", None),
    Route("POST", "/access-tokens", "access tokens", None),
    Route("GET", "/nodes", "nodes", None),
)

_PATTERNS = [(route, route.pattern) for route in TABLE]
_ROOTS = frozenset(
    [
        "sandboxes",
        "snapshots",
        "templates",
        "volumes",
        "secrets",
        "teams",
        "api-keys",
        "access-tokens",
        "nodes",
    ]
)


def owns(path: str) -> bool:
    """Whether a path is E2B's control plane, known or not."""
    parts = path.split("/")[1:]
    return (
        path == "/health" or (parts[1] if parts[0] in ("v2", "v3") and len(parts) > 1 else parts[0]) in _ROOTS
    )


def find(method: str, path: str) -> tuple[Route, dict[str, str]]:
    others = False
    for route, pattern in _PATTERNS:
        matched = pattern.fullmatch(path)
        if matched and route.method == method:
            return route, matched.groupdict()
        others = others or matched is not None
    if others:
        raise faults.Fault(
            405, f"{method} {path[:200]} is not something this server does", name="method_refused"
        )
    raise faults.Fault(
        404, f"{method} {path[:200]} is not something this server does", name="route_not_found"
    )
