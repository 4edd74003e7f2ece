"""What each tool takes and gives. One struct each: it checks the arguments, and its schema is what clients are shown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from cloche import errors, model, stock

Text = Annotated[str, msgspec.Meta(min_length=1)]
Command = Annotated[
    list[str],
    msgspec.Meta(
        min_length=1,
        description='The program and its arguments. For a shell line: ["bash", "-c", "make | tail"].',
    ),
]
Environment = Annotated[
    dict[str, str], msgspec.Meta(description="Variables to set beside the sandbox's own.")
]
Milliseconds = Annotated[
    int,
    msgspec.Meta(
        ge=1,
        le=86_400_000,
        description="After this, everything the command started is killed; exit_code is 124.",
    ),
]
Profile = Annotated[
    Literal["restrictive", "moderate", "permissive"],
    msgspec.Meta(
        description="How much the sandbox may touch. Left out: the configured one, usually moderate."
    ),
]
SandboxId = Annotated[str, msgspec.Meta(min_length=1, description="The id that sandbox_session_create gave.")]
Path = Annotated[
    str,
    msgspec.Meta(min_length=1, description="A path inside; a relative one is below the working directory."),
]
EncodingName = Literal["utf-8", "base64"]
Encoding = Annotated[EncodingName, msgspec.Meta(description="How bytes are written in `content`.")]
Streaming = Annotated[
    bool,
    msgspec.Meta(
        description="Send output while the command runs, as progress notifications, if the client asked for them."
    ),
]


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape that the arguments of all tools share."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The shape that all results share."""


# ── arguments ──────────────────────────────────────────────────────────────────────────────────────


class Network(Arguments, frozen=True, kw_only=True):
    """What may be reached. Without it: nothing, or what the configuration allows."""

    enabled: bool | None = None
    allowed_domains: Annotated[
        list[str] | None,
        msgspec.Meta(
            description='Hosts, with a port where it is not 443 or 80: ["pypi.org", "*.github.com:443"].'
        ),
    ] = None


class Run(Arguments, frozen=True, kw_only=True):
    command: Command
    cwd: Path | None = None
    env: Environment = {}
    timeout_ms: Milliseconds = 30_000
    profile: Profile | None = None
    network: Network | None = None
    streaming: Streaming = False


class CreateSession(Arguments, frozen=True, kw_only=True):
    name: Annotated[
        str | None,
        msgspec.Meta(description="A name of your choice; the same one again gives the same sandbox."),
    ] = None
    env: Environment = {}
    profile: Profile | None = None
    network: Network | None = None
    timeout_s: (
        Annotated[float, msgspec.Meta(gt=0, lt=1e9, description="Seconds the sandbox lives at most.")] | None
    ) = None


