"""What happened, as a tagged union: `match` on the class, or read one line of JSON.

    {"kind":"exited","sandbox":"k3…","time":1763200000.1,"actor":"uid:1000","execution":"e1","exit_code":0,…}

An event is a fact in the past tense. It is appended to the journal once and never changed; followers, the audit log
and metrics are fed from that one line. Two properties make it fit for that, and both are tested:

* *Bounded and printable.* Paths, commands and targets come from inside the glass. Text beyond `MAX_TEXT` characters is
  cut with an ellipsis, and what UTF-8 cannot carry (file names that are not text) is written as an escape, so whatever
  a sandbox does, its event is one short line.
* *Forward readable.* Unknown fields of a known kind are ignored when reading: a newer engine may add data. An unknown
  kind is `None` from `decode`, not an error, so that an old reader can skip what it does not know.

An event holds no output, no file content, no environment and no secret's value: journals are kept. A secret is named.

Whoever adds an act adds its kind here, in the past tense, and says what its outcome is if that is not `ok`.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec

from cloche import errors, model

MAX_TEXT = 1024
MAX_ITEMS = 64

EndReason = Literal["asked", "expired", "idle", "owner_gone", "engine_stopped", "failed"]
Verdict = Literal["allow", "deny", "ask"]
Change = Literal["created", "replaced", "updated", "deleted"]
Outcome = Literal["ok", "refused", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "failed")


caller: ContextVar[str] = ContextVar("caller")
"""Who asks, in the course of one request; set where callers are told apart. Without it, it is the engine's own user."""


class Trace(NamedTuple):
    """Where in a caller's trace a request stands (W3C Trace Context)."""

    id: str
    parent: str
    """The header as it goes on: `00-<trace>-<span>-<flags>`."""


trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace that a request belongs to, if its caller said so."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")


def read_trace(header: str | None) -> Trace | None:
    """What a `traceparent` says. One that is not well formed counts as none, as the standard wants it: a trace is no reason to refuse."""
    found = _TRACEPARENT.fullmatch(header) if header is not None and len(header) <= 512 else None
    if found is None or found[1] == "ff" or not found[2].strip("0") or not found[3].strip("0"):
        return None
    if found[1] == "00" and found[5] is not None:
        return None
    return Trace(found[2], f"00-{found[2]}-{found[3]}-{found[4]}")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What all events say: which sandbox (None before there is one), when, and who caused it."""

    sandbox: str | None
    time: float
    """Seconds since 1970: for readers. Order is the journal's sequence number, never this."""
    actor: str
    """Who caused it, in a word: `uid:1000`, `key:ci`, `key:ci@tenant`, `engine`, `guest`, `sweeper`."""
    trace: str | msgspec.UnsetType = msgspec.UNSET
    """The trace of the request behind it, if its caller has one."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            kept = bounded(value)
            if kept is not value:
                msgspec.structs.force_setattr(self, field, kept)


class Created(Event, frozen=True, kw_only=True, tag="created"):
    """A sandbox is ready for its first command."""

    name: str | None
    template: str
    profile: str
    isolation: model.Level
    driver: str


class Refused(Event, frozen=True, kw_only=True, tag="refused"):
    """A request was turned down, and nothing was made or changed."""

    operation: str
    code: str
    message: str


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """An execution began."""

    execution: str
    command: str
    user: str = "user"
    context: str | None = None
    """The code context that runs it, if it is code and not a command."""


class Exited(Event, frozen=True, kw_only=True, tag="exited"):
    """An execution ended; its output is in its log, not here."""

    execution: str
    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    duration_ms: float = 0


class Denied(Event, frozen=True, kw_only=True, tag="denied"):
    """The glass stopped something; `execution` is None where it cannot be told."""

    denial: model.Denial
    execution: str | None = None


class FileWritten(Event, frozen=True, kw_only=True, tag="file_written"):
    """A file was put into the sandbox from outside. Writes from inside are not observed."""

    path: str
    size: int


class FilesChanged(Event, frozen=True, kw_only=True, tag="files_changed"):
    """Files were put in, moved or removed from outside, other than by one write."""

    change: Literal["uploaded", "moved", "removed", "directory_made", "applied"]
    """`applied`: what lay above an overlaid workspace was taken over into it, on the host."""
    path: str
    target: str | None = None
    count: int = 1


class Extended(Event, frozen=True, kw_only=True, tag="extended"):
    """The life of a sandbox was set anew; None is without end."""

    expires_at: float | None


class Paused(Event, frozen=True, kw_only=True, tag="paused"):
    """Everything in the sandbox stands still; memory stays."""


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """A paused sandbox runs again."""


class Suspended(Event, frozen=True, kw_only=True, tag="suspended"):
    """A sandbox was put to sleep with its memory on disk; nothing of it runs."""


class Archived(Event, frozen=True, kw_only=True, tag="archived"):
    """Only the files of a sandbox were kept; its processes are gone."""


class Claimed(Event, frozen=True, kw_only=True, tag="claimed"):
    """A sandbox was given to whoever asked for one, for good."""

    pool: str | None
    template: str
    warm: bool
    reason: str = ""
    """Why it was not a warm one."""


class Forked(Event, frozen=True, kw_only=True, tag="forked"):
    """Copies of a sandbox were made; each has a `created` of its own."""

    children: tuple[str, ...]


class SnapshotMade(Event, frozen=True, kw_only=True, tag="snapshot_made"):
    """A sandbox's files (and memory, if it says so) were kept under an id."""

    snapshot: str
    name: str | None = None
    size: int = 0
    memory: bool = False


