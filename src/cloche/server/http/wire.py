"""What JSON bodies look like where they differ from the nouns: bytes become text, or base64 where they are not text.

A body refuses unknown fields, like every noun; an answer may gain fields with time, and clients must let them pass.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Literal

import msgspec

from cloche import errors, model, rpc, settings


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape all request bodies share."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The shape all answers of our own share."""


class Page(Answer, frozen=True, kw_only=True):
    """Some of a list; `next_cursor` is null on the last page."""

    next_cursor: str | None = None


class Fault(Answer, frozen=True, kw_only=True):
    """What went wrong: a stable code, a sentence, what to do."""

    code: str
    message: str
    hint: str | None = None
    request_id: str
    details: dict[str, Any] = {}


class Failure(Answer, frozen=True, kw_only=True):
    error: Fault


class Broken(Answer, frozen=True, kw_only=True):
    """Event `error`: why a stream ended before its time."""

    code: str
    message: str
    hint: str | None = None
    details: dict[str, Any] = {}


# ── sandboxes ──────────────────────────────────────────────────────────────────────────────────────


class Create(Body, frozen=True, kw_only=True):
    """A sandbox to make. What is left out is the template's, and then the server's default."""

    name: str | None = None
    template: str | msgspec.UnsetType = msgspec.UNSET
    profile: str | msgspec.UnsetType = msgspec.UNSET
    mode: str | None = None
    """Instead of a profile: what the command line of a coding agent needs, by the agent's name."""
    env: dict[str, str] = {}
    resources: dict[Literal["memory_mib", "cpus", "pids", "disk_mib"], float] = {}
    timeout_s: float | msgspec.UnsetType | None = msgspec.UNSET
    idle_timeout_s: float | msgspec.UnsetType | None = msgspec.UNSET
    ladder: model.Ladder | msgspec.UnsetType = msgspec.UNSET
    """How idleness, and the end of its time, suspend it instead of ending it."""
    minimum_isolation: model.Level | msgspec.UnsetType = msgspec.UNSET
    labels: dict[str, str] = {}
    policy: dict[str, Any] = {}
    image: str | None = None
    snapshot: str | None = None
    secrets: tuple[str, ...] = ()
    volumes: dict[str, model.Mount] = {}
    workspace: str | None = None
    """A directory of the server's host; refused unless the configuration names it."""
    overlay: bool = False

    def spec(self, defaults: settings.Defaults, *, stay: bool = True) -> model.SandboxSpec:
        said = msgspec.to_builtins(self)
        said["resources"] = {
            field: value if field == "cpus" or value != int(value) else int(value)
            for field, value in self.resources.items()
        }
        return rpc.complete({**said, "stay": stay}, defaults)


class Extend(Body, frozen=True, kw_only=True):
    timeout_s: float | None
    """Seconds from now; null is without end."""


