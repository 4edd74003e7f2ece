"""What adapters implement and engines use. Small, and each promise is said.

A `Driver` makes `Machine`s; a machine is one running sandbox as the engine sees it: processes by pid, files by
descriptor, and an end. Drivers and engines never import each other; `wiring` introduces them.
"""

from __future__ import annotations

import asyncio
import builtins
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from cloche import errors, events, model, policy

if TYPE_CHECKING:
    from cloche import stock  # a one-shot command needs none of it


class Clock(Protocol):
    """Wall time for what users see, monotonic time for what expires."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...


class ExitStatus(NamedTuple):
    exit_code: int | None
    signal: int | None
    cpu_ms: float
    max_rss_mib: float


class Start(NamedTuple):
    """A command for a machine. `fds` become 0, 1, 2, 3, … (with `pty`: one terminal as 0–2, then 3, …).

    `together`: nobody needs to know of the start before the end. A machine may then tell both at once, if the end comes
    within a few milliseconds.
    """

    command: str | Sequence[str]
    env: dict[str, str]
    cwd: str | None
    user: str
    fds: Sequence[int]
    pty: bool = False
    together: bool = False


class Child(NamedTuple):
    """A started command: its pid inside, and its end."""

    pid: int
    exited: asyncio.Future[ExitStatus]


class Interpreter(NamedTuple):
    """How a code context of one language is started: a command whose descriptor 3 is a socket to the engine, and where
    it has one, a bootstrap as descriptor 4. `frames` says whether it speaks frames or bare statuses."""

    command: Sequence[str]
    source: Callable[[], int] | None
    frames: bool


class Usage(NamedTuple):
    memory_mib: float
    memory_peak_mib: float
    cpu_ms: float
    pids: int
    oom_kills: int


class Binding(NamedTuple):
    """What a running machine is given at once: what differs between the sandboxes of one template."""

    env: dict[str, str]
    """For executions to come."""
    files: Sequence[tuple[str, bytes, int | None]] = ()
    """(path, content, mode), written as the user; missing directories are made."""
    resources: model.Resources | None = None
    """Limits from now on; the disk's cannot change."""


class Terminal(NamedTuple):
    """Both ends of a terminal that lives inside; the holder closes them."""

    master_fd: int
    slave_fd: int


class Shown(NamedTuple):
    """A host path shown inside; `owner` maps the workspace's owner to the sandbox's user."""

    source: str
    target: str
    writable: bool = False
    owner: bool = False


class Exposure(NamedTuple):
    """What of the host a sandbox sees beyond its template: a workspace. The fields are applied in this order, shallow
    targets first within each; no target has a symlink in it but as its last part, which is never followed."""

    root: str
    owner: tuple[int, int]
    overlay: bool = False
    """The root is shown with a private writable layer above it."""
    binds: tuple[Shown, ...] = ()
    private: tuple[tuple[str, str], ...] = ()
    """(directory of ours, target): writable."""
    pinned: tuple[str, ...] = ()
    """Bound onto themselves, writable, so that they cannot be renamed."""
    protect: tuple[tuple[str, str], ...] = ()
    """(host path, target): read-only."""
    deny: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    shown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Saved(NamedTuple):
    """A machine's files, kept in a directory."""

    size_bytes: int
    files: int
    """Files and directories that were made or changed."""


class Workspace(ABC):
    """A host directory lent to one sandbox."""

    exposure: Exposure

    @abstractmethod
    def diff(self, upper: str) -> list[model.FileChange]:
        """What the layer at `upper` (a directory on the host) changes of an overlaid workspace."""

    @abstractmethod
    def apply(self, upper: str, paths: Sequence[str] | None = None) -> list[str]:
        """Take changes over into the workspace: all, or those at `paths`. What may not be taken over (links out,
        specials, control files) makes it `apply_refused`, and then nothing is."""

    @abstractmethod
    def finish(self) -> model.WorkspaceReport:
        """Put the host side in order after the sandbox's end. Twice is harmless."""


class Workspaces(ABC):
    @abstractmethod
    def open(
        self, directory: str, *, rules: policy.Merged, sandbox_id: str, overlay: bool, path: str | None = None
    ) -> Workspace:
        """Prepare a directory, and the toolchains that the caller's PATH leads to; raises `workspace_not_found` or `workspace_refused` and has changed nothing then."""

    @abstractmethod
    def show(self, *, rules: policy.Merged) -> Workspace:
        """The directories that `files.read` and `files.write` name, without a workspace; raises `host_path_refused`."""

    @abstractmethod
    def sweep(self) -> list[str]:
        """Finish what dead engines left; the sandboxes concerned."""


class Capture(NamedTuple):
    """A sandbox's end of the network: sockets made inside it, as (role, descriptor), for an `Egress` to accept on. The
    holder closes them. `how` is `nft` where every connection is led to them; otherwise `note` says what is missing."""

    sockets: tuple[tuple[str, int], ...]
    how: str
    note: str = ""


