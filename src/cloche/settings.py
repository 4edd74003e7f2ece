"""Settings: what may be chosen, why the default is what it is, and the one place where files and environment are read.

    ${XDG_CONFIG_HOME:-~/.config}/cloche/settings.toml      groups as tables; every key is a field below
    ${XDG_CONFIG_HOME:-~/.config}/cloche/policy.toml        your policy; a project's is cloche.toml in its root
    CLOCHE_HOME  CLOCHE_URL  CLOCHE_API_KEY  CLOCHE_CA_FILE  CLOCHE_SECRETS_KEY  CLOCHE_KEEPER  CI

A setting is the owner's choice for this machine; what one sandbox gets is its spec, what it may touch its policy. There
are few, each has a paragraph, and the reference page is tested against this file. Where state lives is chosen by
environment alone, so that the thin client finds its keeper without parsing TOML.

Mistakes are reported with file, line and key. The line of a key is found by asking the parser itself: the first prefix
of the file that parses and has the key ends with it. That is exact for every spelling TOML allows, and only a mistake
pays for it. Policy files may come with somebody's repository, so size, depth and the effort of that search are bounded.
Because commands must start fast, the TOML parser is imported only if there is a file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from cloche import errors, model, policy

MAX_SOCKET_PATH = 107  # sun_path of Linux, without its NUL
MAX_FILE = 64 << 10
_MAX_EFFORT = 2 << 20  # characters parsed to find a line: about a second

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
T = TypeVar("T", bound=msgspec.Struct)


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape all groups share."""


class Limits(Group, frozen=True, kw_only=True):
    """What one engine may hold."""

    max_sandboxes: Positive = 2000
    """Live sandboxes of one engine. One more is refused with `capacity_exceeded`. An idle sandbox takes about 2 MiB
    and a handful of descriptors; 2000 of them fit a small machine, and a runaway loop meets a limit before the
    machine does."""

    output_limit_bytes: Positive = 1 << 20
    """Bytes of each stream of an execution that its result holds: the first and the last half; what lies between is
    counted and left to the log. 1 MiB is more than a model or a person reads, and a thousand results fit in memory. An
    execution may ask for less or more by `output_limit`."""

    log_limit_mib: Positive = 256
    """MiB of one execution's full output that are kept on disk, for reading by cursor. Beyond it the oldest bytes go. It
    holds the output of a long build, and a flood cannot fill the disk."""

    log_linger_s: Seconds = 600
    """Seconds that the full log of a finished execution stays readable while its sandbox lives. Ten minutes are
    enough to come back for it; the log never outlives the sandbox."""


class Defaults(Group, frozen=True, kw_only=True):
    """What a sandbox gets where its maker says nothing."""

    profile: str = "moderate"
    """The policy profile: `restrictive`, `moderate`, `permissive`, or one of your policy file. `moderate` has a writable root that is thrown away, and no network: most work goes well and
    nothing gets out."""

    template: str = "base"
    """The starting point. `base` shows the programs of this machine, read-only; it works offline and needs no image."""

    minimum_isolation: model.Level = "namespaces"
    """The weakest glass that is acceptable. Below it creation fails and says why; isolation is never lowered
    silently. `process` shares the file system view of the host and must be chosen on purpose."""

    resources: model.Resources = model.DEFAULT_RESOURCES
    """Memory and disk in MiB, processors, and processes (`memory_mib`, `disk_mib`, `cpus`, `pids`). The defaults suit
    a test run or a script, and several of them at once suit a laptop."""

    timeout_s: Seconds | None = 300
    """Seconds a sandbox lives from its creation or its last `extend`; `"none"` is without end. Five minutes, because
    what was forgotten should go away, and whoever needs more knows it."""

    idle_timeout_s: Seconds | None = None
    """Seconds without an execution or a byte on streams, files or ports after which a sandbox ends; `"none"` (the
    default) leaves that to `timeout_s`."""


class Keeper(Group, frozen=True, kw_only=True):
    """The background engine that keeps sandboxes between commands."""

    start: bool = True
    """Whether a command may leave a keeper starting behind it. `CLOCHE_KEEPER=off` or `CI` in the environment
    say no, `CLOCHE_KEEPER=on` says yes even there. A sandbox that is made to stay needs one in any case."""

    idle_exit_s: Seconds = 60
    """Seconds after its last sandbox and client at which the keeper exits. A minute spans the pauses between commands;
    a machine at rest runs nothing of ours."""

    warm_sandboxes: Count = 1
    """Sandboxes that wait ready in the keeper before anybody asks, each used once: of the shapes that were used lately, the
    last one first. One makes the next command answer in milliseconds and costs 2 MiB; 0 turns the guessing off."""


class Guest(Group, frozen=True, kw_only=True):
    """The part of Cloche that runs inside the glass, which is hostile ground."""

    answer_timeout_s: Seconds = 20
    """Seconds a guest has to answer one request (to start a command, open a file). After that the sandbox counts as
    broken, `guest_misbehaved`: whatever runs inside may have stopped it. Twenty seconds are for machines that swap."""

    prestart_contexts: bool = True
    """Whether a warm sandbox starts its interpreter ahead of need. The first `run_code` then answers at once; an
    interpreter that waits costs about 10 MiB."""


