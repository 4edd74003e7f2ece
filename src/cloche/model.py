"""The nouns, as frozen data: what a caller asks for, what a sandbox is, what an execution was.

One declaration serves the SDK, the wire, the store and the documentation. Requests refuse unknown fields;
whatever is wrong with a request is said by its `check()`, before anything is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from cloche import errors

Level = Literal["microvm", "gvisor", "namespaces", "process"]
LEVELS: tuple[Level, ...] = ("process", "namespaces", "gvisor", "microvm")  # weakest first
Enforcement = Literal["enforced", "watched", "none"]
StreamName = Literal["stdout", "stderr"]

ID_LENGTH = 20
MAX_ARGUMENT = 128 * 1024  # MAX_ARG_STRLEN of Linux: one argument, its NUL included
MAX_ARGUMENTS = 2 * 1024 * 1024  # what execve takes in all with the usual 8 MiB stack
_ID_ALPHABET = b"abcdefghijklmnopqrstuvwxyz234567"
_ID_BYTES = _ID_ALPHABET * 8  # what each random byte stands for; 32 divides 256, so all are equally likely
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ENV_NAME = re.compile(r"[^=\0]+")


def new_id() -> str:
    """A DNS-safe id of fixed length. Starts with a letter, so that it is never read as a number."""
    raw = os.urandom(ID_LENGTH)  # not `secrets`, whose imports cost a command as much as all the nouns
    return chr(_ID_ALPHABET[raw[0] & 15]) + raw[1:].translate(_ID_BYTES).decode()


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape all nouns share."""


# ── what a caller asks for ─────────────────────────────────────────────────────────────────────────


class Resources(Noun, frozen=True, kw_only=True):
    """The limits of one sandbox. How each is held is reported in `SandboxInfo.limits`."""

    memory_mib: int = 512
    cpus: float = 1.0
    pids: int = 256
    disk_mib: int = 1024

    def check(self) -> None:
        bounds = {
            "memory_mib": (8, 1 << 24),
            "cpus": (0.01, 4096),
            "pids": (4, 1 << 22),
            "disk_mib": (4, 1 << 24),
        }
        for field, (low, high) in bounds.items():
            value = getattr(self, field)
            kinds = (int, float) if field == "cpus" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise errors.error(
                    "limit_invalid",
                    f"{field} is {value!r}; it must be a number between {low} and {high}",
                    hint=f"leave {field} out for the default of {getattr(DEFAULT_RESOURCES, field)}",
                    field=field,
                )


DEFAULT_RESOURCES = Resources()


AtTimeout = Literal["delete", "pause", "archive"]


class Ladder(Noun, frozen=True, kw_only=True):
    """How idleness suspends a sandbox, rung by rung; None leaves a rung out. Deletion is `idle_timeout_s`.

    `at_timeout` is what the end of `timeout_s` does: delete, or suspend. One that it suspended has no end until it is needed
    again, and then a new life as long as the last; where policy limits lives, suspension is one more of them.
    """

    pause_after_s: float | None = None
    """Memory stays; resuming takes about a millisecond."""
    archive_after_s: float | None = None
    """Files only; processes end. Survives a restart of the machine."""
    at_timeout: AtTimeout = "delete"

    def check(self) -> None:
        for field in ("pause_after_s", "archive_after_s"):
            check_seconds(field, getattr(self, field))
        first, then = self.pause_after_s, self.archive_after_s
        if first is not None and then is not None and then <= first:
            raise errors.error(
                "limit_invalid",
                f"archive_after_s is {then}, which is not later than pause_after_s ({first})",
                hint="a ladder goes down: pause first, archive later",
                field="archive_after_s",
            )


class Probe(Noun, frozen=True, kw_only=True):
    """Something to wait for: a port that accepts, or a command that exits with 0."""

    port: int | None = None
    command: str | list[str] | None = None
    timeout_s: float = 30
    every_s: float = 0.1