class Flow(NamedTuple):
    """A connection out of a sandbox was decided on, or has ended. What it says was checked; what it names is not ours."""

    sandbox: str
    stage: Literal["decided", "closed", "credential"]
    verdict: Literal["allow", "deny"]
    operation: str
    target: str
    reason: str
    rule: str = ""
    source: str = ""
    method: str = ""
    address: str = ""
    peer: tuple[str, int] | None = None
    """The client's end inside: address and port."""
    bytes_up: int = 0
    bytes_down: int = 0
    duration_ms: float = 0
    dropped: int = 0
    secret: str = ""
    place: str = ""
    """Stage `credential`: which secret was put in, and where in the request."""
    denial: model.Denial | None = None


class Permit(NamedTuple):
    """What one sandbox may reach, as it stands now."""

    network: policy.Network
    granted: tuple[str, ...] = ()
    """Rules that somebody who was asked has granted."""
    asks: bool = False
    """Somebody is there to be asked about what no rule decides."""
    trusted: bool = False
    """The sandbox has the bundle with our authority, so TLS may be ended where rules or credentials need it."""


class Egress(ABC):
    """The one way out for all sandboxes of an engine.

    `attach`, `update` and `detach` return when it is so; while the process behind is being replaced they wait for it, and
    raise `network_unavailable` if it does not come. Nothing is let through in between. A refused client hears of it after
    `on_flow` has returned.
    """

    on_flow: Callable[[Flow], None]
    on_fault: Callable[[str], None]
    """Called with the reason when no sandbox has a network any more, and with "" when all have it back."""
    on_ask: Callable[[model.Question, tuple[str, int] | None], Awaitable[tuple[bool, str]]]
    """Whether a connection (and the client's end of it) may be made, and if not, why: for what may be asked about."""

    @abstractmethod
    def check(self, network: policy.Network) -> None:
        """Raise `policy_invalid` for rules that cannot be."""

    @abstractmethod
    async def start(self) -> None:
        """Get ready; also done by the first `attach`."""

    @abstractmethod
    def environment(self, trust: str | None) -> dict[str, str]:
        """Variables that lead programs inside to the proxy and, where it is given, to the bundle of authorities there."""

    @abstractmethod
    def sees_inside(self, network: policy.Network) -> bool:
        """Whether these rules can only be obeyed by ending TLS: then the sandbox must trust our authority."""

    @abstractmethod
    async def trust(self) -> bytes:
        """The bundle of authorities, ours among them, for a sandbox whose TLS is ended."""

    @abstractmethod
    async def attach(
        self, sandbox: str, capture: Capture, permit: Permit, credentials: Credentials | None = None
    ) -> None:
        """Credentials are put in only where the permit says `trusted`."""

    @abstractmethod
    async def update(self, sandbox: str, permit: Permit) -> None:
        """New rules; connections that they refuse have ended when this returns."""

    @abstractmethod
    async def detach(self, sandbox: str) -> None:
        """Forget a sandbox; one that is not there is no error."""

    @abstractmethod
    async def aclose(self) -> None: ...


class Layer(NamedTuple):
    """What a sandbox wrote above its root: the upper directory of an overlay (device 0:0 is a whiteout, the attributes
    `opaque` and `redirect` mean what the kernel means by them). Outlives the sandbox in whoever duplicated it."""

    fd: int
    first_id: int | None
    """The host's id of the sandbox's root, from which owners are counted; None where all is the engine's own."""


class Image(Protocol):
    """A root that sandboxes start from: unpacked, fitted with what a sandbox needs, never written again.

    Its files belong to the ids that the image says if the engine is root, else to the engine's own. It stays where it is
    until it is released; twice is harmless.
    """

    @property
    def info(self) -> model.ImageInfo: ...

    @property
    def root(self) -> str: ...

    @property
    def owns(self) -> bool:
        """Whether root of a sandbox on it may give files away and pass over modes, as package managers must. The ids are
        the sandbox's own, so this reaches nobody else's files; only builds have it."""
        ...

    def release(self) -> None: ...


Progress = Callable[[model.ImageProgress], None]


class Ran(NamedTuple):
    """A step of a build. `layer` is what it wrote, for the caller to close, or None where it failed."""

    result: model.ExecResult
    layer: Layer | None


class Runner(Protocol):
    """Runs the steps of a build, each in a sandbox of its own with the build's policy."""

    async def run(self, image: Image, line: str, *, root: bool, say: Callable[[str], None]) -> Ran:
        """Run a shell line on an image and tell what it writes line by line. With `root`, by root or not at all
        (`needs_subuids`). A step that the network's rules stopped has failed, whatever its exit code."""