class Snapshots(Group, frozen=True, kw_only=True):
    """What is kept of sandboxes."""

    unnamed_ttl_s: Seconds | None = 7 * 86_400
    """Seconds after which `cloche gc`, and the first sandbox of an engine, remove a snapshot that has neither a name nor a tag.
    Whoever wants one for longer names it. `null` keeps all."""


class Server(Group, frozen=True, kw_only=True):
    """`cloche serve`, beyond what the keeper has."""

    host: str = "127.0.0.1"
    """The address to listen on. Loopback: who opens a server to a network should have said so."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 7777
    """The port to listen on; 0 takes a free one, and the first line of output tells which."""

    tls_cert: str | None = None
    """The file with the server's certificate chain (PEM), for HTTPS; with `tls_key`. It is read again when it changes, without a restart; a pair that cannot be
    used keeps the one before. TLS 1.2 is the oldest that is spoken."""

    tls_key: str | None = None
    """The file with the certificate's private key (PEM, without a passphrase)."""

    insecure: bool = False
    """Whether plain HTTP beyond loopback is meant. Without TLS and without this such a server does not start, because keys would travel in the open.
    It is for a container or a private network behind a proxy that ends TLS."""

    hosts: tuple[str, ...] = ()
    """Names, beside loopback's, by which clients may call this server (the `Host` header). A name that is not listed is
    refused, so that no web page reaches a local server by a name of its own. `*.example.org` stands for all names below it, `*` for every name: behind a
    proxy that checks them. The address that a connection came in on needs no listing."""

    origins: tuple[str, ...] = ()
    """Origins of web pages (`https://app.example.org`) whose requests are accepted. None by default."""

    host_paths: tuple[str, ...] = ()
    """Directories of this host beneath which callers over TCP may name workspaces and images, by absolute path. Those with `{tenant}` in them
    (`/srv/work/{tenant}`) are for callers of that tenant, the others for callers without one. None by default: then only the unix socket's owner names paths
    (`host_path_refused`)."""

    max_body_mib: Positive = 8
    """MiB of a JSON body. Larger ones are refused with `body_too_large` before they are read."""

    max_upload_mib: Positive = 512
    """MiB of a file or tree that one request uploads. It is held in memory while it is written."""

    requests_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Requests a second that one key may send; `"none"` (the default) is without limit. Beyond it: `rate_exceeded` with
    `Retry-After`."""

    burst: Positive | None = None
    """Requests that one key may send at once before `requests_per_s` holds it; `"none"` (the default) is one second's worth."""

    write_timeout_s: Seconds = 30
    """Seconds that a reader of a stream may take nothing before it is cut. Its output stays in the log, to be read again from
    where it left."""

    header_timeout_s: Seconds = 15
    """Seconds from the first byte of a request's head to its last. Slower ones get `request_too_slow`."""

    body_timeout_s: Seconds = 30
    """Seconds that a request's body may stand still. On the whole it must also not come slower than 500 bytes a second beyond
    that. Slower ones get `request_too_slow`."""

    idle_timeout_s: Seconds = 75
    """Seconds that a connection may stay open without a request. A minute and a quarter is more than most clients keep theirs."""

    max_connections: Positive = 16_384
    """Connections over HTTP at a time, at most three quarters of the descriptors that the process may have. Who comes when all are
    taken gets the place of the one that has been without a request for the longest; if all have one, `server_busy`."""

    ping_s: Seconds = 20
    """Seconds between two pings on a WebSocket, and seconds that the client has to answer one before it counts as gone."""

    domain: str = "localhost"
    """The name below which every port of every sandbox has a name of its own: `<port>-<sandbox>.<domain>`. Browsers lead all names below
    `localhost` to this machine; for another one a wildcard DNS record must. With a scheme (`https://preview.example.org`) preview links
    begin with exactly that, as they must behind a proxy that ends TLS; else this server's port is added. Take a domain that nothing
    else of yours is on: what listens in sandboxes may set cookies for it."""

    port_timeout_s: Seconds = 120
    """Seconds that what listens on a port of a sandbox may take to begin its answer to an HTTP request; then `wait_timeout`. Once it has
    begun it may take for ever, as event streams do."""

    e2b_network: Literal["open", "off"] = "open"
    """The network of a sandbox that an E2B client makes without saying anything about it. E2B's is open; `off` lets out only who
    asks. The operator's policy holds either way."""

    log: Literal["text", "json"] = "text"
    """How the server writes to standard error: `text`, what goes wrong, for people; `json`, one line of JSON for that and for every
    request, with its id, operation, status, time, key, client and trace. Neither has bodies, queries or keys in it."""

    drain_s: Seconds = 10
    """Seconds that requests under way get to finish when the server is told to stop."""


