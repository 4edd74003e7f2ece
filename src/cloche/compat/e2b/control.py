"""E2B's control plane. `TABLE` is all of it: a row without a handler is a route that is known and not honoured, and says so.

Metadata are labels; those that begin with `e2b.` are this module's own and are not shown. A paused sandbox of E2B's stays until somebody
wants it, so its life is without end while it is paused (where policy allows that), and begins anew with `connect`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.responses import Response

from cloche import errors, interfaces, model, rpc
from cloche.compat.e2b import calls, faults, logs, network, state, templates
from cloche.compat.e2b.calls import Call, Route

_MOST_FORKS = 100
_HIDDEN = "e2b."
_AUTO_RESUME, _ON_TIMEOUT = "e2b.auto-resume", "e2b.on-timeout"
_FOR_EVER = "9999-12-31T23:59:59Z"
_STATES = ("running", "paused")


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
        """What would have to be ignored, and what contradicts itself."""
        for field, asked in (("mcp", self.mcp), ("iam", self.iam), ("volumeMounts", self.volumeMounts)):
            if asked:
                raise faults.missing(field)
        if self.autoResume and self.autoResume.enabled and self.autoPauseMemory is False:
            words = (
                "autoResume wakes what was paused with its memory; with autoPauseMemory=false there is none"
            )
            raise faults.Fault(400, words, name="lifecycle_invalid")
        if any(name.startswith(_HIDDEN) for name in self.metadata):
            raise faults.Fault(400, f"metadata may not begin with {_HIDDEN!r} here", name="metadata_invalid")

    def labels(self) -> dict[str, str]:
        """The metadata, and what is remembered for `info`."""
        hidden = {}
        if self.autoResume is not None and self.autoResume.enabled:
            hidden[_AUTO_RESUME] = "yes"
        if self.autoPause:
            hidden[_ON_TIMEOUT] = "pause"
        return {**self.metadata, **hidden}

    def ladder(self) -> dict[str, str]:
        """What the end of its time does. E2B's pause with memory is our pause, the one without our archive."""
        if not self.autoPause:
            return {}
        return {"at_timeout": "archive" if self.autoPauseMemory is False else "pause"}