class ImageSource(ABC):
    """Where roots come from. A reference means what docs/guides/images.md says."""

    @abstractmethod
    async def resolve(
        self, reference: str, progress: Progress | None = None, *, fresh: bool = False
    ) -> Image:
        """The image, fetched and unpacked if it is not here; with `fresh`, what the reference means now. Raises one of the
        `image_…` errors, and leaves nothing half-made."""

    @abstractmethod
    async def build(
        self, recipe: dict[str, Any] | str, directory: str, runner: Runner, progress: Progress
    ) -> Image:
        """The image of a recipe (data, or YAML text) whose copies are below `directory`. `recipe_invalid`, or
        `recipe_step_failed` with the end of the step's log."""

    @abstractmethod
    def images(self) -> list[model.ImageInfo]: ...

    @abstractmethod
    def find(self, reference: str) -> model.ImageInfo:
        """An image that is here, else `image_not_found`."""

    @abstractmethod
    def remove(self, reference: str) -> model.ImageInfo:
        """Remove what is here; `image_in_use` while a sandbox is made of it."""

    @abstractmethod
    def collect(self) -> list[model.ImageInfo]:
        """Remove half-made ones of dead engines, and beyond the size limit the least recently used; what went."""


class Machine(ABC):
    """One running sandbox.

    Every method raises `SandboxLost` once the machine has ended. Methods that name a path raise the error of the path
    (`file_not_found`, `permission_denied`, …). Descriptors returned are the caller's to close; a descriptor from
    `open_file` is always a regular file.
    """

    id: str
    isolation: model.Isolation
    limits: dict[str, model.Limit]
    shown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cwd: str = "/workspace"
    """Where commands start and what relative paths mean."""
    upper_fd: int = -1
    """The writable layer above an overlaid workspace, as a directory; -1 where there is none."""
    layer: Layer | None = None
    """The writable layer above the root, where there is one; the machine closes it at its end."""
    ended: asyncio.Future[str]
    """Resolves once, with the reason, when nothing of the machine runs any more."""
    prepared: Capture | None = None
    """Its end of the network, made ahead of need and not attached to anything yet."""
    on_denial: Callable[[int, model.Denial], None]
    """Called with the pid of an execution's leader (0 if unknown) for everything the glass stopped."""

    @abstractmethod
    async def start(self, start: Start) -> Child:
        """Start a command. Cancelled meanwhile, it leaves none running: nobody else would know of it."""

    @abstractmethod
    async def signal(self, pid: int, number: int, *, scope: str = "group") -> None:
        """Signal a leader, its process group, or (`tree`) everything that came from it."""

    async def reserve(self, count: int) -> int:
        """Marks for processes that commands will make themselves (see `adopt`): the first, from which they count down."""
        raise errors.error(
            "not_supported_by_driver", f"the driver {self.isolation.driver!r} cannot fork a context"
        )

    async def adopt(self, pids: Sequence[tuple[int, int]]) -> dict[int, Child]:
        """Take processes that lead sessions, given with their marks, for commands of ours; those that are there."""
        raise errors.error(
            "not_supported_by_driver", f"the driver {self.isolation.driver!r} cannot fork a context"
        )

    @abstractmethod
    async def open_file(
        self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False
    ) -> int: ...

    @abstractmethod
    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        """`stat`, `list`, `move`, `replace`, `remove`, `make_dir`, `chmod` or `symlink`; see engine/files.py for the
        arguments. `replace` moves onto a regular file or nothing, and refuses all else as `not_regular_file`."""

    @abstractmethod
    def watch(self, path: str, *, recursive: bool, user: str = "user") -> AsyncIterator[model.FileEvent]: ...

    @abstractmethod
    async def connect(self, port: int) -> int:
        """A TCP connection to a port of the sandbox's own loopback, as a descriptor; `port_closed` where nobody listens. What
        comes is a socket that the inside may share: it must never be waited for, only asked."""

    async def listening(self) -> list[tuple[str, int]]:
        """The addresses and TCP ports that somebody inside listens on."""
        raise errors.error(
            "not_supported_by_driver",
            f"the driver {self.isolation.driver!r} cannot tell a sandbox's ports from the host's",
        )

    async def capture(self) -> Capture:
        """Make the sandbox's end of the network; without it, and when its sockets are closed, every connection fails at once.

        Raises `network_unavailable` if it cannot be made now, `not_supported_by_driver` if never.
        """
        raise errors.error(
            "not_supported_by_driver",
            f"sandboxes of the driver {self.isolation.driver!r} cannot have a network: connections could not be led to the rules",
            hint="leave the network off, or run where `cloche doctor` shows the driver 'namespaces'",
        )

    def leader_of(self, peer: tuple[str, int]) -> int:
        """The pid inside of the execution's leader whose process holds the socket bound to `peer`; 0 if unknown."""
        return 0

    @abstractmethod
    def open_terminal(self) -> Terminal: ...

    def read_only_rule(self, path: str) -> str | None:
        """The rule that makes a path inside read-only, None if none of ours does."""
        return None

    @abstractmethod
    async def bind(self, binding: Binding) -> None:
        """Take on variables, files and limits, in one message to the inside. Limits that this machine cannot change are
        `not_supported_by_driver`, before anything is bound; a file that cannot be written raises the error of its path,
        and then some of the files may be there: the sandbox is not fit for use."""

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    async def pause(self) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    async def save(self, directory: str) -> Saved:
        """Keep the files of a machine that is paused in an empty directory of ours, for `Driver.create` to start from.
        `disk_full` where they do not fit; what was written by then is the caller's to remove."""
        raise errors.error(
            "not_supported_by_driver",
            f"the driver {self.isolation.driver!r} cannot keep a sandbox's files",
            hint="snapshots, forks and archives need the driver `namespaces`",
        )

    async def attach_volume(self, directory: str, target: str, *, read_only: bool) -> None:
        """Show a volume (`Driver.make_volume`) at a directory inside, now and until the machine ends. Several readers or
        one writer: `volume_in_use` otherwise. A link on the way to `target` is refused, a missing directory made."""
        raise _no_volumes(self.isolation.driver)

    @abstractmethod
    async def kill(self, reason: str) -> None:
        """End everything and wait until nothing is left: no process, mount, cgroup or file. Twice is harmless."""

    @abstractmethod
    def kill_now(self) -> None:
        """The same without waiting, for a caller that is going away itself."""