class Jwt(Group, frozen=True, kw_only=True):
    """Tokens of an identity provider (JSON Web Tokens) as keys of the server. They are accepted once `issuer`, `audience` and `jwks` are set."""

    issuer: str | None = None
    """Who must have issued a token: the claim `iss`, letter by letter."""

    audience: tuple[str, ...] = ()
    """For whom a token must be meant: one of these must be in `aud`. Without it, a token for any other service of the same
    provider would open this one."""

    jwks: str | None = None
    """Where the provider publishes its keys: an `https://` address, or a file by its absolute path (`http://` from loopback only). An address is
    fetched when it is needed, kept, and fetched again when it is old or a token names a key that is not in it; a file is read again
    when it changes."""

    algorithms: tuple[str, ...] = (
        "RS256",
        "RS384",
        "RS512",
        "PS256",
        "PS384",
        "PS512",
        "ES256",
        "ES384",
        "ES512",
        "EdDSA",
    )
    """Which signatures are accepted. All of them are asymmetric; there is no other kind here."""

    leeway_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30
    """Seconds by which the provider's clock may differ from this one."""

    refresh_s: Seconds = 600
    """Seconds after which the published keys are fetched again, beside the requests. Until that succeeds the old ones are used."""

    name_claim: str = "sub"
    """The claim that names the caller, for logs and rates. A name with dots that is no claim itself leads into objects
    (`user.email`); so do the others."""

    tenant_claim: str | None = "tenant"
    """The claim that names the caller's tenant. A token without it is refused; `"none"` is for a server without tenants, whose
    callers see all sandboxes."""

    scopes_claim: str | None = "scope"
    """The claim with the caller's scopes, as a list or as words; what is not a scope of ours is passed over."""

    scope_prefix: str = ""
    """What scopes of ours begin with in a token (`cloche:`), if they stand among others'."""

    roles_claim: str | None = None
    """The claim with the caller's roles (`realm_access.roles`, say); `"none"` (the default) takes none from tokens."""

    roles: dict[str, str] = {}  # msgspec copies it
    """Which of our roles one of theirs is (`"platform-team" = "admin"`); what is not listed is none. Without a list they are ours by name."""

    @property
    def enabled(self) -> bool:
        return self.issuer is not None


class Quota(Group, frozen=True, kw_only=True):
    """What one tenant may have, where it differs from the others; None leaves it to the group `quotas`."""

    sandboxes: Count | None = None
    cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    memory_mib: Count | None = None
    disk_mib: Count | None = None
    creations_per_minute: Count | None = None


class Quotas(Group, frozen=True, kw_only=True):
    """What each tenant may have at a time. Callers without a tenant, the local ones among them, count as one more. Beyond a quota: `quota_exceeded`, which says which."""

    sandboxes: Count | None = None
    """Live sandboxes of one tenant, suspended ones included; members of a pool are nobody's until they are claimed. `"none"` (the default) is
    without limit but `limits.max_sandboxes`, which holds for all together."""

    cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Processors that one tenant's sandboxes may have together, by their limits; `"none"` is without limit. Archived ones have none."""

    memory_mib: Count | None = None
    """MiB of memory that one tenant's sandboxes may have together, by their limits; `"none"` is without limit. Archived ones have none."""

    disk_mib: Count | None = None
    """MiB of disk that one tenant's sandboxes may have together, by their limits; `"none"` is without limit. Archived ones keep theirs."""

    creations_per_minute: Count | None = None
    """Sandboxes that one tenant may make within any minute, forks and claims included; `"none"` is without limit. Beyond it the answer has `Retry-After`."""

    tenants: dict[str, Quota] = {}  # msgspec copies it
    """Other quotas for one tenant, in a table `[quotas.tenants.NAME]`; `-` is who has no tenant. What such a table leaves out is as above."""

    def of(self, tenant: str) -> Quota:
        own = self.tenants.get(tenant or "-", Quota())
        said = {name: getattr(own, name) for name in Quota.__struct_fields__}
        return Quota(
            **{name: getattr(self, name) if value is None else value for name, value in said.items()}
        )


Reach = Literal["off", "rules", "open"]


class McpClient(Group, frozen=True, kw_only=True):
    """What the sandboxes of one MCP client are, where its calls say nothing; None leaves it to the group `mcp`."""

    profile: str | None = None
    template: str | None = None
    network: Reach | None = None
    allow: tuple[str, ...] | None = None


class Mcp(Group, frozen=True, kw_only=True):
    """The tools for coding agents: `cloche mcp`, and `/mcp` of a server."""

    profile: str | None = None
    """The profile of sandboxes whose call names none; `"none"` is `defaults.profile`."""

    network: Reach = "rules"
    """The most that a call may ask for. `rules`: hosts that it names in `allowed_domains`; then `permissive` has no open network
    either. `open` also lets it ask for everything, `off` for nothing. Named hosts, because whoever talks a model into
    something should at least be readable in the log."""

    allow: tuple[str, ...] = ()
    """Network rules that every sandbox of a call starts with, such as `"pypi.org"`; none by default."""

    output_limit_bytes: Positive = 16384
    """Bytes of each stream in a result: the first and the last half. Agents cut longer ones themselves, from the end, where the
    error stands."""

    resource_limit_mib: Positive = 4
    """MiB that a file may have to be read as a resource; larger ones are read in parts by `sandbox_file_read`."""

    session_timeout_s: Seconds = 14400
    """Seconds that a session's sandbox lives at most. Four hours span an afternoon's work with an agent."""

    session_idle_s: Seconds = 1800
    """Seconds without a call after which a session's sandbox ends."""

    clients: dict[str, McpClient] = {}  # msgspec copies it
    """Other choices for one client, by the name it gives itself (`claude-code`, `codex-mcp-client`, …): `profile`, `template`,
    `network`, `allow` in a table `[mcp.clients.NAME]`. A client is who it says it is: these are defaults, and the boundary is
    `policy.ceiling`."""

    def of(self, client: str) -> McpClient:
        own = self.clients.get(client, McpClient())
        return McpClient(
            profile=own.profile or self.profile,
            template=own.template,
            network=own.network or self.network,
            allow=self.allow if own.allow is None else own.allow,
        )