class SnapshotRestored(Event, frozen=True, kw_only=True, tag="snapshot_restored"):
    """A sandbox was set back to a snapshot."""

    snapshot: str


class SnapshotDeleted(Event, frozen=True, kw_only=True, tag="snapshot_deleted"):
    """A snapshot is gone."""

    snapshot: str


class Decided(Event, frozen=True, kw_only=True, tag="decided"):
    """A policy answered whether something may be done, above all a connection out of the sandbox."""

    verdict: Verdict
    operation: str
    """What was asked for: `connect`, `resolve`, a protocol's name, or a verb of ours."""
    target: str
    """`host:port`, a path, a name: as it was matched, never as it was spelled."""
    rule: str = ""
    source: str = ""
    """Where the rule stands: `profile moderate`, `/etc/cloche/ceiling.toml line 3`, `answer of uid:1000`."""
    reason: str = ""
    """A stable word: `allowed`, `not_allowed`, `private_address`, …"""
    method: str = ""
    address: str = ""
    execution: str | None = None
    dropped: int = 0
    """Decisions of this sandbox that were not written before this one, because there were too many."""


class CredentialUsed(Event, frozen=True, kw_only=True, tag="credential_used"):
    """A secret was put into a request on its way out. Its name and where it went; never its value."""

    secret: str
    host: str
    place: str = ""
    """`header authorization`, `query key`, …"""
    method: str = ""
    execution: str | None = None


class PolicyChanged(Event, frozen=True, kw_only=True, tag="policy_changed"):
    """What may be done is another thing now: in a sandbox, or (without one) for all that come."""

    change: Literal["updated", "trusted", "distrusted"]
    target: str
    """A file, a profile, `network`."""
    digest: str = ""
    summary: tuple[str, ...] = ()
    """What was added (`+allow pypi.org`) and taken away (`-deny …`)."""


class SecretChanged(Event, frozen=True, kw_only=True, tag="secret_changed"):
    """A secret was stored, bound anew, or deleted. Its value is not here."""

    name: str
    change: Change
    hosts: tuple[str, ...] = ()


class TemplateChanged(Event, frozen=True, kw_only=True, tag="template_changed"):
    """A template has another version, or is gone."""

    name: str
    change: Change
    version: str = ""


class PoolChanged(Event, frozen=True, kw_only=True, tag="pool_changed"):
    """A pool was made, set to another size, or removed."""

    name: str
    change: Change
    template: str = ""
    size: int | None = None


class VolumeChanged(Event, frozen=True, kw_only=True, tag="volume_changed"):
    """A volume was made, changed, or removed."""

    name: str
    change: Change


class ImageBuilt(Event, frozen=True, kw_only=True, tag="image_built"):
    """An image was made here."""

    image: str
    digest: str = ""


class ImagePulled(Event, frozen=True, kw_only=True, tag="image_pulled"):
    """An image was fetched from a registry."""

    image: str
    digest: str = ""