class Timeout(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    timeout: float


class Connect(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    timeout: float | None = None
    memory: bool | None = None
    """False wakes a paused sandbox from its disk, without what was in memory."""


class Resume(Connect, forbid_unknown_fields=True, kw_only=True):
    autoPause: bool | None = None


class Refresh(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    duration: float = 15


class Pause(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    memory: bool | None = None
    requireHealthyGuest: bool = False


class Fork(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    count: int = 1
    timeout: float | None = None


class Snapshot(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str | None = None
    memory: bool | None = None


# ── handlers ───────────────────────────────────────────────────────────────────────────────────────


async def _health(call: Call) -> Response:
    return Response(status_code=200)


async def _create_v1(call: Call) -> Response:
    return await _create(call, 15)


async def _create_v2(call: Call) -> Response:
    return await _create(call, 300)


async def _create(call: Call, default_s: float) -> Response:
    body = await calls.body(call, Create)
    body.refuse()
    rules = body.network or network.Config()
    timeout_s = body.timeout or default_s
    said: dict[str, Any] = {
        "env": body.envVars,
        "labels": body.labels(),
        "timeout_s": timeout_s,
        "stay": True,
        "policy": {"network": _network(call, rules, body.allow_internet_access)},
        "ladder": body.ladder(),
        **await _start(call, body.templateID),
    }
    spec = rpc.complete(said, call.config.defaults)
    word = call.request.headers.get("idempotency-key")
    if word is None:
        made = await call.backend.create(spec)
    else:

        async def make() -> str:
            return (await call.backend.create(spec)).id

        made = await call.backend.info(await call.state.once(call.key, word, msgspec.json.encode(body), make))
    held = call.state.of(made.id)
    held.timeout_s, held.network = timeout_s, rules
    return faults.json(_sandbox(call, made), 201)


def _network(call: Call, rules: network.Config, internet: bool | None) -> dict[str, Any]:
    if call.config.server.e2b_network == "off" and internet is None and rules == network.Config():
        return {"mode": "off"}
    return network.translate(rules, internet=internet)


async def _start(call: Call, template: str) -> dict[str, str]:
    """What a sandbox starts from: E2B has one name space for templates and snapshots."""
    if template in templates.OURS:
        return {"template": templates.OURS[template]}
    if template == "mcp-gateway":
        raise faults.missing("the template mcp-gateway")
    with suppress(errors.NotFound):
        return {"snapshot": (await call.backend.snapshot_info(template)).id}
    return {"template": template}


async def _list(call: Call) -> Response:
    query = call.request.query_params
    wanted, template = _wanted(call), query.get("template", "")
    template = templates.OURS.get(template, template)
    since = calls.moment(call, "startedAfter")
    states = [word for word in query.get("state", "").split(",") if word] or _STATES
    for word in states:
        if word not in _STATES:
            raise faults.Fault(400, f"state is {word[:50]!r}; it is running or paused", name="query_invalid")
    latest_first = calls.one_of(call, "order", ("asc", "desc"), "desc") == "desc"
    found = [
        info
        for info in sorted(await call.backend.list(), key=lambda info: (-info.created_at, info.id))
        if info.phase in ("running", "paused", "archived")
        and _state(info) in states
        and all(info.labels.get(name) == value for name, value in wanted.items())
        and (not template or template == info.template)
        and info.created_at > since
    ]
    if not latest_first:
        found.reverse()
    return calls.page(
        call, found, _listed, {"x-total-running": str(sum(_state(info) == "running" for info in found))}
    )


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
    info = await calls.alive(call)
    rules = (await call.backend.get_policy(info.id)).network
    detail = {
        **_listed(info),
        "envdAccessToken": call.state.issue(info.id, call.key, "access"),
        "domain": _domain(call),
        "lifecycle": {"autoResume": may_wake(info), "onTimeout": info.labels.get(_ON_TIMEOUT, "kill")},
        "allowInternetAccess": rules.mode != "off",
        "network": _rules(call, info, rules),
    }
    if info.phase != "running":
        detail["pauseMode"] = "full" if info.phase == "paused" else "filesystem"
    return faults.json(detail)


def _rules(call: Call, info: model.SandboxInfo, rules: Any) -> dict[str, Any]:
    """As the client said it, where this process was told; else as it was translated."""
    held = call.state.known(info.id)
    if held is not None and held.network is not None:
        said: dict[str, Any] = msgspec.to_builtins(held.network)
        said.pop("allow_internet_access", None)
        return {**said, "allowPublicTraffic": held.network.public}
    return {"allowOut": list(rules.allow), "denyOut": list(rules.deny), "allowPublicTraffic": False}


async def _delete(call: Call) -> Response:
    info = await calls.alive(call)
    await call.backend.delete(info.id)
    call.state.forget(info.id)
    return Response(status_code=204)


async def _connect(call: Call) -> Response:
    body = await calls.body(call, Connect)
    return await _bring_back(call, body.timeout or 300, memory=body.memory is not False)


async def _resume(call: Call) -> Response:
    body = await calls.body(call, Resume)
    info = await calls.alive(call)
    if info.phase == "running":
        raise faults.Fault(409, f"sandbox {call.sandbox} is running already", name="sandbox_running")
    pauses = info.labels.get(_ON_TIMEOUT) == "pause"
    if body.autoPause is not None and body.autoPause != pauses:
        raise faults.missing("another autoPause for a sandbox that is there")
    return await _bring_back(call, body.timeout or 15, memory=body.memory is not False)


async def _bring_back(call: Call, timeout_s: float, *, memory: bool = True) -> Response:
    """A connected sandbox runs, and has at least so long to live."""
    info = await calls.alive(call)
    slept = info.phase != "running"
    call.state.of(info.id).timeout_s = timeout_s
    if slept:
        if not memory and info.phase == "paused":
            await call.backend.suspend(info.id, "archive")
        await call.backend.resume(info.id)
    if slept or (info.expires_at is not None and info.expires_at < time.time() + timeout_s):
        info = await call.backend.extend(info.id, timeout_s)
    return faults.json(_sandbox(call, info), 201 if slept else 200)


async def _timeout(call: Call) -> Response:
    body = await calls.body(call, Timeout)
    info = await calls.alive(call)
    if body.timeout == 0:
        await call.backend.delete(info.id)
        call.state.forget(info.id)
    else:
        await call.backend.extend(info.id, body.timeout)
        call.state.of(info.id).timeout_s = body.timeout
    return Response(status_code=204)


async def _refresh(call: Call) -> Response:
    body = await calls.body(call, Refresh)
    info = await calls.alive(call)
    if info.expires_at is not None and info.expires_at < time.time() + body.duration:
        await call.backend.extend(info.id, body.duration)
    return Response(status_code=204)


async def _pause(call: Call) -> Response:
    body = await calls.body(call, Pause)
    info = await calls.alive(call)
    if info.phase != "running":
        raise faults.Fault(409, f"sandbox {info.id} is paused already", name="sandbox_paused")
    if body.requireHealthyGuest:
        await call.backend.stat_file(info.id, "/")  # which the guest answers, or it fails
    await call.backend.suspend(info.id, "archive" if body.memory is False else "pause")
    if (
        info.labels.get(_ON_TIMEOUT) != "pause"
    ):  # whose time suspends it goes on counting: its end is to stay as it is
        with suppress(errors.PolicyRefused):
            await call.backend.extend(info.id, None)
    return Response(status_code=204)


async def _fork(call: Call) -> Response:
    body = await calls.body(call, Fork)
    if not 1 <= body.count <= _MOST_FORKS:
        raise faults.Fault(400, f"count is {body.count}; it must be 1 to {_MOST_FORKS}", name="count_invalid")
    info = await calls.alive(call)
    made = []
    for child in await call.backend.fork(info.id, body.count):
        kept = child if body.timeout is None else await call.backend.extend(child.id, body.timeout)
        own, parents = call.state.of(child.id), call.state.known(info.id)
        if parents is not None:
            own.network, own.timeout_s = parents.network, body.timeout or parents.timeout_s
        made.append({"sandbox": _sandbox(call, kept)})
    return faults.json(made, 201)


async def _snapshot(call: Call) -> Response:
    body = await calls.body(call, Snapshot)
    if body.memory:
        raise faults.missing("a snapshot of memory", "; without `memory` the files are kept")
    info = await calls.alive(call)
    made = await call.backend.snapshot(info.id, body.name)
    return faults.json(_kept(made.id, made.name), 201)


async def _snapshots(call: Call) -> Response:
    of = call.request.query_params.get("sandboxID")
    found = [made for made in await call.backend.snapshots() if of in (None, "", made.sandbox)]
    return calls.page(call, found, lambda made: _kept(made.id, made.name))


def _kept(identity: str, name: str | None) -> dict[str, Any]:
    return {"snapshotID": identity, "names": [name] if name else []}


async def _delete_snapshot(call: Call) -> Response:
    await call.backend.delete_snapshot(call.places["template"])
    return Response(status_code=204)


async def _put_network(call: Call) -> Response:
    body = await calls.body(call, network.Config)
    info = await calls.alive(call)
    rules = network.translate(body, internet=body.allow_internet_access)
    await call.backend.update_policy(info.id, {"network": rules})
    held = call.state.of(info.id)
    held.network = body.after(held.network)
    return Response(status_code=204)


async def _metrics(call: Call) -> Response:
    """What was measured when somebody asked, and now; between `start` and `end`."""
    start, end = calls.whole(call, "start", 0), calls.whole(call, "end", 0)
    info = await calls.alive(call)
    held = call.state.of(info.id)
    if info.phase == "running":
        held.samples.append(await sample(call.backend, info, held))
    return faults.json(
        [
            one
            for one in held.samples
            if start <= one["timestampUnix"] and (not end or one["timestampUnix"] <= end)
        ]
    )


async def _many_metrics(call: Call) -> Response:
    found: dict[str, Any] = {}
    for named in call.request.query_params.get("sandbox_ids", "").split(",")[:_MOST_FORKS]:
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
        "timestamp": calls.time_of(now),
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


def may_wake(info: model.SandboxInfo) -> bool:
    return info.labels.get(_AUTO_RESUME) == "yes"


async def wake(backend: interfaces.Backend, info: model.SandboxInfo, held: state.Held) -> model.SandboxInfo:
    """Traffic has come for a sandbox that wants to be woken by it: it lives as long again as it was last given."""
    await backend.resume(info.id)
    return await backend.extend(info.id, held.timeout_s)


def _sandbox(call: Call, info: model.SandboxInfo) -> dict[str, Any]:
    return {
        "templateID": info.template,
        "sandboxID": info.id,
        "clientID": "cloche",
        "envdVersion": templates.ENVD_VERSION,
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
        "startedAt": calls.time_of(info.created_at),
        "endAt": _FOR_EVER if info.expires_at is None else calls.time_of(info.expires_at),
        "cpuCount": max(1, round(info.limits["cpus"].value)),
        "memoryMB": int(info.limits["memory_mib"].value),
        "diskSizeMB": int(info.limits["disk_mib"].value),
        "state": _state(info),
        "envdVersion": templates.ENVD_VERSION,
        "metadata": {name: value for name, value in info.labels.items() if not name.startswith(_HIDDEN)},
    }


def _state(info: model.SandboxInfo) -> str:
    return "running" if info.phase == "running" else "paused"


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
    Route("GET", "/sandboxes/{sandbox}/logs", "logs", logs.show),
    Route("GET", "/v2/sandboxes/{sandbox}/logs", "logs", logs.show_v2),
    Route("POST", "/templates", "template builds", None),
    Route("GET", "/templates", "template list", templates.list_all),
    Route("POST", "/v2/templates", "template builds", None),
    Route("GET", "/v2/templates", "template list", templates.list_all),
    Route("POST", "/v3/templates", "template builds", None),
    Route("GET", "/templates/aliases/{alias}", "template aliases", templates.alias),
    Route("GET", "/templates/{template}", "template", templates.one),
    Route("PATCH", "/templates/{template}", "templates", None),
    Route("GET", "/templates/{template}/files/{hash}", "template builds", None),
    Route("POST", "/v2/templates/{template}/builds/{build}", "template builds", None),
    Route("GET", "/templates/{template}/builds/{build}/status", "template builds", None),
    Route("GET", "/templates/{template}/builds/{build}/logs", "template builds", None),
    Route("GET", "/templates/{template}/tags", "template tags", templates.tags),
    Route("GET", "/templates/{template}/tags/count", "template tags", None),
    Route("GET", "/templates/{template}/tags/exists", "template tags", None),
    Route("GET", "/templates/{template}/tags/groups", "template tags", None),
    Route("GET", "/templates/{template}/tags/{tag}/assignments", "template tags", None),
    Route("PATCH", "/v2/templates/{template}", "template", None),
    Route("GET", "/default-templates", "template list", templates.list_own),
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
    Route("GET", "/teams/{team}/metrics/max", "teams", None),
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
        "default-templates",
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