class Audit(Group, frozen=True, kw_only=True):
    """The record of who did what (`cloche audit`)."""

    enabled: bool = True
    """Whether there is one. It costs an execution some microseconds and a day of heavy use some megabytes."""

    on_failure: Literal["warn", "refuse"] = "warn"
    """What happens when the record cannot be written or signed, because the disk is full, say. `warn` goes on, says so with
    every sandbox that is made, and writes what waits when it can. `refuse` answers `audit_unavailable` to everything
    that would need a line. `warn`, because the glass holds without a record; choose `refuse` where the record is the point."""

    max_segment_mib: Positive = 16
    """MiB after which a writer begins another file. Each is signed when it is full, and after a day in any case; 16 MiB are
    about 40,000 lines, and are checked in a second."""

    keep_days: Positive | None = 90
    """Days after its last line that a file is kept; `"none"` keeps all. Removing one is itself recorded, so that a gap is
    known from a theft."""

    fsync: bool = False
    """Whether lines are forced to disk as they come. Without it a crash of Cloche loses nothing, a loss of power may lose
    the last seconds, and what was signed is on disk either way. With it every busy moment costs a disk's write."""

    redact: tuple[str, ...] = ()
    """Regular expressions; what they match in commands and messages becomes `***`, in the audit log and in `cloche events`.
    Arguments that look like a password, token or key are masked in any case."""


class Images(Group, frozen=True, kw_only=True):
    """Roots that sandboxes start from, other than this machine's own programs."""

    max_mib: Positive = 20480
    """MiB that unpacked images may take below `$CLOCHE_HOME/images`. Beyond it those go that were not used for longest
    and are not in use; one image that is larger by itself is refused with `image_too_large`. 20 GiB hold a good
    dozen of the usual ones, and no archive can fill the disk by unpacking."""

    registries_insecure: tuple[str, ...] = ()
    """Registries (`host:port`) that are spoken to without TLS, or with a certificate that nobody vouches for. None by
    default: what comes from such a place is what the network says it is."""

    auth_file: str | None = None
    """A file with credentials of registries, in the format of `docker login`; `"none"` (the default) leaves it to
    skopeo, which looks where `podman login` and `docker login` write."""


class Build(Group, frozen=True, kw_only=True):
    """The sandboxes that the steps of a recipe run in."""

    allow: tuple[str, ...] = (
        "pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "deb.debian.org", "security.debian.org",
        "archive.ubuntu.com", "security.ubuntu.com", "dl-cdn.alpinelinux.org",
    )  # fmt: skip
    """Network rules of a build, as a policy's `allow`: the package registries that `pip`, `npm` and `apt` steps need, and
    nothing else. Name your mirrors here; an empty list builds offline."""

    resources: model.Resources = model.Resources(memory_mib=2048, cpus=2.0, pids=1024, disk_mib=4096)
    """What one step may take. More than a sandbox's default, because compilers and package managers do."""

    step_timeout_s: Seconds = 1800
    """Seconds that one step may run. Half an hour is for large packages on small machines."""


class Secrets(Group, frozen=True, kw_only=True):
    """Credentials that sandboxes use and never see."""

    key_file: str | None = None
    """The file with the key that stored secrets are sealed with: 64 hexadecimal digits, mode 0600; `"none"` (the default) is
    `keys/secrets.key` in the state directory, made at the first use. Name another to keep key and secrets on two disks, or to
    have it from a machine's own store. `CLOCHE_SECRETS_KEY` in the environment wins over both."""


class Ceiling(Group, frozen=True, kw_only=True):
    """What binds every sandbox of this engine."""

    ceiling: str | None = None
    """A policy file that may only tighten, laid over everything a caller says; `"none"` (the default) is none beside
    `/etc/cloche/ceiling.toml`, which counts wherever it is. If it is named and cannot be read, no sandbox is made."""


class Network(Group, frozen=True, kw_only=True):
    """What carries the connections of sandboxes that have a network."""

    parent_proxy: str = ""
    """A proxy that everything goes through: `http://[user:password@]host:port`. Empty (the default) dials directly. Names are
    then resolved by the parent, so the addresses behind them are not checked here."""

    authorities: str | None = None
    """A file of certificates (PEM) to trust besides this machine's, when a connection is looked into and the server's
    certificate is checked; `"none"` (the default) adds none."""

    ask_timeout_s: Seconds = 60
    """Seconds that a connection waits for somebody who is asked about it; then it is refused. A minute is about what clients
    wait for a server."""

    ask_url: str | None = None
    """Where to ask instead of a person, or beside one: a question is posted there as JSON, and the answer is
    `{"answer": "once" | "sandbox" | "deny", "reason": "…"}`. `"none"` (the default) asks nobody."""