class FileToWrite(Noun, frozen=True, kw_only=True):
    path: str
    content: str = ""
    mode: int | None = None


class Action(Noun, frozen=True, kw_only=True):
    """One thing a new sandbox does before it counts as ready: exactly one of the fields."""

    run: str | list[str] | None = None
    write: FileToWrite | None = None
    wait_for: Probe | None = None
    suspend: Literal["now"] | None = None
    """Pause as soon as everything before it is done."""
    suspend_at: float | None = None
    """Pause at a moment (seconds since 1970)."""
    user: str = "user"
    timeout_s: float = 60

    @property
    def kind(self) -> str:
        chosen = [
            name for name in ("run", "write", "wait_for", "suspend", "suspend_at") if getattr(self, name)
        ]
        return chosen[0] if len(chosen) == 1 else ""

    def check(self) -> None:
        if not self.kind:
            raise errors.error(
                "action_invalid",
                "a startup action has exactly one of run, write, wait_for, suspend, suspend_at",
                field="startup",
            )
        if self.wait_for is not None and (self.wait_for.port is None) == (self.wait_for.command is None):
            raise errors.error(
                "action_invalid", "wait_for has a port or a command, and not both", field="wait_for"
            )
        check_seconds("timeout_s", self.timeout_s)


class Mount(Noun, frozen=True, kw_only=True):
    """A volume in a sandbox."""

    volume: str
    read_only: bool = False


class SandboxSpec(Noun, frozen=True, kw_only=True):
    """Everything that decides what a sandbox is. Two equal specs make interchangeable sandboxes."""

    name: str | None = None
    template: str = "base"
    profile: str = "moderate"
    mode: str | None = None
    """What a coding agent's command line needs, by the agent's name; stands where the profile would."""
    env: dict[str, str] = {}
    resources: Resources = DEFAULT_RESOURCES
    timeout_s: float | None = 300
    idle_timeout_s: float | None = None
    workspace: str | None = None
    overlay: bool = False
    path: str | None = None
    """The caller's PATH: a workspace shows the toolchains it leads to, read-only."""
    minimum_isolation: Level = "namespaces"
    driver: str | None = None
    labels: dict[str, str] = {}
    policy: dict[str, Any] = {}
    tenant: str = ""
    """Whose it is, on a server with several; names are unique within one."""
    stay: bool = False
    """A sandbox that stays outlives the connection that made it."""
    image: str | None = None
    """What the root is made of; None is the template's, and `host` the host's own programs."""
    snapshot: str | None = None
    """Whose files it starts with."""
    secrets: tuple[str, ...] = ()
    volumes: dict[str, Mount] = {}
    """Where inside → what."""
    cwd: str | None = None
    user: str = "user"
    startup: tuple[Action, ...] = ()
    contexts: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    ladder: Ladder = Ladder()
    inherit: tuple[str, ...] = ()
    """Fields that the caller left to the template (`env` and `labels` are always laid over it). Whoever takes the
    caller's words (SDK, CLI, a wire) fills it; `resources.memory_mib` names a field of a group."""

    @property
    def full_name(self) -> str | None:
        """The name as the engine knows it: unique over all tenants."""
        return f"{self.tenant}/{self.name}" if self.tenant and self.name else self.name

    def check(self) -> None:
        if self.name is not None:
            check_name(self.name)
        if self.image is not None and (not self.image or not self.image.isprintable()):
            raise errors.error("image_reference_invalid", f"{self.image[:200]!r} is not the name of an image")
        check_environment(self.env)
        for key, value in self.labels.items():
            if not key or len(key) > 256 or len(value) > 1024 or not (key + value).isprintable():
                raise errors.error(
                    "name_invalid", f"the label {key[:50]!r} is empty, too long or not printable"
                )
        self.resources.check()
        for field in ("timeout_s", "idle_timeout_s"):
            check_seconds(field, getattr(self, field))
        self.ladder.check()
        for action in self.startup:
            action.check()
        for target in self.volumes:
            check_path(target)