class Tunnel(ABC):
    """Bytes both ways between a caller and a TCP port inside. One task reads and one writes at a time; nothing is held but
    what is on its way, so who does not read makes the other side wait. `connection_lost` once the other side has cut it,
    `sandbox_lost` once the sandbox has ended."""

    @abstractmethod
    async def read(self, most: int = 1 << 16) -> bytes:
        """What has come, at most so much; empty once the inside will send no more."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Returns when all of it is on its way."""

    @abstractmethod
    async def end(self) -> None:
        """No more will be written; reading goes on. Twice is harmless."""

    @abstractmethod
    async def aclose(self) -> None:
        """Leave. Twice is harmless."""


class Driver(ABC):
    """Makes machines of one isolation level."""

    name: str
    level: model.Level

    @abstractmethod
    async def start(self) -> None:
        """Get ready; raises `NotSupported` with the cause and the fix where this host cannot."""

    async def check(self) -> None:  # noqa: B027 - what needs nothing that could die has nothing to look at
        """Whether a machine could be made now; raises why not. What died is started again."""

    @abstractmethod
    async def create(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: Exposure | None = None,
        image: Image | None = None,
    ) -> Machine:
        """Make a running machine, or raise and leave nothing behind. A driver that cannot show the `exposure` exactly as
        described, or has no root but the host's, refuses with `not_supported_by_driver`. The `image` is held by the caller
        until the machine has ended."""

    async def restore(
        self, kept: str, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged, exposure: Exposure | None = None,
        image: Image | None = None,
    ) -> Machine:  # fmt: skip
        """The same, with the files that `Machine.save` kept in a directory; the directory stays as it is."""
        raise errors.error(
            "not_supported_by_driver",
            f"the driver {self.name!r} cannot start a sandbox with files that were kept",
            hint="snapshots, forks and archives need the driver `namespaces`",
        )

    async def make_volume(self, directory: str, size_mib: int) -> model.Limit:
        """Make an empty volume in an empty directory of ours; how its size is held."""
        raise _no_volumes(self.name)

    async def volume_used(self, directory: str) -> int:
        """The bytes that a volume takes."""
        raise _no_volumes(self.name)

    async def check_volume(self, directory: str) -> None:
        """`volume_in_use` where a sandbox has it, in whatever engine."""
        raise _no_volumes(self.name)

    async def remove_volume(self, directory: str) -> None:
        """Remove what `make_volume` made, and what was put into it."""
        raise _no_volumes(self.name)

    async def compare(self, kept: str, other: str) -> list[model.FileChange]:
        """What differs between the files kept in two directories, going from the first to the second."""
        raise errors.error(
            "not_supported_by_driver", f"the driver {self.name!r} cannot compare files that were kept"
        )

    @abstractmethod
    async def close(self) -> None:
        """End every machine and the driver's own processes. Twice is harmless."""

    @abstractmethod
    def sweep(self, keep: set[str]) -> list[str]:
        """Remove what machines of dead engines left behind; the ids swept."""


class Credentials:
    """What the network puts in for one sandbox: the secrets' names, and a sealed memory file with their values that only the
    egress process reads. The holder closes it."""

    __slots__ = ("fd", "names")

    def __init__(self, names: tuple[str, ...], fd: int) -> None:
        self.names = names
        self.fd = fd

    def __repr__(self) -> str:
        return f"Credentials({', '.join(self.names)})"

    def close(self) -> None:
        """Twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Grants(NamedTuple):
    """What a sandbox gets for the secrets it may use: placeholders to see, and credentials that it never sees."""

    env: dict[str, str]
    files: dict[str, bytes]
    """Path inside → content; readable by the sandbox's user alone."""
    credentials: Credentials | None


class Secrets(ABC):
    """Stored secrets. Methods block; callers in an event loop use a thread. Nothing here returns, prints or raises a value."""

    @abstractmethod
    def list(self) -> builtins.list[model.SecretInfo]: ...

    @abstractmethod
    def set(
        self, secret: model.Secret, value: bytes, if_version: str | None = None
    ) -> tuple[model.SecretInfo, bool]:
        """Store it, and whether it replaced one of that name; raises `secret_invalid`, `version_conflict`."""

    @abstractmethod
    def remove(self, name: str, if_version: str | None = None) -> model.SecretInfo:
        """Raises `secret_not_found`, `version_conflict`."""

    @abstractmethod
    def rotate_key(self) -> int:
        """Seal all values with a new key; how many."""

    @abstractmethod
    def grants(self, names: Iterable[str], sandbox_id: str) -> Grants:
        """New placeholders for one sandbox; raises `secret_not_found`, and `secrets_locked` without the key."""