class Settings(Group, frozen=True, kw_only=True):
    """Everything that was chosen, from wherever."""

    home: str
    """Where state lives, mode 0700: `$CLOCHE_HOME`, else `cloche` in the XDG state directory (`~/.local/state`). Set
    by environment only. It must be a local file system, and short enough for a socket path (107 bytes)."""

    url: str | None = None
    """The server to use, from `CLOCHE_URL`: `http://`, `https://` or `unix:`. If it is set and does not answer, that is
    an error, never a reason to run locally."""

    api_key: str | None = None
    """From `CLOCHE_API_KEY`: a client sends it, a server accepts it. Environment only, because files get shared."""

    secrets_key: str | None = None
    """From `CLOCHE_SECRETS_KEY`: the key itself, for machines that have no disk to trust. Environment only."""

    ca_file: str | None = None
    """From `CLOCHE_CA_FILE`: the authorities (PEM) that a client believes about `https://` servers, in place of the system's. Environment only, like the
    address that it belongs to."""

    limits: Limits = Limits()
    defaults: Defaults = Defaults()
    keeper: Keeper = Keeper()
    guest: Guest = Guest()
    snapshots: Snapshots = Snapshots()
    server: Server = Server()
    jwt: Jwt = Jwt()
    quotas: Quotas = Quotas()
    mcp: Mcp = Mcp()
    audit: Audit = Audit()
    images: Images = Images()
    build: Build = Build()
    secrets: Secrets = Secrets()
    policy: Ceiling = Ceiling()
    network: Network = Network()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("api_key", "secrets_key"):
            shown[name] = "***" if shown[name] else None
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def state_path(self) -> str:
        return os.path.join(self.home, "state.db")

    @property
    def socket_path(self) -> str:
        """Where the keeper listens; `socket_path_too_long` if the kernel could not take it."""
        path = os.path.join(self.home, "cloche.sock")
        size = len(os.fsencode(path))
        if size > MAX_SOCKET_PATH:
            raise errors.error(
                "socket_path_too_long",
                f"the socket path {path!r} has {size} bytes; Linux takes {MAX_SOCKET_PATH}",
                hint="set CLOCHE_HOME to a shorter directory",
                path=path,
            )
        return path


_BY_ENVIRONMENT = ("home", "url", "api_key", "secrets_key", "ca_file")
_OFF_VALUES = ("", "0", "false", "no")


def load(environment: Mapping[str, str], *, file: str | None = None) -> Settings:
    """The settings of this user: the file's, then the environment's. Nothing is created. A `file` that is named must be there."""
    path = file or os.path.join(_base(environment, "XDG_CONFIG_HOME", ".config"), "cloche", "settings.toml")
    found = _read(path, "settings_invalid", missing_ok=file is None)
    chosen = Settings(home=_home(environment)) if found is None else _from_file(found, _home(environment))
    return msgspec.structs.replace(
        chosen,
        url=_url(environment),
        api_key=environment.get("CLOCHE_API_KEY") or None,
        secrets_key=environment.get("CLOCHE_SECRETS_KEY") or None,
        ca_file=environment.get("CLOCHE_CA_FILE") or None,
        keeper=msgspec.structs.replace(chosen.keeper, start=_keeper_start(environment, chosen.keeper.start)),
    )


# ── policy files ───────────────────────────────────────────────────────────────────────────────────

CEILING = "/etc/cloche/ceiling.toml"
PROJECT_FILE = "cloche.toml"


def load_policy(path: str | os.PathLike[str]) -> policy.Policy:
    """A policy from a TOML file, its groups as tables. A mistake says file, line and key."""
    file = _read(os.fspath(path), "policy_invalid")
    assert file is not None
    return _policy(file)


def _policy(file: _File) -> policy.Policy:
    for key in ("source", "where"):  # the constructor's own words
        if key in file.data:
            known = (*policy.Merged.__struct_fields__, "profiles", "agents")
            raise file.wrong((key,), f"there is no key {key!r}", errors.nearest(key, known), "field_unknown")
    try:
        return policy.Policy(**file.data, source=file.path, where=file.where)
    except errors.ClocheError as problem:
        at: Any = problem.details.get("at", ())
        hint = problem.hint or "see docs/reference/policy.md"
        entry = str(problem.details.get("entry") or problem.details.get("rule") or "")
        raise file.wrong(tuple(at), problem.message, hint, problem.code, entry) from None


def load_table(path: str, struct: type[T]) -> tuple[T, Callable[[int], int | None]]:
    """A TOML file of another shape that speaks of a policy, and where its n-th `[[expect]]` begins."""
    file = _read(path, "policy_invalid")
    assert file is not None
    heads = [
        n for n, line in enumerate(file.text.split("\n"), 1) if re.match(r"\s*\[\[\s*expect\s*\]\]", line)
    ]
    return _convert(file, file.data, struct), lambda number: heads[number] if number < len(heads) else None


