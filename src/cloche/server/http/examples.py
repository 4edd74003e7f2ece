"""Examples of what goes over the wire: written by hand where it helps to see real values, made from the type otherwise.

A test converts every one of them to its type, so none can drift from what is accepted and answered.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from cloche import model, stock
from cloche.server.http import wire

ID = "kq3vm5w2hd7tbn4xj6ap"
_MOMENT = 1794700800.0
_DIGEST = "sha256:" + "6f" * 32

_ISOLATION = model.Isolation(
    level="namespaces", driver="namespaces", user_namespace=True, seccomp=True, landlock_abi=6, uid_range=True, root="overlay"
)  # fmt: skip
_SANDBOX = model.SandboxInfo(
    id=ID, name="build", phase="running", template="base", profile="moderate", created_at=_MOMENT, expires_at=_MOMENT + 300,
    timeout_s=300, idle_timeout_s=None, isolation=_ISOLATION,
    limits={"memory_mib": model.Limit(value=512, enforcement="enforced", by="cgroup v2")},
    server="http://127.0.0.1:7777", owner="4711-8812", labels={"team": "red"},
)  # fmt: skip
_RESULT = model.ExecResult(
    exit_code=0, stdout_bytes=b"hello\n", stdout_total=6, duration_ms=3.1, cpu_ms=1.2, max_rss_mib=3.4, isolation=_ISOLATION,
    execution="b7xq2mzt5lw4cvk3h6nd",
)  # fmt: skip
_FILE = model.FileInfo(
    name="notes.txt", path="/workspace/notes.txt", type="file", size=6, mode=0o644, owner="user", group="user",
    modified_at=_MOMENT,
)  # fmt: skip
_CODE = model.CodeResult(results=({"text/plain": "42", "main": True},), execution_count=1)

HAND: dict[Any, Any] = {
    type(made): msgspec.to_builtins(made)
    for made in (
        _SANDBOX,
        _ISOLATION,
        _FILE,
        wire.Result.of(_RESULT),
        wire.Ran.of(_CODE),
        model.FileChange(kind="modified", path="src/main.py", type="file", size=120),
        model.Denial(
            kind="network", operation="connect", target="example.org:443", rule="network.mode", hint="allow example.org",
            evidence="proxy",
        ),
        stock.VolumeSpec(name="cache", size_mib=1024),
        stock.PoolSpec(template="base", size=2),
        stock.ClaimSpec(pool="base", env={"JOB": "17"}),
        wire.Chunk(seq=0, text="hello\n"),
        wire.Began(sandbox=ID, execution="b7xq2mzt5lw4cvk3h6nd"),
        wire.CodeText(text="hello\n"),
        model.CodeError(name="ZeroDivisionError", value="division by zero", traceback="Traceback …"),
        model.Question(id="q2", sandbox=ID, host="example.org", port=443, protocol="tls", timeout_s=60),
        model.ImageProgress(kind="step", text="run: make", step=1, steps=2),
    )
}  # fmt: skip
BODIES: dict[Any, Any] = {
    wire.Create: {"name": "build", "env": {"CI": "1"}, "resources": {"memory_mib": 512}, "timeout_s": 300},
    wire.Exec: {"command": "echo hello", "timeout_s": 10},
    wire.Run: {"command": ["echo", "hello"], "sandbox": {"profile": "strict"}},
    wire.Code: {"code": "6 * 7"},
    wire.CreateContext: {"language": "python"},
    wire.Input: {"data": "yes\n"},
    wire.Signal: {"signal": 15},
    wire.Resize: {"columns": 120, "rows": 40},
    wire.Fork: {"count": 2},
    wire.Extend: {"timeout_s": 600},
    wire.Move: {"path": "a.txt", "target": "b.txt"},
    wire.MakeDirectory: {"path": "src"},
    stock.TemplateSpec: {"name": "python", "env": {"PYTHONUNBUFFERED": "1"}, "contexts": ["python"]},
    stock.PoolSpec: {"template": "base", "size": 2},
    stock.ClaimSpec: {"pool": "base", "env": {"JOB": "17"}},
    stock.VolumeSpec: {"name": "cache", "size_mib": 1024},
}
PLACES = {
    "sandbox": ID, "execution": "b7xq2mzt5lw4cvk3h6nd", "context": "d4wm7kqz2xt5hvb3n6lj", "snapshot": "before", "volume": "cache",
    "question": "q2", "name": "base",
}  # fmt: skip
_BY_NAME: dict[str, Any] = {
    **PLACES, "id": ID, "path": "notes.txt", "target": "pypi.org:443", "reference": "docker://registry.example/library/debian:12",
    "digest": _DIGEST, "command": "echo hello", "pid": 7, "port": 8000, "language": "python", "cwd": "/workspace", "head": "7:" + "6f" * 32,
    "version": "0.1.0", "status": "ok", "kind": "created", "actor": "key:ci", "segment": "2026-11-15-4711", "next_cursor": None,
    "seq": 7, "snapshot_id": ID, "label": "team=red", "other": "after", "url": "http://127.0.0.1:7777/",
}  # fmt: skip


def of(kind: Any) -> Any:
    """One value of a type, as JSON has it."""
    return HAND[kind] if kind in HAND else _made(inspect.type_info(kind), "")


def body(kind: Any) -> Any:
    return BODIES[kind] if kind in BODIES else of(kind)


def named(name: str, kind: Any) -> Any:
    """A value for a parameter."""
    return _made(inspect.type_info(kind), name)


def _made(kind: inspect.Type, name: str) -> Any:
    known = _BY_NAME.get(name)
    match kind:
        case inspect.Metadata(type=inner):
            return _made(inner, name)
        case inspect.UnionType(types=types):
            if name in _BY_NAME and known is None:
                return None
            return _made(next(t for t in types if not isinstance(t, inspect.NoneType)), name)
        case inspect.StructType(cls=cls, fields=fields):
            if cls in HAND:
                return HAND[cls]
            return {field.encode_name: _field(field) for field in fields}
        case inspect.LiteralType(values=values):
            return known if known in values else values[0]
        case inspect.StrType() | inspect.AnyType():
            return known if isinstance(known, str) else "text"
        case inspect.IntType(ge=least):
            return known if isinstance(known, int) else int(least or 1)
        case inspect.FloatType():
            return _MOMENT if name.endswith(("_at", "time", "since", "until")) else 1.0
        case inspect.BoolType():
            return False
        case inspect.BytesType():
            return "aGVsbG8K"
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_made(item, name)]
        case inspect.TupleType(item_types=items):
            return [_made(item, name) for item in items]
        case inspect.NoneType():
            return None
        case _:
            return {}


def _field(field: inspect.Field) -> Any:
    if field.required or field.name in _BY_NAME or _lists_structs(field.type):
        return _made(field.type, field.name)
    if field.default is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default_factory())
    return _made(field.type, field.name)


def _lists_structs(kind: inspect.Type) -> bool:
    return isinstance(kind, (inspect.VarTupleType, inspect.ListType)) and isinstance(
        kind.item_type, inspect.StructType
    )
