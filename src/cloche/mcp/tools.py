"""The tools: a table, and what each does with a backend.

`Calls` is one client's view: a backend, what its sandboxes are like by default (settings, by the client's name), and which ids it
may touch. Sandboxes made here carry the label `mcp`; any other is `sandbox_not_found`, in the words for one that never was.
A client is who it says it is, so the choice by name is a default and no boundary; the policy's ceiling is one, and so is
`mcp.network`.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from cloche import errors, interfaces, model, settings
from cloche.mcp import nouns

LABEL = "mcp"
_MOST_FILES = 1000
_SPARE_S = 60  # a sandbox for one command outlives the command's own limit

Say = Callable[[str], Awaitable[None]]
"""Tells the client what the command has just written."""


class Tool(NamedTuple):
    method: str
    title: str
    summary: str
    takes: type[nouns.Arguments]
    gives: type[nouns.Outcome]
    reads_only: bool = False
    destroys: bool = False
    idempotent: bool = False
    open_world: bool = False


TABLE: dict[str, Tool] = {
    "sandbox_run": Tool(
        "run",
        "Run a command in a sandbox of its own",
        "Run one command in a fresh sandbox that is thrown away afterwards. Files written there are gone; for work in several "
        "steps use sandbox_session_create and sandbox_exec. The command's failure is a result: look at exit_code and denials.",
        nouns.Run,
        nouns.Ran,
        open_world=True,
    ),
    "sandbox_session_create": Tool(
        "create",
        "Make a sandbox that stays",
        "Make a sandbox that stays between calls, with its files and running processes. Its id is what the other tools take.",
        nouns.CreateSession,
        nouns.Session,
    ),
    "sandbox_exec": Tool(
        "exec",
        "Run a command in a session",
        "Run one command in a sandbox that sandbox_session_create made. The command's failure is a result.",
        nouns.Exec,
        nouns.Ran,
        destroys=True,
        open_world=True,
    ),
    "sandbox_run_code": Tool(
        "run_code",
        "Run code",
        "Run code in an interpreter that keeps its variables between calls in the same sandbox. Gives the value of the last "
        "expression, what was printed, pictures that were drawn, and the error if there was one.",
        nouns.RunCode,
        nouns.CodeRan,
        destroys=True,
        open_world=True,
    ),
    "sandbox_file_write": Tool(
        "write_file",
        "Write a file",
        "Write a file in a sandbox; missing directories are made, a file that is there is replaced.",
        nouns.WriteFile,
        nouns.Written,
        destroys=True,
        idempotent=True,
    ),
    "sandbox_file_read": Tool(
        "read_file",
        "Read a file",
        "Read a file of a sandbox, or a part of it. What is not UTF-8 comes as base64.",
        nouns.ReadFile,
        nouns.FileText,
        reads_only=True,
    ),
    "sandbox_file_list": Tool(
        "list_files",
        "List files",
        "The entries of a directory in a sandbox, and with `depth` of those below it.",
        nouns.ListFiles,
        nouns.Files,
        reads_only=True,
    ),
    "sandbox_list": Tool(
        "sessions", "List sandboxes", "The live sandboxes that were made by these tools.", nouns.Nothing, nouns.Sessions, reads_only=True
    ),
    "sandbox_delete": Tool(
        "delete",
        "End a sandbox",
        "End a sandbox: its processes are killed, its files are gone.",
        nouns.Name,
        nouns.Deleted,
        destroys=True,
    ),
    "sandbox_snapshot": Tool(
        "snapshot", "Keep a sandbox's files", "Keep the files of a sandbox as they are now.", nouns.TakeSnapshot, nouns.Snapshot
    ),
    "sandbox_restore": Tool(
        "restore",
        "Go back to a snapshot",
        "Set a sandbox back to a snapshot: its processes end, its files are those of then.",
        nouns.Restore,
        nouns.Session,
        destroys=True,
        idempotent=True,
    ),
    "sandbox_fork": Tool(
        "fork",
        "Copy a sandbox",
        "Make sandboxes that begin with the files of another, to try several things at once.",
        nouns.Fork,
        nouns.Sessions,
    ),
}  # fmt: skip


class Calls:
    def __init__(
        self, backend: interfaces.Backend, config: settings.Settings, client: str, base: model.SandboxSpec
    ) -> None:
        """`base` is what every sandbox of this client is beyond the settings: a workspace, say."""
        self._backend = backend
        self._config = config
        self._client = client
        self._base = base
        self._known: set[str] = set()

    def usual(self) -> model.SandboxSpec:
        """What a call that says nothing gets; an engine may have one ready."""
        return self._spec(None, None, timeout_s=_SPARE_S)

    async def call(
        self, tool: str, given: dict[str, Any] | None, say: Say
    ) -> tuple[nouns.Outcome, list[dict[str, str]]]:
        """The result, and pictures: each with `mime` and `data`."""
        row = TABLE[tool]
        wanted = nouns.arguments(row.takes, given)
        pictures: list[dict[str, str]] = []
        if row.method in ("run", "exec"):
            return await getattr(self, row.method)(wanted, say), pictures
        if row.method == "run_code":
            return await self.run_code(wanted, pictures), pictures
        return await getattr(self, row.method)(wanted), pictures

    # ── commands ────────────────────────────────────────────────────────────────────────────────

    async def run(self, wanted: nouns.Run, say: Say) -> nouns.Ran:
        self._check(wanted)
        spec = self._spec(wanted.profile, wanted.network, timeout_s=wanted.timeout_ms / 1000 + _SPARE_S)
        async with self._for_once(spec) as sandbox:
            return await self._run_in(sandbox, wanted, say)

    async def exec(self, wanted: nouns.Exec, say: Say) -> nouns.Ran:
        self._check(wanted)
        return await self._run_in(await self._mine(wanted.sandbox), wanted, say)

    async def _run_in(self, sandbox: str, wanted: nouns.Run | nouns.Exec, say: Say) -> nouns.Ran:
        request = self._request(wanted)
        if not wanted.streaming:
            return nouns.ran(await self._backend.exec(sandbox, request))
        started = await self._backend.start(sandbox, request)
        try:
            return nouns.ran(await self._follow(sandbox, started.id, say))
        except BaseException:
            # Cancelled, or the client cannot be told: nobody waits for it any more.
            await _surely(self._backend.signal(sandbox, started.id, 9, tree=True))
            raise

    async def _follow(self, sandbox: str, execution: str, say: Say) -> model.ExecResult:
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        async for event in self._backend.attach(sandbox, execution):
            if isinstance(event, model.Exited):
                return event.result
            if isinstance(event, model.Output) and (text := decoders[event.stream].decode(event.data)):
                await say(text)
        return await self._backend.wait(sandbox, execution)

    def _request(self, wanted: nouns.Run | nouns.Exec) -> model.ExecRequest:
        return model.ExecRequest(
            command=wanted.command,
            cwd=wanted.cwd,
            env=wanted.env,
            timeout_s=wanted.timeout_ms / 1000,
            output_limit=self._config.mcp.output_limit_bytes,
        )

    def _check(self, wanted: nouns.Run | nouns.Exec) -> None:
        """Before anything is made."""
        self._request(wanted).check()

    async def run_code(self, wanted: nouns.RunCode, pictures: list[dict[str, str]]) -> nouns.CodeRan:
        if wanted.sandbox is not None:
            return self._code_ran(await self._run_code(await self._mine(wanted.sandbox), wanted), pictures)
        spec = self._spec(None, None, timeout_s=wanted.timeout_ms / 1000 + _SPARE_S)
        async with self._for_once(spec) as sandbox:
            return self._code_ran(await self._run_code(sandbox, wanted), pictures)

    async def _run_code(self, sandbox: str, wanted: nouns.RunCode) -> model.CodeResult:
        return await self._backend.run_code(
            sandbox, wanted.code, language=wanted.language, env=wanted.env, timeout_s=wanted.timeout_ms / 1000
        )

    def _code_ran(self, result: model.CodeResult, pictures: list[dict[str, str]]) -> nouns.CodeRan:
        limit = self._config.mcp.output_limit_bytes
        cut = False

        def short(text: str) -> str:
            nonlocal cut
            kept, missing = nouns.clip(text, limit)
            cut = cut or missing
            return kept

        shown: list[dict[str, Any]] = []
        for display in result.results:
            kept: dict[str, Any] = {}
            for mime, value in display.items():
                if mime in ("image/png", "image/jpeg") and isinstance(value, str):
                    pictures.append({"mime": mime, "data": value})
                else:
                    kept[mime] = short(value) if isinstance(value, str) else value
            shown.append(kept)
        problem = result.error
        if problem is not None:
            problem = model.CodeError(
                name=problem.name, value=short(problem.value), traceback=short(problem.traceback)
            )
        text = None if result.text is None else short(result.text)
        return nouns.CodeRan(
            text=text,
            results=shown,
            stdout=short(result.stdout),
            stderr=short(result.stderr),
            error=problem,
            truncated=cut,
        )

    # ── sandboxes ───────────────────────────────────────────────────────────────────────────────

    async def create(self, wanted: nouns.CreateSession) -> nouns.Session:
        chosen = self._config.mcp
        spec = msgspec.structs.replace(
            self._spec(
                wanted.profile, wanted.network, timeout_s=wanted.timeout_s or chosen.session_timeout_s
            ),
            name=wanted.name,
            env=wanted.env,
            idle_timeout_s=chosen.session_idle_s,
        )
        info = await self._backend.create(spec)
        self._known.add(info.id)
        return nouns.session(info)

    async def sessions(self, wanted: nouns.Nothing) -> nouns.Sessions:
        return nouns.Sessions(sandboxes=[nouns.session(info) for info in await self.live()])

    async def live(self) -> list[model.SandboxInfo]:
        return [info for info in await self._backend.list() if LABEL in info.labels]

    async def delete(self, wanted: nouns.Name) -> nouns.Deleted:
        sandbox = await self._mine(wanted.sandbox)
        await self._backend.delete(sandbox)
        self._known.discard(wanted.sandbox)
        return nouns.Deleted(deleted=wanted.sandbox)

    async def snapshot(self, wanted: nouns.TakeSnapshot) -> nouns.Snapshot:
        return nouns.snapshot(await self._backend.snapshot(await self._mine(wanted.sandbox), wanted.name))

    async def restore(self, wanted: nouns.Restore) -> nouns.Session:
        sandbox = await self._mine(wanted.sandbox)
        found = await self._backend.snapshot_info(wanted.snapshot)
        if LABEL not in found.spec.labels:
            raise errors.error("snapshot_not_found", f"there is no snapshot {wanted.snapshot!r}")
        return nouns.session(await self._backend.restore(sandbox, found.id))

    async def fork(self, wanted: nouns.Fork) -> nouns.Sessions:
        made = await self._backend.fork(await self._mine(wanted.sandbox), wanted.count)
        return nouns.Sessions(sandboxes=[nouns.session(info) for info in made])

    async def _mine(self, sandbox: str) -> str:
        """The sandbox, if it is one that was made through MCP."""
        if sandbox not in self._known:
            info = await self._backend.info(sandbox)
            if LABEL not in info.labels:
                raise errors.error(
                    "sandbox_not_found",
                    f"there is no sandbox {sandbox!r}",
                    hint="sandbox_list shows those that are there; sandbox_session_create makes one",
                )
            self._known.add(sandbox)
        return sandbox

    @asynccontextmanager
    async def _for_once(self, spec: model.SandboxSpec) -> AsyncIterator[str]:
        """A sandbox that is gone when this is left, however it is left."""
        making = asyncio.ensure_future(self._backend.create(spec))
        try:
            info = await asyncio.shield(making)
        except asyncio.CancelledError:
            with suppress(errors.ClocheError):
                await _surely(self._delete_made(making))
            raise
        try:
            yield info.id
        finally:
            await _surely(self._backend.delete(info.id))

    async def _delete_made(self, making: asyncio.Future[model.SandboxInfo]) -> None:
        await self._backend.delete((await making).id)

    def _spec(
        self, profile: str | None, network: nouns.Network | None, *, timeout_s: float
    ) -> model.SandboxSpec:
        chosen, defaults = self._config.mcp.of(self._client), self._config.defaults
        name = profile or chosen.profile or defaults.profile
        return msgspec.structs.replace(
            self._base,
            profile=name,
            template=chosen.template or defaults.template,
            resources=defaults.resources,
            minimum_isolation=defaults.minimum_isolation,
            timeout_s=timeout_s,
            labels={LABEL: self._client[:200] or "unnamed"},
            policy=reach(name, network, most=chosen.network or "rules", given=chosen.allow or ()),
        )

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    async def write_file(self, wanted: nouns.WriteFile) -> nouns.Written:
        sandbox = await self._mine(wanted.sandbox)
        mode = 0o755 if wanted.executable else None
        info = await self._backend.write_file(sandbox, wanted.path, _bytes(wanted), mode=mode)
        return nouns.Written(path=info.path, size=info.size)

    async def read_file(self, wanted: nouns.ReadFile) -> nouns.FileText:
        sandbox = await self._mine(wanted.sandbox)
        most = wanted.length or self._config.mcp.output_limit_bytes
        info, data = await self.read(sandbox, wanted.path, wanted.offset, most)
        truncated = wanted.offset + len(data) < info.size
        content, encoding = _text(data, cut=truncated)
        if encoding == "utf-8":
            truncated = wanted.offset + len(content.encode()) < info.size
        return nouns.FileText(
            path=info.path, content=content, encoding=encoding, size=info.size, truncated=truncated
        )

    async def read(self, sandbox: str, path: str, offset: int, most: int) -> tuple[model.FileInfo, bytes]:
        """A part of a file, without more of it in memory."""
        info = await self._backend.stat_file(sandbox, path)
        data, position = bytearray(), 0
        stream = self._backend.read_file_stream(sandbox, path)
        async for chunk in stream:
            data += chunk[max(0, offset - position) :]
            position += len(chunk)
            if len(data) >= most:
                break
        return info, bytes(data[:most])

    async def list_files(self, wanted: nouns.ListFiles) -> nouns.Files:
        sandbox = await self._mine(wanted.sandbox)
        found = await self._backend.list_files(sandbox, wanted.path, depth=wanted.depth)
        return nouns.Files(files=found[:_MOST_FILES], truncated=len(found) > _MOST_FILES)

    # ── resources ───────────────────────────────────────────────────────────────────────────────

    async def resources(self, sandbox: str) -> list[model.FileInfo]:
        """The files of its working directory."""
        where = self._base.workspace or "/workspace"
        listed = await self.list_files(nouns.ListFiles(sandbox=sandbox, path=where, depth=3))
        return [file for file in listed.files if file.type == "file"]

    async def resource(self, sandbox: str, path: str) -> tuple[str, str]:
        """A whole file: its content, and how that is written."""
        most = self._config.mcp.resource_limit_mib << 20
        info, data = await self.read(await self._mine(sandbox), path, 0, most + 1)
        if len(data) > most:
            raise errors.error(
                "file_too_large",
                f"{path} is {info.size} bytes; a resource may have {most}",
                hint="read it in parts by sandbox_file_read",
            )
        return _text(data)


# ── pure ───────────────────────────────────────────────────────────────────────────────────────────


def reach(profile: str, asked: nouns.Network | None, *, most: str, given: tuple[str, ...]) -> dict[str, Any]:
    """The network of a sandbox: what the call asks for, within what the settings let calls ask for."""
    if asked is None or (asked.enabled is None and asked.allowed_domains is None):
        if given:
            return {"network": {"mode": "rules", "allow": list(given)}}
        # The profile `permissive` has an open network, which is more than a call may have by default.
        return {"network": {"mode": "off"}} if profile == "permissive" and most != "open" else {}
    domains = asked.allowed_domains
    if asked.enabled is False:
        if domains:
            raise errors.error(
                "argument_invalid",
                "network.enabled is false, and network.allowed_domains names hosts",
                hint="leave one out",
            )
        return {"network": {"mode": "off"}}
    if most == "off":
        raise errors.error(
            "network_refused",
            "the settings let no call have a network",
            hint="its owner may change mcp.network",
            rule="mcp.network",
        )
    if domains is None:
        if most == "open":
            return {"network": {"mode": "open"}}
        raise errors.error(
            "network_refused",
            "network.enabled without network.allowed_domains would open everything",
            hint='name the hosts: "allowed_domains": ["pypi.org", "files.pythonhosted.org"]',
            rule="mcp.network",
        )
    for domain in domains:
        if "/" in domain or not domain.strip("*. "):
            raise errors.error(
                "argument_invalid",
                f"{domain[:100]!r} is not a host",
                hint='use names such as "pypi.org" or "*.github.com"',
            )
    return {"network": {"mode": "rules", "allow": [*given, *domains]}}


def _bytes(wanted: nouns.WriteFile) -> bytes:
    if wanted.encoding == "utf-8":
        return wanted.content.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(wanted.content, validate=True)
    except ValueError:
        raise errors.error("argument_invalid", "`content`: it is not base64") from None


def _text(data: bytes, *, cut: bool = False) -> tuple[str, nouns.EncodingName]:
    """Bytes as text, else as base64. Where they were cut, up to three of a character's may be missing at the end."""
    for end in range(len(data), max(-1, len(data) - (4 if cut else 1)), -1):
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text, "utf-8"
        break
    return base64.b64encode(data).decode(), "base64"


async def _surely(step: Awaitable[Any]) -> None:
    """Do it although this task is being cancelled; that it was not needed any more is no failure."""
    from anyio import CancelScope

    with CancelScope(shield=True), suppress(errors.ClocheError):
        await step