class PolicyFiles:
    """The policy files of this machine and user, as they are now: a file is read again when it has changed.

    Fails closed: a file that is there and cannot be read or understood is an error, and so is a ceiling that the settings
    name and that is not there.
    """

    def __init__(self, config: Settings, environment: Mapping[str, str], *, ceiling: str = CEILING) -> None:
        self._home = config.home
        self._ceiling = ceiling
        self._named_ceiling = config.policy.ceiling
        self._user = os.path.join(_base(environment, "XDG_CONFIG_HOME", ".config"), "cloche", "policy.toml")
        self._read: dict[str, tuple[tuple[int, ...], policy.Policy]] = {}

    def __call__(self, workspace: str | None) -> policy.Sources:
        ceilings = [self._load(self._ceiling)]
        if self._named_ceiling is not None:
            ceilings.append(self._load(self._named_ceiling, missing_ok=False))
        project, trusted = (None, False) if workspace is None else self._project(workspace)
        return policy.Sources(
            user=self._load(self._user),
            project=project,
            trusted=trusted,
            ceilings=tuple(one for one in ceilings if one is not None),
        )

    def _load(self, path: str, *, missing_ok: bool = True) -> policy.Policy | None:
        try:
            found = os.stat(path)
        except FileNotFoundError as problem:
            if missing_ok:
                return None
            raise _unreadable(path, "policy_invalid", problem) from None
        except OSError as problem:
            raise _unreadable(path, "policy_invalid", problem) from None
        mark = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        kept = self._read.get(path)
        if kept is None or kept[0] != mark:
            kept = self._read[path] = (mark, load_policy(path))
        return kept[1]

    def _project(self, workspace: str) -> tuple[policy.Policy | None, bool]:
        path = os.path.join(os.path.realpath(workspace), PROJECT_FILE)
        # SAFETY: the repository is untrusted; a link or a pipe of this name must not make us read something else or
        # wait. tests/cli/test_policies.py::test_a_project_file_that_is_no_file_refuses_the_sandbox
        file = _read(path, "policy_invalid", missing_ok=True, plainly=True)
        if file is None:
            return None, False
        return _policy(file), _trusted(self._home).get(path) == _digest(file)


def allow_always(rule: str, environment: Mapping[str, str]) -> None:
    """Add a rule to `network.allow` of the user's own policy file, which keeps its words and comments otherwise.

    The text is changed at one place and then read again: unless exactly that rule has been added, nothing is written.
    """
    path = os.path.join(_base(environment, "XDG_CONFIG_HOME", ".config"), "cloche", "policy.toml")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        text = ""
    before = _toml(text)
    listed = before.get("network", {}).get("allow", [])
    if rule in listed:
        return
    changed = _with_rule(text, rule)
    wanted = {**before, "network": {**before.get("network", {}), "allow": [rule, *listed]}}
    if _toml(changed) != wanted:
        raise errors.error(
            "policy_invalid",
            f"the rule could not be added to {path} by itself",
            hint=f"add {rule!r} to network.allow there",
        )
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{os.getpid()}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(changed)
    os.replace(draft, path)


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise errors.error("policy_invalid", f"your policy file cannot be read: {problem}") from None


def _with_rule(text: str, rule: str) -> str:
    quoted = '"' + rule.replace("\\", "\\\\").replace('"', '\\"') + '"'
    head = re.search(r"^[ \t]*\[[ \t]*network[ \t]*\][^\n]*\n", text + "\n", re.MULTILINE)
    if head is None:
        return (text.rstrip("\n") + "\n\n" if text.strip() else "") + f"[network]\nallow = [{quoted}]\n"
    end = re.compile(r"^[ \t]*\[", re.MULTILINE).search(text, head.end())
    table = text[head.end() : end.start() if end else len(text)]
    found = re.search(r"^[ \t]*allow[ \t]*=[ \t]*\[", table, re.MULTILINE)
    if found is None:
        return text[: head.end()].rstrip("\n") + f"\nallow = [{quoted}]\n" + text[head.end() :]
    place = head.end() + found.end()
    rest = text[place:].lstrip()
    return text[:place] + quoted + ("" if rest.startswith("]") else ", ") + text[place:]


def trust(home: str, path: str) -> policy.Policy:
    """Let a project's file, as it stands now, loosen what it says; it must be a policy that can be read."""
    file = _read(_project_path(path), "policy_invalid", plainly=True)
    assert file is not None
    made = _policy(file)
    _keep_trusted(home, {**_trusted(home), file.path: _digest(file)})
    return made


def untrust(home: str, path: str) -> bool:
    """Take it back; whether there was something to take back."""
    known = _trusted(home)
    found = known.pop(_project_path(path), None)
    if found is not None:
        _keep_trusted(home, known)
    return found is not None