def _no_volumes(driver: str) -> errors.ClocheError:
    return errors.error(
        "not_supported_by_driver",
        f"the driver {driver!r} has no volumes",
        hint="volumes need the driver `namespaces`",
    )


class Backend(ABC):
    """What the SDK works on: an engine in this process, or a server far away. Sandboxes are named by id or name.

    Every method may raise any `ClocheError`; a failing command is a result. Iterators end when their subject ends, and
    leaving one early is harmless.
    """

    where: str
    """The address of the server, or `in process`."""

    @abstractmethod
    async def create(self, spec: model.SandboxSpec) -> model.SandboxInfo: ...

    @abstractmethod
    async def info(self, sandbox: str) -> model.SandboxInfo: ...

    @abstractmethod
    async def list(self) -> builtins.list[model.SandboxInfo]: ...

    @abstractmethod
    async def delete(self, sandbox: str) -> None: ...

    @abstractmethod
    async def diff(self, sandbox: str) -> builtins.list[model.FileChange]:
        """What a sandbox changed of its overlaid workspace."""

    @abstractmethod
    async def apply(self, sandbox: str, paths: builtins.list[str] | None = None) -> builtins.list[str]:
        """Take the changes of an overlaid workspace over into the host's directory."""

    @abstractmethod
    async def workspace_report(self, sandbox: str) -> model.WorkspaceReport:
        """What a sandbox that has ended did to its workspace's control files."""

    @abstractmethod
    async def extend(self, sandbox: str, timeout_s: float | None) -> model.SandboxInfo: ...

    @abstractmethod
    async def get_policy(self, sandbox: str) -> policy.Merged:
        """The rules that hold for a sandbox now."""

    @abstractmethod
    async def update_policy(
        self, sandbox: str, change: dict[str, Any], if_version: str | None = None
    ) -> policy.Merged:
        """Replace fields of the group `network` of a live sandbox; the rules that hold when this returns. With `if_version`,
        only if `policy.version` of those that held is that: else `version_conflict`."""

    @abstractmethod
    async def check_policy(self, spec: model.SandboxSpec) -> policy.Merged:
        """The rules that a sandbox of this spec would have, files and ceilings of the engine's owner included; or what is
        wrong with them."""

    @abstractmethod
    async def explain_policy(
        self, kind: Literal["host", "path", "env", "secret"], target: str, sandbox: str | None = None,
        spec: model.SandboxSpec | None = None, write: bool = False, method: str | None = None, path: str | None = None,
    ) -> policy.explaining.Explanation:  # fmt: skip
        """Which rule decides about something, and where it stands: for a sandbox, or for one of this spec. `write` is about
        paths; `method` and `path` about plain HTTP to a host."""

    @abstractmethod
    def follow_asks(self, sandbox: str) -> AsyncIterator[model.Question]:
        """Be asked about what a sandbox wants to reach and no rule decides, and about rules that say `ask`. The first item,
        without an id, says that it is so from now on; leaving ends it, and what still waits is refused."""

    @abstractmethod
    async def answer_ask(
        self, sandbox: str, question: str, answer: Literal["once", "sandbox", "deny"], reason: str = ""
    ) -> None:
        """Answer a question: for this connection, for the sandbox's life, or no."""

    @abstractmethod
    async def allow_always(self, rule: str) -> None:
        """Add a network rule to the policy file of the engine's user; sandboxes to come have it."""

    @abstractmethod
    async def exec(self, sandbox: str, request: model.ExecRequest) -> model.ExecResult: ...

    @abstractmethod
    async def start(self, sandbox: str, request: model.ExecRequest) -> model.ExecutionInfo: ...

    @abstractmethod
    def attach(
        self, sandbox: str, execution: str, after: int = 0, wait: bool = True, lossless: bool = False
    ) -> AsyncIterator[model.StreamEvent]:
        """What a command writes. A lossless follower gets every byte, and the command waits for it."""

    @abstractmethod
    async def wait(self, sandbox: str, execution: str) -> model.ExecResult: ...

    @abstractmethod
    async def write_stdin(self, sandbox: str, execution: str, data: bytes, end: bool = False) -> None: ...

    @abstractmethod
    async def resize(self, sandbox: str, execution: str, columns: int, rows: int) -> None: ...

    @abstractmethod
    async def signal(self, sandbox: str, execution: str, number: int, tree: bool = False) -> None: ...

    @abstractmethod
    async def executions(self, sandbox: str) -> builtins.list[model.ExecutionInfo]: ...

    @abstractmethod
    async def dial(self, sandbox: str, port: int, timeout_s: float = 10) -> Tunnel:
        """A connection to a TCP port of the sandbox's own loopback, whatever its network is. `port_closed` where nobody
        listens, `wait_timeout` where nobody accepts."""

    @abstractmethod
    async def ports(self, sandbox: str) -> builtins.list[model.PortInfo]:
        """The TCP ports that something inside listens on, lowest first. Wakes the sandbox, and counts as no use of it."""

    @abstractmethod
    async def link(self, sandbox: str, port: int, ttl_s: float = 3600) -> model.LinkInfo:
        """An address that reaches the port without a key until it expires; where there is a server to serve it."""

    @abstractmethod
    async def create_token(
        self, sandbox: str, scopes: builtins.list[str], ttl_s: float = 900
    ) -> model.AccessToken:
        """A token for this sandbox alone; where there is a server to show it to."""

    @abstractmethod
    async def read_file(self, sandbox: str, path: str, user: str = "user") -> bytes: ...

    @abstractmethod
    def read_file_stream(self, sandbox: str, path: str, user: str = "user") -> AsyncIterator[bytes]: ...

    @abstractmethod
    async def write_file(
        self, sandbox: str, path: str, data: bytes, user: str = "user", mode: int | None = None
    ) -> model.FileInfo: ...

    @abstractmethod
    async def list_files(
        self, sandbox: str, path: str, depth: int = 1, user: str = "user"
    ) -> builtins.list[model.FileInfo]: ...

    @abstractmethod
    async def stat_file(self, sandbox: str, path: str, user: str = "user") -> model.FileInfo: ...

    @abstractmethod
    async def move_file(
        self, sandbox: str, path: str, target: str, overwrite: bool = True, user: str = "user"
    ) -> None: ...

    @abstractmethod
    async def remove_file(
        self, sandbox: str, path: str, recursive: bool = False, user: str = "user"
    ) -> None: ...

    @abstractmethod
    async def make_dir(self, sandbox: str, path: str, user: str = "user") -> bool: ...

    @abstractmethod
    def watch_files(
        self, sandbox: str, path: str, recursive: bool = False, user: str = "user"
    ) -> AsyncIterator[model.FileEvent]: ...

    @abstractmethod
    async def upload_tree(self, sandbox: str, path: str, archive: bytes, user: str = "user") -> int: ...

    @abstractmethod
    async def download_tree(self, sandbox: str, path: str, user: str = "user") -> bytes: ...

    @abstractmethod
    async def create_context(
        self, sandbox: str, language: str = "python", cwd: str | None = None
    ) -> model.ContextInfo: ...

    @abstractmethod
    async def contexts(self, sandbox: str) -> builtins.list[model.ContextInfo]: ...

    @abstractmethod
    async def run_code(
        self, sandbox: str, code: str, context: str | None = None, language: str = "python",
        env: dict[str, str] | None = None, timeout_s: float | None = None,
    ) -> model.CodeResult: ...  # fmt: skip

    @abstractmethod
    def run_code_stream(
        self, sandbox: str, code: str, context: str | None = None, language: str = "python",
        env: dict[str, str] | None = None, timeout_s: float | None = None,
    ) -> AsyncIterator[model.CodeEvent]:  # fmt: skip
        """The same, told as it happens; the last event is `CodeEnded`. Leaving early interrupts the code."""

    @abstractmethod
    async def interrupt_context(self, sandbox: str, context: str) -> None: ...

    @abstractmethod
    async def restart_context(self, sandbox: str, context: str) -> None: ...

    @abstractmethod
    async def delete_context(self, sandbox: str, context: str) -> None: ...

    # Templates, pools and claims. Whoever changes one may say which version (generation) they saw: another one there is
    # `version_conflict`.

    @abstractmethod
    async def put_template(
        self, spec: stock.TemplateSpec, if_version: str | None = None, warnings: tuple[str, ...] = ()
    ) -> stock.TemplateInfo:
        """Make or replace a template; `warnings` are those of the manifest it came from."""

    @abstractmethod
    async def template(self, name: str) -> stock.TemplateInfo: ...

    @abstractmethod
    async def templates(self) -> builtins.list[stock.TemplateInfo]: ...

    @abstractmethod
    async def delete_template(self, name: str, if_version: str | None = None) -> None: ...

    @abstractmethod
    async def put_pool(self, spec: stock.PoolSpec, if_generation: int | None = None) -> stock.PoolInfo:
        """Make a pool, or get the same one again; with `if_generation`, change it."""

    @abstractmethod
    async def pool(self, name: str) -> stock.PoolInfo: ...

    @abstractmethod
    async def pools(self) -> builtins.list[stock.PoolInfo]: ...

    @abstractmethod
    async def scale_pool(self, name: str, size: int, if_generation: int | None = None) -> stock.PoolInfo: ...

    @abstractmethod
    async def wait_pool(self, name: str, ready: int | None = None, timeout_s: float = 60) -> stock.PoolInfo:
        """Until so many members are ready; None is as many as are wanted."""

    @abstractmethod
    async def delete_pool(self, name: str, if_generation: int | None = None) -> None: ...

    @abstractmethod
    async def claim(self, spec: stock.ClaimSpec) -> stock.ClaimInfo: ...

    @abstractmethod
    async def claim_info(self, name: str) -> stock.ClaimInfo:
        """By the claim's name, or its sandbox."""

    @abstractmethod
    async def claims(self) -> builtins.list[stock.ClaimInfo]: ...

    @abstractmethod
    async def release_claim(self, name: str) -> None:
        """End a claim and its sandbox."""

    @abstractmethod
    async def fork_context(
        self, sandbox: str, context: str, count: int = 1
    ) -> builtins.list[model.ContextInfo]:
        """Copies of a Python context with everything it has in memory. All of them, or none."""

    @abstractmethod
    async def images(self) -> builtins.list[model.ImageInfo]:
        """The images that are unpacked here, most recently used first."""

    @abstractmethod
    async def image(self, reference: str) -> model.ImageInfo: ...

    @abstractmethod
    def pull_image(self, reference: str) -> AsyncIterator[model.ImageProgress]:
        """Fetch what a reference means now; the last item is `done` and has the image."""

    @abstractmethod
    def build_image(self, recipe: dict[str, Any] | str, directory: str) -> AsyncIterator[model.ImageProgress]:
        """Make the image of a recipe; the last item is `done` and has the image."""

    @abstractmethod
    async def remove_image(self, reference: str) -> model.ImageInfo: ...

    @abstractmethod
    async def gc_images(self) -> builtins.list[model.ImageInfo]:
        """Remove half-made images, and beyond the size limit the least recently used; what went."""

    @abstractmethod
    async def suspend(self, sandbox: str, mode: str = "pause") -> model.SandboxInfo:
        """`pause`: memory stays. `archive`: files only, which outlive engine and machine. `hibernate`: memory to disk,
        where the driver can."""

    @abstractmethod
    async def resume(self, sandbox: str) -> model.SandboxInfo: ...

    @abstractmethod
    async def snapshot(
        self, sandbox: str, name: str | None = None, tags: builtins.list[str] | None = None
    ) -> stock.SnapshotInfo:
        """Keep a sandbox's files as they are now."""

    @abstractmethod
    async def restore(self, sandbox: str, snapshot: str) -> model.SandboxInfo:
        """Set a sandbox back to a snapshot: every process ends, the id stays."""

    @abstractmethod
    async def fork(self, sandbox: str, count: int = 1) -> builtins.list[model.SandboxInfo]:
        """Sandboxes with the same files, and processes of their own. All of them, or none."""

    @abstractmethod
    async def snapshots(self, tag: str | None = None) -> builtins.list[stock.SnapshotInfo]: ...

    @abstractmethod
    async def snapshot_info(self, snapshot: str) -> stock.SnapshotInfo: ...

    @abstractmethod
    async def delete_snapshot(self, snapshot: str) -> None: ...

    @abstractmethod
    async def diff_snapshots(self, snapshot: str, other: str) -> builtins.list[model.FileChange]:
        """What became of the files of one snapshot in another."""

    @abstractmethod
    async def create_volume(self, spec: stock.VolumeSpec) -> stock.VolumeInfo:
        """The same name and body is the same volume; another body is `name_conflict`."""

    @abstractmethod
    async def volumes(self) -> builtins.list[stock.VolumeInfo]: ...

    @abstractmethod
    async def volume(self, volume: str) -> stock.VolumeInfo: ...

    @abstractmethod
    async def delete_volume(self, volume: str) -> None:
        """`volume_in_use` while a sandbox has it."""

    @abstractmethod
    async def usage(self, sandbox: str) -> model.SandboxUsage: ...

    @abstractmethod
    async def events(
        self, after: int = 0, sandbox: str | None = None, limit: int = 1000
    ) -> builtins.list[dict[str, Any]]: ...

    @abstractmethod
    def follow_events(self, after: int = 0, sandbox: str | None = None) -> AsyncIterator[dict[str, Any]]: ...

    @abstractmethod
    async def secrets(self) -> builtins.list[model.SecretInfo]:
        """The stored secrets, without their values."""

    @abstractmethod
    async def set_secret(
        self, secret: model.Secret, value: bytes, if_version: str | None = None
    ) -> model.SecretInfo:
        """Store a secret, or replace the one of that name (with `if_version`, only that version of it). Sandboxes that run
        keep what they were given."""

    @abstractmethod
    async def remove_secret(self, name: str, if_version: str | None = None) -> None: ...

    @abstractmethod
    async def rotate_secrets_key(self) -> int:
        """Seal all values with a new key; how many."""

    @abstractmethod
    async def audit_lines(
        self, since: float | None = None, until: float | None = None, sandbox: str | None = None,
        kinds: builtins.list[str] | None = None, actor: str | None = None, outcome: str | None = None,
        after: tuple[float, str, int] | None = None, limit: int = 1000,
    ) -> builtins.list[dict[str, Any]]:  # fmt: skip
        """The audit log's lines, of all writers, by (time, segment, seq); those after that place. Bookkeeping only where
        `kinds` names it."""

    @abstractmethod
    async def verify_audit(self, head: str | None = None) -> dict[str, Any]:
        """Whether the audit log is as it was written, and holds a head that was seen before."""

    @abstractmethod
    async def sweep(self) -> builtins.list[str]:
        """Remove what dead engines left behind."""

    @abstractmethod
    async def aclose(self) -> None: ...