class ExecRequest(Noun, frozen=True, kw_only=True):
    """One command: a shell line, or an argument vector."""

    command: str | list[str]
    cwd: str | None = None
    env: dict[str, str] = {}
    stdin: bytes | None = None
    """Bytes to feed and close; None is an empty input, unless `open_stdin`."""
    open_stdin: bool = False
    timeout_s: float | None = None
    background_after_s: float | None = None
    user: str = "user"
    merge: bool = False
    pty: tuple[int, int] | None = None
    """Columns and rows of a terminal to run under."""
    output_limit: int | None = None
    """Bytes kept of each stream's head and tail together; None is the setting's."""

    def check(self) -> None:
        command = self.command
        if not command or command[0] == "":
            raise errors.error(
                "command_empty", "the command is empty", hint="give a shell line or a list of arguments"
            )
        arguments = [command] if isinstance(command, str) else command
        for index, argument in enumerate(arguments):
            if "\0" in argument:
                raise errors.error("argument_invalid", f"argument {index} contains a NUL byte")
            if byte_length(argument) >= MAX_ARGUMENT and not isinstance(command, str):
                raise errors.error(
                    "argument_too_long",
                    f"argument {index} is {len(argument)} characters; Linux takes less than 128 KiB for one",
                    hint="write it to a file (box.files.write) or pass it on stdin; a shell line may be longer",
                )
        if sum(byte_length(a) + 9 for a in arguments) > MAX_ARGUMENTS:
            raise errors.error("argument_too_long", "the command exceeds 2 MiB", hint="pass it by a file")
        if self.pty is not None and not all(0 < n < 10_000 for n in self.pty):
            raise errors.error("limit_invalid", f"a terminal of {self.pty[0]}x{self.pty[1]} is not possible")
        if self.output_limit is not None and not 0 < self.output_limit <= 1 << 30:
            raise errors.error("limit_invalid", f"output_limit is {self.output_limit}; it must be 1 to 1 GiB")
        check_environment(self.env)
        for field in ("timeout_s", "background_after_s"):
            check_seconds(field, getattr(self, field))
        if self.cwd is not None:
            check_path(self.cwd)
        if self.user not in ("user", "root"):
            raise errors.error(
                "user_not_found", f"there is no user {self.user!r} inside", hint="use 'user' or 'root'"
            )


def absolute_image(reference: str) -> str:
    """An image's name with its path as seen from here: only the caller knows what a relative one means."""
    scheme, _, path = reference.partition(":")
    return f"{scheme}:{os.path.abspath(path)}" if names_host_path(reference) and path else reference


def names_host_path(reference: str | None) -> bool:
    """Whether an image is a file or directory of the engine's host."""
    scheme, colon, _ = (reference or "").partition(":")
    return bool(colon) and scheme in ("dir", "oci", "oci-archive", "docker-archive")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise errors.error(
            "name_invalid",
            f"the name {name!r} is not 1 to 63 of a-z, 0-9 and '-', starting and ending with a letter or digit",
        )


def check_environment(environment: dict[str, str]) -> None:
    for key, value in environment.items():
        if not _ENV_NAME.fullmatch(key) or "\0" in value:
            raise errors.error(
                "environment_invalid",
                f"the variable {key!r} has an empty name, '=' in its name, or a NUL byte",
            )
        if byte_length(key) + byte_length(value) + 2 >= MAX_ARGUMENT:
            raise errors.error(
                "argument_too_long",
                f"the variable {key!r} exceeds 128 KiB",
                hint="pass it as a file (box.files.write)",
            )


def byte_length(text: str) -> int:
    """How many bytes the kernel will see; what cannot be said in bytes at all is refused."""
    try:
        return len(os.fsencode(text))
    except UnicodeEncodeError:
        raise errors.error("argument_invalid", f"{text[:50]!r} holds a surrogate that is no byte") from None