class Administered(Event, frozen=True, kw_only=True, tag="administered"):
    """Somebody tended the engine itself: a key made, remains swept, settings taken over, the audit log opened."""

    operation: str
    """Noun first: `key_made`, `key_revoked`, `swept`, `audit_failed`."""
    target: str = ""
    detail: str = ""
    failed: bool = False


class Deleted(Event, frozen=True, kw_only=True, tag="deleted"):
    """A sandbox ended by a decision: somebody's, or a rule's. Nothing of it is left."""

    reason: EndReason
    executions: int = 0


class Lost(Event, frozen=True, kw_only=True, tag="lost"):
    """A sandbox ended and nobody decided so; `owner` is the engine it belonged to, as `pid:starttime`."""

    reason: str
    owner: str


class Swept(Event, frozen=True, kw_only=True, tag="swept"):
    """Remains of a sandbox were removed after the fact."""

    remains: tuple[str, ...] = ()
    """What was found, a word each: `cgroup`, `directory`, `stub:.envrc`, …"""


AnyEvent = (
    Created
    | Refused
    | Started
    | Exited
    | Denied
    | Decided
    | CredentialUsed
    | FileWritten
    | FilesChanged
    | Claimed
    | Extended
    | Paused
    | Suspended
    | Archived
    | Resumed
    | Forked
    | SnapshotMade
    | SnapshotRestored
    | SnapshotDeleted
    | PolicyChanged
    | SecretChanged
    | TemplateChanged
    | PoolChanged
    | VolumeChanged
    | ImageBuilt
    | ImagePulled
    | Administered
    | Deleted
    | Lost
    | Swept
)
KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in AnyEvent.__args__}


class Row(NamedTuple):
    """An event as the journal stores it: what is searched for apart from the rest."""

    kind: str
    sandbox: str | None
    time: float
    data: dict[str, Any]


def bounded(value: Any) -> Any:
    """`value` with every text in it cut to size and printable as UTF-8; the very same object if it already is."""
    match value:
        case str():
            return _bounded_text(value)
        case tuple():
            kept = tuple(bounded(item) for item in value[:MAX_ITEMS])
            return value if kept == value else kept
        case msgspec.Struct():
            kept_fields = {name: bounded(getattr(value, name)) for name in value.__struct_fields__}
            kept_struct = msgspec.structs.replace(value, **kept_fields)
            return value if kept_struct == value else kept_struct
        case _:
            return value


def _bounded_text(text: str) -> str:
    if text.isascii() and len(text) <= MAX_TEXT:
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def outcome(event: AnyEvent) -> Outcome:
    """How the act went. A command that fails is `failed`; what a rule or a check stopped is `refused`."""
    match event:
        case Refused(code=code):
            return "failed" if _our_fault(code) else "refused"
        case Denied() | Decided(verdict="deny"):
            return "refused"
        case Exited(exit_code=exit_code):
            return "ok" if exit_code == 0 else "failed"
        case Deleted(reason="failed") | Lost() | Administered(failed=True):
            return "failed"
        case _:
            return "ok"


def _our_fault(code: str) -> bool:
    """Whether the request was good and we could not do it."""
    face = errors.TABLE.get(code)
    return face is None or face.http >= 500 or face.http == 410


_encoder = msgspec.json.Encoder()


@cache
def _decoder() -> msgspec.json.Decoder[AnyEvent]:
    """Made when something is read: a command only writes."""
    return msgspec.json.Decoder(AnyEvent)


def encode(event: AnyEvent) -> bytes:
    """One line of JSON, without its newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> AnyEvent | None:
    """The event of a line; None for a kind that this version does not know. A broken line raises ValueError."""
    try:
        return _decoder().decode(line)
    except msgspec.ValidationError:
        kind = msgspec.json.decode(line, type=dict[str, Any]).get("kind")
        if isinstance(kind, str) and kind not in KINDS:
            return None
        raise


def to_row(event: AnyEvent) -> Row:
    data: dict[str, Any] = msgspec.to_builtins(event)
    return Row(data.pop("kind"), data.pop("sandbox"), data.pop("time"), data)


def from_row(row: Row) -> AnyEvent | None:
    """The event that was stored; None for a kind that this version does not know."""
    if row.kind not in KINDS:
        return None
    whole = {"kind": row.kind, "sandbox": row.sandbox, "time": row.time, **row.data}
    event: AnyEvent = msgspec.convert(whole, AnyEvent)
    return event