class Exec(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    command: Command
    cwd: Path | None = None
    env: Environment = {}
    timeout_ms: Milliseconds = 30_000
    streaming: Streaming = False


class RunCode(Arguments, frozen=True, kw_only=True):
    code: str
    sandbox: Annotated[
        str | None,
        msgspec.Meta(
            description="Where to run it; variables stay there for the next call. Left out: in a sandbox of its own."
        ),
    ] = None
    language: str = "python"
    env: Environment = {}
    timeout_ms: Milliseconds = 30_000


class WriteFile(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    path: Path
    content: str
    encoding: Encoding = "utf-8"
    executable: bool = False


class ReadFile(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    path: Path
    offset: Annotated[int, msgspec.Meta(ge=0, description="The byte to begin with.")] = 0
    length: (
        Annotated[
            int,
            msgspec.Meta(
                ge=1, le=8 << 20, description="Bytes to read at most; left out: the configured limit."
            ),
        ]
        | None
    ) = None


class ListFiles(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    path: Path = "."
    depth: Annotated[int, msgspec.Meta(ge=1, le=20)] = 1


class Nothing(Arguments, frozen=True, kw_only=True):
    pass


class Name(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId


class TakeSnapshot(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    name: str | None = None


class Restore(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    snapshot: Annotated[
        str, msgspec.Meta(min_length=1, description="The id or name that sandbox_snapshot gave.")
    ]


class Fork(Arguments, frozen=True, kw_only=True):
    sandbox: SandboxId
    count: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1


# ── results ────────────────────────────────────────────────────────────────────────────────────────


class Ran(Outcome, frozen=True, kw_only=True):
    exit_code: Annotated[int, msgspec.Meta(description="124: it took too long; 128+N: killed by signal N.")]
    stdout: str
    stderr: str
    timed_out: bool
    oom_killed: bool
    truncated: Annotated[
        bool, msgspec.Meta(description="The middle of a stream was left out; its head and tail are here.")
    ]
    stdout_bytes: Annotated[
        int, msgspec.Meta(description="Bytes written in all, whether or not they are here.")
    ]
    stderr_bytes: int
    duration_ms: float
    denials: Annotated[
        list[model.Denial],
        msgspec.Meta(description="What the sandbox stopped, each with the rule and a way out."),
    ]
    faults: list[str]
    isolation: model.Isolation


class CodeRan(Outcome, frozen=True, kw_only=True):
    text: Annotated[str | None, msgspec.Meta(description="The value of the last expression.")]
    results: Annotated[
        list[dict[str, Any]],
        msgspec.Meta(description="Every display, by mime type. Pictures come as image contents beside this."),
    ]
    stdout: str
    stderr: str
    error: model.CodeError | None
    truncated: bool


class Session(Outcome, frozen=True, kw_only=True):
    sandbox: str
    name: str | None
    phase: str
    profile: str
    template: str
    created_at: float
    expires_at: float | None
    isolation: model.Isolation


class Sessions(Outcome, frozen=True, kw_only=True):
    sandboxes: list[Session]


class FileText(Outcome, frozen=True, kw_only=True):
    path: str
    content: str
    encoding: Encoding
    size: int
    truncated: Annotated[bool, msgspec.Meta(description="There is more; read on with `offset`.")]


class Written(Outcome, frozen=True, kw_only=True):
    path: str
    size: int


class Files(Outcome, frozen=True, kw_only=True):
    files: list[model.FileInfo]
    truncated: bool


class Deleted(Outcome, frozen=True, kw_only=True):
    deleted: str


class Snapshot(Outcome, frozen=True, kw_only=True):
    snapshot: str
    name: str | None
    sandbox: str
    created_at: float
    size_bytes: int
    files: int


# ── to and from the wire ───────────────────────────────────────────────────────────────────────────


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A JSON schema whose root is the object itself, as MCP wants it."""
    (_,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    root: dict[str, Any] = components.pop(kind.__name__)
    for part in (root, *components.values()):
        part.pop("title", None)
    root.setdefault("properties", {})
    if issubclass(kind, Arguments):
        for part in (root, *components.values()):
            part["properties"] = {name: _plainly(field) for name, field in part.get("properties", {}).items()}
    return {**root, "$defs": components} if components else root


def _plainly(field: dict[str, Any]) -> dict[str, Any]:
    """A field that may be left out, without saying that it may also be null: it may, but some models then always send one."""
    choices = field.get("anyOf", [])
    if {"type": "null"} not in choices or len(choices) != 2:
        return field
    rest = {
        key: value for key, value in field.items() if key != "anyOf" and (key, value) != ("default", None)
    }
    return {**next(choice for choice in choices if choice != {"type": "null"}), **rest}


def arguments(kind: type[Arguments], given: dict[str, Any] | None) -> Any:
    """What a tool was given; what is wrong with it is said in its own words."""
    try:
        return msgspec.convert(given or {}, kind)
    except msgspec.ValidationError as problem:
        cause, _, place = str(problem).partition(" - at `$")
        field = place.rstrip("`").lstrip(".")
        code = "argument_invalid"
        hint = f"it takes {', '.join(kind.__struct_fields__) or 'no arguments'}"
        if "unknown field" in cause:
            code = "field_unknown"
            hint = errors.nearest(cause.partition("`")[2].partition("`")[0], kind.__struct_fields__)
        elif field == "profile":
            code, hint = "profile_unknown", "use restrictive, moderate or permissive"
        words = f"{cause[:1].lower()}{cause[1:]}"
        raise errors.error(code, f"`{field}`: {words}" if field else words, hint=hint, field=field) from None


def ran(result: model.ExecResult) -> Ran:
    return Ran(
        exit_code=result.shell_code,
        stdout=result.stdout,
        stderr=result.stderr,
        timed_out=result.timed_out,
        oom_killed=result.oom_killed,
        truncated=result.truncated,
        stdout_bytes=result.stdout_total,
        stderr_bytes=result.stderr_total,
        duration_ms=result.duration_ms,
        denials=list(result.denials),
        faults=list(result.faults),
        isolation=result.isolation,
    )


def session(info: model.SandboxInfo) -> Session:
    return Session(
        sandbox=info.id,
        name=info.name,
        phase=info.phase,
        profile=info.profile,
        template=info.template,
        created_at=info.created_at,
        expires_at=info.expires_at,
        isolation=info.isolation,
    )


def snapshot(info: stock.SnapshotInfo) -> Snapshot:
    return Snapshot(
        snapshot=info.id,
        name=info.name,
        sandbox=info.sandbox,
        created_at=info.created_at,
        size_bytes=info.size_bytes,
        files=info.files,
    )


def clip(text: str, limit: int) -> tuple[str, bool]:
    """The head and the tail of a text, and whether something is missing between them."""
    if len(text) <= limit:
        return text, False
    half = limit // 2
    missing = len(text) - 2 * half
    return f"{text[:half]}\n[... {missing} characters not kept ...]\n{text[-half:]}", True