def check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise errors.error(
            "argument_invalid", f"the port is {port}", hint="ports are 1 to 65535", field="port"
        )


def check_seconds(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < 1e9:
        raise errors.error(
            "limit_invalid", f"{field} is {value!r}; it must be more than 0 seconds", field=field
        )


def check_path(path: str) -> str:
    """A path inside a sandbox. `..` is refused rather than resolved: it is a mistake or an attempt."""
    if not path or "\0" in path or "\n" in path or byte_length(path) > 4096:
        raise errors.error(
            "path_invalid", f"the path {path!r} is empty, too long, or has a NUL or newline in it"
        )
    if ".." in path.split("/"):
        raise errors.error(
            "path_invalid", f"the path {path!r} contains '..'", hint="give the path it leads to"
        )
    return path


# ── what a sandbox is ──────────────────────────────────────────────────────────────────────────────


class Isolation(Noun, frozen=True, kw_only=True):
    """How strong the glass is, as data."""

    level: Level
    driver: str
    user_namespace: bool = False
    seccomp: bool = False
    landlock_abi: int = 0
    uid_range: bool = False
    root: Literal["overlay", "read-only", "host"] = "host"
    network: Literal["off", "rules", "open"] = "off"
    missing: tuple[str, ...] = ()
    """What this host could not give, each as a sentence."""


class Limit(Noun, frozen=True, kw_only=True):
    """One limit: its value, and how honestly it is held."""

    value: float
    enforcement: Enforcement
    by: str


Phase = Literal["running", "paused", "archived", "deleted", "lost"]


class SandboxInfo(Noun, frozen=True, kw_only=True):
    """A sandbox as its users see it. Looking at it neither wakes it nor counts as use."""

    id: str
    name: str | None
    phase: Phase
    template: str
    profile: str
    created_at: float
    expires_at: float | None
    timeout_s: float | None = None
    """How long it was given to live when it was made or last extended."""
    idle_timeout_s: float | None
    isolation: Isolation
    limits: dict[str, Limit]
    server: str
    owner: str
    tenant: str = ""
    labels: dict[str, str] = {}
    shown: tuple[str, ...] = ()
    """Host paths that are visible inside."""
    warnings: tuple[str, ...] = ()
    executions: int = 0
    reason: str | None = None


class WorkspaceReport(Noun, frozen=True, kw_only=True):
    """What a sandbox did to the workspace's control files, in words for the person who looks at it."""

    control_files_changed: tuple[str, ...] = ()
    config_merged: tuple[str, ...] = ()
    config_dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class SandboxUsage(Noun, frozen=True, kw_only=True):
    """What a sandbox costs now, and has cost."""

    memory_mib: float
    memory_peak_mib: float
    cpu_ms: float
    pids: int
    oom_kills: int


# ── what a sandbox starts from ──────────────────────────────────────────────────────────────────────


ImageKind = Literal["directory", "layout", "archive", "registry", "recipe"]


class ImageInfo(Noun, frozen=True, kw_only=True):
    """An image that is unpacked here. Its `digest` is its name for good; a reference may come to mean another."""

    reference: str
    digest: str
    kind: ImageKind
    size_bytes: int
    """What it takes by itself: files that a recipe shares with the image it began from are counted there."""
    created_at: float
    last_used_at: float
    in_use: bool = False
    env: dict[str, str] = {}
    user: str = ""
    working_dir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    """What its maker chose, for whoever starts a program of it; a sandbox starts none by itself."""


class ImageProgress(Noun, frozen=True, kw_only=True):
    """One word about an image that is being made: a step begins, a line of its log, or it is done."""

    kind: Literal["step", "log", "done"]
    text: str = ""
    step: int = 0
    steps: int = 0
    cached: bool = False
    """The step was not run: its outcome was there."""
    image: ImageInfo | None = None


# ── what an execution was ──────────────────────────────────────────────────────────────────────────


class Secret(Noun, frozen=True, kw_only=True):
    """A credential by its name: where it may go, in which place of a request, and where a sandbox finds its placeholder.
    The value is never part of it."""

    name: str
    hosts: tuple[str, ...]
    """`host[:port]`, as in network rules; `*.` and `**.` before a name, but no network and nothing that is everybody's."""
    how: Literal["bearer", "basic", "header", "query"] = "bearer"
    """`bearer`: the field Authorization, in any scheme; `basic`: there, as password; `header`, `query`: the one named `field`."""
    user: str = ""
    """`basic`: the user that is sent with it; empty leaves the client's."""
    field: str = ""
    format: str = ""
    """`header`: what the field becomes, with {} for the value; empty replaces the placeholder where it stands."""
    env: str = ""
    """The variable that holds the placeholder inside."""
    file: str = ""
    """The file that holds it."""
    body: bool = False
    """Also replace the placeholder in the bodies of requests."""
    plain: bool = False
    """Also send it over HTTP without TLS."""


class SecretInfo(Secret, frozen=True, kw_only=True):
    """A secret that is stored."""

    created_at: float
    updated_at: float

    @property
    def version(self) -> str:
        """Another one after every change."""
        return f"{self.updated_at:.6f}"


Answer = Literal["once", "sandbox", "always", "deny"]


class Question(Noun, frozen=True, kw_only=True):
    """A connection that waits until somebody says whether it may be made. The first of a series has no id: from then on
    questions come."""

    id: str
    sandbox: str
    host: str = ""
    port: int = 0
    protocol: str = ""
    rule: str = ""
    """The rule that wants to be asked about; empty where no rule decides."""
    execution: str | None = None
    timeout_s: float = 0
    """How long there is to answer; afterwards it is refused."""

    @property
    def target(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Denial(Noun, frozen=True, kw_only=True):
    """Something the glass stopped, with the evidence for saying so."""

    kind: Literal["file", "syscall", "network", "limit"]
    operation: str
    target: str
    rule: str
    hint: str
    evidence: Literal["seccomp", "proxy", "limit", "landlock_audit", "inferred"]


class ExecResult(Noun, frozen=True, kw_only=True):
    """A finished command (or, with `process` set, one that went on in the background)."""

    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    truncated: bool = False
    stdout_total: int = 0
    stderr_total: int = 0
    duration_ms: float = 0
    cpu_ms: float = 0
    max_rss_mib: float = 0
    denials: tuple[Denial, ...] = ()
    faults: tuple[str, ...] = ()
    """What of ours failed while the command ran, each as a sentence: its outcome may be due to that."""
    isolation: Isolation
    execution: str = ""
    process: str | None = None

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def shell_code(self) -> int:
        """One number, as shells (and the CLI, MCP and E2B) say it: 124 for a time-out, 128+N for signal N."""
        if self.timed_out:
            return 124
        if self.signal is not None:
            return 128 + self.signal
        return 0 if self.exit_code is None else self.exit_code


class Output(Noun, frozen=True, kw_only=True, tag="output"):
    stream: StreamName
    data: bytes
    seq: int


class Denied(Noun, frozen=True, kw_only=True, tag="denied"):
    denial: Denial
    seq: int


class Truncated(Noun, frozen=True, kw_only=True, tag="truncated"):
    """Bytes of a stream that this follower does not get; the log's head and tail remain readable."""

    stream: StreamName
    skipped: int
    seq: int


class Exited(Noun, frozen=True, kw_only=True, tag="exited"):
    result: ExecResult
    seq: int


StreamEvent = Output | Denied | Truncated | Exited


class PortInfo(Noun, frozen=True, kw_only=True):
    """A TCP port that something inside listens on."""

    port: int
    address: str
    """What it listens on: `0.0.0.0` and `::` are everywhere, and a loopback address is no hindrance."""


TokenScope = Literal["sandboxes", "exec", "files", "ports", "events"]
"""What a token for one sandbox may be good for."""
TOKEN_SCOPES: tuple[TokenScope, ...] = get_args(TokenScope)
MOST_TOKEN_S = 7 * 86_400


class AccessToken(Noun, frozen=True, kw_only=True):
    """A token for one sandbox. Who has it may do in it what its scopes say, until it expires or the sandbox ends."""

    token: str
    sandbox: str
    scopes: tuple[str, ...]
    expires_at: float


def check_token(scopes: Sequence[str], ttl_s: float) -> None:
    for scope in scopes:
        if scope not in TOKEN_SCOPES:
            raise errors.error(
                "argument_invalid",
                f"{scope!r} is not a scope of a sandbox's token",
                hint=errors.nearest(scope, TOKEN_SCOPES),
                field="scopes",
            )
    if not scopes:
        raise errors.error("argument_invalid", "a token needs at least one scope", field="scopes")
    if not 1 <= ttl_s <= MOST_TOKEN_S:
        raise errors.error(
            "limit_invalid", f"ttl_s is {ttl_s:g}; it must be 1 to {MOST_TOKEN_S}", field="ttl_s"
        )


class LinkInfo(Noun, frozen=True, kw_only=True):
    """A preview link: who has it reaches one port of one sandbox, without a key, until it expires."""

    url: str
    expires_at: float


class ExecutionInfo(Noun, frozen=True, kw_only=True):
    """One command, live or finished, as `processes.list()` shows it."""

    id: str
    command: str
    pid: int
    started_at: float
    running: bool
    pty: bool
    exit_code: int | None = None
    signal: int | None = None


class FileInfo(Noun, frozen=True, kw_only=True):
    name: str
    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    owner: str
    group: str
    modified_at: float
    target: str | None = None


class FileChange(Noun, frozen=True, kw_only=True):
    """One difference between a workspace and the layer above it."""

    kind: Literal["added", "modified", "removed", "moved"]
    path: str
    type: Literal["file", "directory", "symlink", "special"]
    size: int = 0
    refused: str | None = None
    """Why `apply` will not take it over."""


class FileEvent(Noun, frozen=True, kw_only=True):
    type: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    path: str


class ContextInfo(Noun, frozen=True, kw_only=True):
    id: str
    language: str
    cwd: str
    pid: int


class CodeError(Noun, frozen=True, kw_only=True):
    name: str
    value: str
    traceback: str


class CodeResult(Noun, frozen=True, kw_only=True):
    """What one `run_code` gave. The user's own error is data here; it is never raised."""

    results: tuple[dict[str, Any], ...] = ()
    """Each display, as mime type → value, and `main` for the last expression's."""
    stdout: str = ""
    stderr: str = ""
    error: CodeError | None = None
    execution_count: int = 0
    exit_code: int | None = None

    @property
    def text(self) -> str | None:
        """The last expression's value as text, or None when there was none."""
        for result in reversed(self.results):
            if result.get("main"):
                text = result.get("text/plain")
                return None if text is None else str(text)
        return None


class CodeBegan(Noun, frozen=True, kw_only=True, tag="began"):
    """The code is running now; those of its context that came before have ended."""

    execution_count: int


class CodeOutput(Noun, frozen=True, kw_only=True, tag="output"):
    """What code printed, as it does. Characters are never torn."""

    stream: StreamName
    text: str


class CodeShown(Noun, frozen=True, kw_only=True, tag="shown"):
    """One display, as in `CodeResult.results`."""

    result: dict[str, Any]


class CodeFailed(Noun, frozen=True, kw_only=True, tag="failed"):
    error: CodeError


class CodeEnded(Noun, frozen=True, kw_only=True, tag="ended"):
    """The last event: the whole result, as `run_code` gives it."""

    result: CodeResult


CodeEvent = CodeBegan | CodeOutput | CodeShown | CodeFailed | CodeEnded