def _project_path(path: str) -> str:
    """The file's path with the links of its directory followed, as a workspace's are."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _digest(file: _File) -> str:
    import hashlib

    return hashlib.sha256(file.raw).hexdigest()


def _trusted(home: str) -> dict[str, str]:
    path = os.path.join(home, "trusted.json")
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as problem:
        raise errors.error(
            "state_corrupt",
            f"{path} cannot be read: {problem}",
            hint="remove it, and trust again what you trust",
            file=path,
        ) from None


def _keep_trusted(home: str, known: dict[str, str]) -> None:
    make_home(home)
    path = os.path.join(home, "trusted.json")
    with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(known))
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)


def make_home(home: str) -> None:
    """Make the state directory, or make sure that it is ours alone."""
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        found = os.stat(home)
    except OSError as problem:
        raise _wrong_home(f"the state directory {home!r} cannot be made: {problem.strerror}") from None
    # A directory of somebody else holds a database and sockets that they choose: trust would be theirs to abuse.
    if found.st_uid != os.geteuid():
        raise _wrong_home(
            f"the state directory {home!r} belongs to uid {found.st_uid}, not to {os.geteuid()}"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(home, 0o700)


# ── environment ────────────────────────────────────────────────────────────────────────────────────


def _home(environment: Mapping[str, str]) -> str:
    chosen = environment.get("CLOCHE_HOME")
    if not chosen:
        return os.path.join(_base(environment, "XDG_STATE_HOME", ".local/state"), "cloche")
    if not os.path.isabs(chosen) or "\0" in chosen or "\n" in chosen:
        raise _wrong_home(f"CLOCHE_HOME is {chosen!r}, which is not an absolute path")
    return os.path.normpath(chosen)


def _base(environment: Mapping[str, str], variable: str, below_home: str) -> str:
    """A base directory of the XDG specification, which says to ignore a relative one."""
    chosen = environment.get(variable, "")
    return chosen if os.path.isabs(chosen) else os.path.join(_user_home(environment), below_home)


def _user_home(environment: Mapping[str, str]) -> str:
    home = environment.get("HOME", "")
    if os.path.isabs(home):
        return home
    import pwd  # here, because HOME is nearly always set

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise _wrong_home(f"HOME is not set and uid {os.getuid()} has no home directory") from None


def _wrong_home(message: str) -> errors.ClocheError:
    hint = "set CLOCHE_HOME to an absolute path of a directory of your own"
    return errors.error("settings_invalid", message, hint=hint, key="CLOCHE_HOME")


def _url(environment: Mapping[str, str]) -> str | None:
    url = environment.get("CLOCHE_URL") or None
    if url is not None and not url.startswith(("http://", "https://", "unix:")):
        raise errors.error(
            "settings_invalid",
            f"CLOCHE_URL is {url!r}, which is not the address of a server",
            hint="it looks like http://localhost:7777; unset it to run locally",
            key="CLOCHE_URL",
        )
    return url


def _keeper_start(environment: Mapping[str, str], in_file: bool) -> bool:
    word = environment.get("CLOCHE_KEEPER", "")
    if word not in ("", "on", "off"):
        raise errors.error(
            "settings_invalid", f"CLOCHE_KEEPER is {word!r}", hint="it is on or off", key="CLOCHE_KEEPER"
        )
    if word:
        return word == "on"
    return in_file and environment.get("CI", "").lower() in _OFF_VALUES


# ── files ──────────────────────────────────────────────────────────────────────────────────────────


class _File(NamedTuple):
    """A TOML file, and the code under which its mistakes are reported."""

    path: str
    text: str
    data: dict[str, Any]
    code: str
    raw: bytes

    def line_of(self, key: tuple[str | int, ...], entry: str = "") -> int | None:
        """The line of a key; of an entry of its list, if that is found within the list."""
        line = _line_of(self.text, key)
        if line is None or not entry:
            return line
        lines = self.text.split("\n")[line - 1 :]
        for offset, text in enumerate(lines):
            if f'"{entry}"' in text or f"'{entry}'" in text:
                return line + offset
            if offset and re.match(r"\s*(\[[\w.\"'-]+\]\s*(#.*)?$|[\w.-]+\s*=)", text):
                break  # the next key
        return line

    def where(self, key: tuple[str, ...], entry: str) -> str:
        line = self.line_of(key, entry)
        return self.path if line is None else f"{self.path}:{line}"

    def wrong(
        self,
        key: tuple[str | int, ...],
        message: str,
        hint: str,
        code: str | None = None,
        entry: str = "",
    ) -> errors.ClocheError:
        line = self.line_of(key, entry)
        where = self.path if line is None else f"{self.path}, line {line}"
        dotted = ".".join(str(part) for part in key)
        return errors.error(
            code or self.code, f"{where}: {message}", hint=hint, file=self.path, line=line, key=dotted
        )


def _from_file(file: _File, home: str) -> Settings:
    data = _refuse_unknown(file, Settings, file.data)
    for key in _BY_ENVIRONMENT:
        if key in data:
            name = f"CLOCHE_{key.upper()}"
            raise file.wrong((key,), f"{key!r} is not set in a file", hint=f"set {name} in the environment")
    chosen = _convert(file, {**data, "home": home}, Settings)
    try:
        chosen.defaults.resources.check()
    except errors.ClocheError as problem:
        place = ("defaults", "resources", str(problem.details["field"]))
        raise file.wrong(place, problem.message, hint=problem.hint or "") from None
    _check_jwt(file, chosen.jwt)
    for index, directory in enumerate(chosen.server.host_paths):
        if not directory.startswith("/") or directory.rstrip("/") == "":
            message = f"{directory!r} is not a directory by its absolute path, or all of them"
            raise file.wrong(
                ("server", "host_paths", index), message, hint="name the one that holds workspaces"
            )
    for index, pattern in enumerate(chosen.audit.redact):
        try:
            re.compile(pattern)
        except re.error as problem:
            message = f"{pattern!r} is not a regular expression: {problem}"
            raise file.wrong(("audit", "redact", index), message, hint="see Python's `re`") from None
    return chosen


def _check_jwt(file: _File, jwt: Jwt) -> None:
    """All that tells a genuine token, or nothing: a check that is left out would let everybody's in."""
    needed = {"issuer": jwt.issuer, "audience": jwt.audience, "jwks": jwt.jwks}
    if "jwt" in file.data and not all(needed.values()):
        missing = next(name for name, value in needed.items() if not value)
        raise file.wrong(
            ("jwt",), f"jwt.{missing} is missing", hint="issuer, audience and jwks belong together"
        )
    for index, algorithm in enumerate(jwt.algorithms):
        if algorithm not in Jwt().algorithms:
            message = f"{algorithm!r} is not a signature that is accepted"
            raise file.wrong(
                ("jwt", "algorithms", index), message, hint=errors.nearest(algorithm, Jwt().algorithms)
            )