class Fork(Body, frozen=True, kw_only=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class Sandboxes(Page, frozen=True, kw_only=True):
    sandboxes: tuple[model.SandboxInfo, ...]


# ── executions ─────────────────────────────────────────────────────────────────────────────────────


class Exec(Body, frozen=True, kw_only=True):
    """One command: a shell line, or a list of arguments."""

    command: str | list[str]
    cwd: str | None = None
    env: dict[str, str] = {}
    stdin: str | None = None
    """Text to feed and close."""
    stdin_base64: bytes | None = None
    open_stdin: bool = False
    timeout_s: float | None = None
    background_after_s: float | None = None
    user: str = "user"
    merge: bool = False
    pty: tuple[int, int] | None = None
    output_limit: int | None = None

    def request(self) -> model.ExecRequest:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise errors.error("argument_invalid", "give stdin or stdin_base64, not both", field="stdin")
        said = {name: getattr(self, name) for name in Exec.__struct_fields__ if not name.startswith("stdin")}
        stdin = self.stdin_base64 if self.stdin is None else self.stdin.encode("utf-8", "surrogateescape")
        return model.ExecRequest(**said, stdin=stdin)


class Result(Answer, frozen=True, kw_only=True):
    """A finished command, or one that went on in the background (`process` names it then)."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    oom_killed: bool
    stdout: str
    stderr: str
    stdout_base64: str | None = None
    """Given where the bytes are not UTF-8, and the text above is therefore not exact."""
    stderr_base64: str | None = None
    truncated: bool
    stdout_total: int
    stderr_total: int
    duration_ms: float
    cpu_ms: float
    max_rss_mib: float
    denials: tuple[model.Denial, ...]
    isolation: model.Isolation
    execution: str
    process: str | None = None
    code: int
    """One number as shells say it: 124 for a time-out, 128+N for signal N."""
    sandbox: str | None = None

    @classmethod
    def of(cls, result: model.ExecResult, sandbox: str | None = None) -> Result:
        same = ("exit_code", "signal", "timed_out", "oom_killed", "truncated", "stdout_total", "stderr_total",
                "duration_ms", "cpu_ms", "max_rss_mib", "denials", "isolation", "execution", "process")  # fmt: skip
        return cls(
            **{name: getattr(result, name) for name in same},
            stdout=result.stdout,
            stderr=result.stderr,
            stdout_base64=inexact(result.stdout_bytes),
            stderr_base64=inexact(result.stderr_bytes),
            code=result.shell_code,
            sandbox=sandbox,
        )


def inexact(data: bytes) -> str | None:
    """Base64 of bytes that text cannot carry."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return b64encode(data).decode()
    return None


class Run(Exec, frozen=True, kw_only=True):
    """A command in a sandbox of its own, which ends with the request unless `detach`."""

    sandbox: Create = Create()
    detach: bool = False


class Input(Body, frozen=True, kw_only=True):
    data: str = ""
    data_base64: bytes | None = None
    end: bool = False

    def content(self) -> bytes:
        return self.data.encode("utf-8", "surrogateescape") if self.data_base64 is None else self.data_base64


class Signal(Body, frozen=True, kw_only=True):
    signal: Annotated[int, msgspec.Meta(ge=0, le=64)]
    tree: bool = False


class Resize(Body, frozen=True, kw_only=True):
    columns: Annotated[int, msgspec.Meta(ge=1, lt=10_000)]
    rows: Annotated[int, msgspec.Meta(ge=1, lt=10_000)]


class Executions(Page, frozen=True, kw_only=True):
    executions: tuple[model.ExecutionInfo, ...]


# ── what streams carry ─────────────────────────────────────────────────────────────────────────────


class Chunk(Answer, frozen=True, kw_only=True):
    """Events `stdout` and `stderr`: text, or base64 where the bytes are not UTF-8."""

    seq: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    data: str | msgspec.UnsetType = msgspec.UNSET


class Began(Answer, frozen=True, kw_only=True):
    sandbox: str
    execution: str


class DeniedEvent(Answer, frozen=True, kw_only=True):
    seq: int
    denial: model.Denial


class TruncatedEvent(Answer, frozen=True, kw_only=True):
    seq: int
    stream: model.StreamName
    skipped: int


ExecEvent = Began | Chunk | DeniedEvent | TruncatedEvent | Result
EXEC_EVENTS = {
    "stdout": Chunk,
    "stderr": Chunk,
    "denied": DeniedEvent,
    "truncated": TruncatedEvent,
    "exit": Result,
}


# ── files ──────────────────────────────────────────────────────────────────────────────────────────


class Files(Page, frozen=True, kw_only=True):
    files: tuple[model.FileInfo, ...]


class Move(Body, frozen=True, kw_only=True):
    path: str
    target: str
    overwrite: bool = True


class MakeDirectory(Body, frozen=True, kw_only=True):
    path: str


class Changes(Page, frozen=True, kw_only=True):
    changes: tuple[model.FileChange, ...]


class Made(Answer, frozen=True, kw_only=True):
    made: bool


class Count(Answer, frozen=True, kw_only=True):
    count: int


# ── ports ──────────────────────────────────────────────────────────────────────────────────────────


class Ports(Page, frozen=True, kw_only=True):
    ports: tuple[model.PortInfo, ...]


class MakeLink(Body, frozen=True, kw_only=True):
    ttl_s: float = 3600
    """Seconds that the link lives; at most a week."""


def port(text: str) -> int:
    """A port in a path."""
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise errors.error(
            "argument_invalid", f"{text[:50]!r} is not a port", hint="ports are 1 to 65535", field="port"
        )
    return int(text)


# ── contexts ───────────────────────────────────────────────────────────────────────────────────────


class CreateContext(Body, frozen=True, kw_only=True):
    language: str = "python"
    cwd: str | None = None


class Code(Body, frozen=True, kw_only=True):
    code: str
    context: str | None = None
    language: str = "python"
    env: dict[str, str] | None = None
    timeout_s: float | None = None


class Contexts(Page, frozen=True, kw_only=True):
    contexts: tuple[model.ContextInfo, ...]


class Ran(Answer, frozen=True, kw_only=True):
    """What one run of code gave; `text` is the last expression's value."""

    text: str | None
    results: tuple[dict[str, Any], ...]
    stdout: str
    stderr: str
    error: model.CodeError | None
    execution_count: int
    exit_code: int | None

    @classmethod
    def of(cls, result: model.CodeResult) -> Ran:
        same = {name: getattr(result, name) for name in model.CodeResult.__struct_fields__}
        return cls(text=result.text, **same)


class CodeStart(Answer, frozen=True, kw_only=True):
    """Event `start`: the code runs; those of its context before it have ended."""

    execution_count: int


class CodeText(Answer, frozen=True, kw_only=True):
    """Events `stdout` and `stderr` of code."""

    text: str


CodeEvent = CodeStart | CodeText | dict[str, Any] | model.CodeError | Ran
CODE_EVENTS = {
    "start": CodeStart, "stdout": CodeText, "stderr": CodeText, "result": dict[str, Any], "failed": model.CodeError, "exit": Ran,
}  # fmt: skip


# ── policies ───────────────────────────────────────────────────────────────────────────────────────


class Rules(Body, frozen=True, kw_only=True):
    """What a sandbox would be asked for with: a profile or a mode, and rules of its own."""

    profile: str | None = None
    mode: str | None = None
    policy: dict[str, Any] = {}

    def spec(self, defaults: settings.Defaults) -> model.SandboxSpec:
        fields = ("profile", "mode", "policy")
        said = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return rpc.complete(said, defaults)


class Explain(Rules, frozen=True, kw_only=True):
    """What to explain, for a sandbox that exists or for one that would be asked for so."""

    kind: Literal["host", "path", "env", "secret"]
    target: str
    """`host`: NAME[:PORT]; `path`: relative to a workspace; `env` and `secret`: a name."""
    sandbox: str | None = None
    write: bool = False
    method: str | None = None
    path: str | None = None
    """`host`: what plain HTTP would ask for."""


# ── the journal ────────────────────────────────────────────────────────────────────────────────────


class JournalEvent(Answer, frozen=True, kw_only=True):
    """One thing that happened. `data` depends on the kind."""

    seq: int
    kind: str
    sandbox: str | None
    time: float
    data: dict[str, Any]


class Events(Page, frozen=True, kw_only=True):
    events: tuple[JournalEvent, ...]