class Store(ABC):
    """The durable nouns and the journal. Methods block; callers in an event loop use a thread."""

    @abstractmethod
    def check(self) -> None:
        """Whether something could be written now; raises why not. Nothing is."""

    @abstractmethod
    def put_sandbox(self, info: model.SandboxInfo, spec: model.SandboxSpec | None = None) -> None:
        """Insert or replace; with `spec`, an archived one can be brought back by."""

    @abstractmethod
    def archived(self) -> list[tuple[model.SandboxInfo, model.SandboxSpec]]:
        """Oldest first."""

    @abstractmethod
    def take_over(self, sandbox: str, owner: str, by: str) -> bool:
        """Give an archived sandbox of one engine to another; False if it is not there any more."""

    @abstractmethod
    def sandboxes(self, *, live_only: bool = False) -> list[model.SandboxInfo]: ...

    @abstractmethod
    def put_snapshot(self, info: stock.SnapshotInfo) -> None:
        """Insert. A name that another one has is `name_conflict`."""

    @abstractmethod
    def snapshots(self) -> list[stock.SnapshotInfo]:
        """Oldest first."""

    @abstractmethod
    def delete_snapshot(self, snapshot: str) -> None: ...

    @abstractmethod
    def put_volume(self, info: stock.VolumeInfo) -> None:
        """Insert; a volume of that name is `name_conflict`."""

    @abstractmethod
    def volumes(self) -> list[stock.VolumeInfo]: ...

    @abstractmethod
    def delete_volume(self, name: str) -> None: ...

    @abstractmethod
    def mark_lost(self, owner_alive: Callable[[str], bool], now: float) -> list[model.SandboxInfo]:
        """Turn the live sandboxes of dead owners into lost ones, with an event each; those that were."""

    # What waits. A claim is `binding`, then `bound`, then `ended`; a sandbox is in one live claim at most.

    @abstractmethod
    def put_template(self, info: stock.TemplateInfo, if_version: str | None = None) -> None: ...

    @abstractmethod
    def template(self, name: str) -> stock.TemplateInfo | None: ...

    @abstractmethod
    def templates(self) -> list[stock.TemplateInfo]: ...

    @abstractmethod
    def delete_template(self, name: str, if_version: str | None = None) -> None: ...

    @abstractmethod
    def put_pool(self, info: stock.PoolInfo) -> None: ...

    @abstractmethod
    def pools(self) -> list[stock.PoolInfo]: ...

    @abstractmethod
    def delete_pool(self, name: str) -> None: ...

    @abstractmethod
    def put_claim(self, info: stock.ClaimInfo, owner: str, phase: str) -> None: ...

    @abstractmethod
    def claim(self, name: str) -> stock.ClaimInfo | None: ...

    @abstractmethod
    def claims(self) -> list[stock.ClaimInfo]: ...

    @abstractmethod
    def delete_claim(self, name: str) -> None: ...

    @abstractmethod
    def settle_claims(self, owner_alive: Callable[[str], bool], now: float) -> list[str]:
        """Undo the half-done claims of dead owners and finish their bound ones; the names concerned."""

    @abstractmethod
    def record(self, happened: Iterable[events.AnyEvent]) -> list[int]:
        """Append events, all or none; their sequence numbers."""

    @abstractmethod
    def append_event(self, kind: str, sandbox: str | None, time: float, data: dict[str, Any]) -> int: ...

    @abstractmethod
    def events(
        self, *, after: int = 0, sandbox: str | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]: ...

    @abstractmethod
    def close(self) -> None: ...