def _read(path: str, code: str, *, missing_ok: bool = False, plainly: bool = False) -> _File | None:
    """A file; `plainly` takes a regular one only, at this very name."""
    try:
        with open(path, "rb", opener=_open_plainly if plainly else None) as file:
            raw = file.read(MAX_FILE + 1)
    except FileNotFoundError as problem:
        if missing_ok:
            return None
        raise _unreadable(path, code, problem) from None
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        raise _unreadable(path, code, problem) from None
    if len(raw) > MAX_FILE:
        raise errors.error(code, f"{path} has more than 64 KiB", hint="is it the right file?", file=path)
    return _parse(path, raw, code)


def _open_plainly(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def _unreadable(path: str, code: str, problem: Exception) -> errors.ClocheError:
    cause = getattr(problem, "strerror", None) or str(problem)
    return errors.error(
        code, f"{path!r} cannot be read: {cause}", hint="check path and permissions", file=path
    )


def _parse(path: str, raw: bytes, code: str) -> _File:
    import tomllib

    try:
        text = raw.decode().replace("\r\n", "\n")
        return _File(path, text, tomllib.loads(text), code, raw)
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        cause = "it is not UTF-8"
    except tomllib.TOMLDecodeError as problem:
        found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(problem))
        line = int(found[1]) if found and found[1] else raw.count(b"\n") + 1
        cause = str(problem)[: found.start()] if found else str(problem)
    except RecursionError:
        line, cause = 1, "it is nested too deeply"
    raise errors.error(
        code,
        f"{path}, line {line}: this is not TOML: {cause}",
        hint="see https://toml.io",
        file=path,
        line=line,
    )


def _refuse_unknown(
    file: _File,
    struct: type[msgspec.Struct],
    data: dict[str, Any],
    *,
    at: tuple[str, ...] = (),
    unknown_code: str | None = None,
) -> dict[str, Any]:
    """`data` with "none" read as None where a field may be that; a key that is no field is refused by name."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key not in struct.__struct_fields__:
            known = [name for name in struct.__struct_fields__ if at or name not in _BY_ENVIRONMENT]
            raise file.wrong(
                (*at, key),
                f"there is no key {'.'.join((*at, key))!r}",
                errors.nearest(key, known),
                unknown_code,
            )
        inner = _struct_of(struct, key)
        if inner is not None and isinstance(value, dict):
            kept[key] = _refuse_unknown(file, inner, value, at=(*at, key), unknown_code=unknown_code)
        else:
            kept[key] = None if value == "none" and "None" in struct.__annotations__[key] else value
    return kept


def _struct_of(struct: type[msgspec.Struct], field: str) -> type[msgspec.Struct] | None:
    """The struct that a field holds, told by its default: every group has one."""
    index = (
        struct.__struct_fields__.index(field)
        - len(struct.__struct_fields__)
        + len(struct.__struct_defaults__)
    )
    default = struct.__struct_defaults__[index] if index >= 0 else None
    return type(default) if isinstance(default, msgspec.Struct) else None


def _convert(file: _File, data: dict[str, Any], struct: type[T]) -> T:
    try:
        return msgspec.convert(data, struct)
    except msgspec.ValidationError as problem:
        cause, _, place = str(problem).partition(" - at `$")
        key = tuple(int(index) if index else name for name, index in _PART.findall(place))
        dotted = ".".join(str(part) for part in key)
        message = f"{dotted!r} is wrong: {cause[:1].lower()}{cause[1:]}"
        raise file.wrong(key, message, hint=f"see docs/reference/{_PAGE[file.code]}") from None


_PART = re.compile(r"\.([A-Za-z0-9_-]+)|\[(\d+)\]")
_PAGE = {"settings_invalid": "settings.md", "policy_invalid": "policy.md"}


def _line_of(text: str, key: tuple[str | int, ...]) -> int | None:
    """The line where `key` is given, counted from 1; None if it is not to be found with bounded effort."""
    lines = text.split("\n")
    if not key or not _prefix_has(lines, key):
        return None
    without, having = 0, len(lines)  # lengths of whole prefixes; the key begins between them
    effort = 0
    while effort < _MAX_EFFORT:
        # Halve the gap. A prefix that ends within a value is not whole: try its neighbours, downwards and then up.
        middle = (without + having) // 2
        for count in (*range(middle, without, -1), *range(middle + 1, having)):
            effort += sum(map(len, lines[:count]))
            found = _prefix_has(lines[:count], key)
            if found is not None or effort > _MAX_EFFORT:
                break
        else:
            return without + 1
        if found is not None:
            without, having = (without, count) if found else (count, having)
    return None


def _prefix_has(lines: list[str], key: tuple[str | int, ...]) -> bool | None:
    """Whether these lines have the key; None if they are not whole."""
    import tomllib

    try:
        return _has(tomllib.loads("\n".join(lines) + "\n"), key)
    except tomllib.TOMLDecodeError:
        return None


def _has(data: Any, key: tuple[str | int, ...]) -> bool:
    for part in key:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True