class Audit(ABC):
    """What was done, kept so that a change to it shows. Fed by the journal, an event at a time."""

    @abstractmethod
    def masked(self, event: events.AnyEvent) -> events.AnyEvent:
        """The event without what looks like a credential: as it may be kept, here and elsewhere."""

    @abstractmethod
    def append(self, event: events.AnyEvent) -> None:
        """Take it. Never fails: `problem` and `check` tell."""

    @abstractmethod
    def flush(self) -> bool:
        """Hand what was taken to the kernel, which takes microseconds; whether `tend` has work."""

    @abstractmethod
    def tend(self) -> None:
        """Sign and sync what is due. Blocks."""

    @abstractmethod
    def check(self) -> None:
        """Refuse (`audit_unavailable`) if the owner wants nothing done that could not be recorded, and it could not."""

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why the log cannot be written now, in a sentence."""

    @abstractmethod
    def read(
        self, *, since: float | None, until: float | None, sandbox: str | None, kinds: Sequence[str], actor: str | None,
        outcome: str | None, after: tuple[float, str, int] | None, limit: int,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """See `Backend.audit_lines`. Blocks."""

    @abstractmethod
    def verify(self, head: str | None) -> dict[str, Any]:
        """See `Backend.verify_audit`. Blocks."""

    @abstractmethod
    def recover(self) -> list[str]:
        """Sign what dead writers left, remove what is too old; the names of both. Blocks."""

    @abstractmethod
    def close(self) -> None: ...
