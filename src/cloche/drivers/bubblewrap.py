"""The driver `bubblewrap`: the same glass as `namespaces`, set up by the system's `bwrap`.

For hosts whose security module lets only /usr/bin/bwrap make namespaces. Bubblewrap builds the root and drops the
rights; inside it a fresh interpreter, shown read-only beneath /run/cloche, becomes the agent as PID 1, applies Landlock
and loads the filter. Nothing is forked from a warm process, so a sandbox costs an interpreter's start.

What differs from `namespaces`, and is said in `isolation`:

- one uid: 1000 inside is the caller outside, or nobody's uid where the caller is root, because devices and /proc obey
  their owner whatever the mount says. So no `user="root"` and no uid range;
- the root is read-only whatever the policy says: bubblewrap has writable overlays only since 0.11 and without a limit of
  size. /workspace, /home/user, /tmp and /var/tmp are private and writable, each a tmpfs of the size asked for;
- no time namespace.

    engine ── spawn ──► sh (joins the cgroup) = exec ► bwrap, the monitor ── clone ──► PID 1: python, the agent

Killing PID 1 ends the namespace, and the monitor exits after it; a dead monitor or engine kills PID 1 (--die-with-parent).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from typing import NamedTuple

from cloche import errors, model, policy
from cloche.drivers import beginning, confining, holding, narrow, spawned
from cloche.guest import wire
from cloche.images import host
from cloche.linux import landlock, mounts, seccomp

_MIB = 1 << 20
_OURS = "/run/cloche"
_ENTRY = "cloche.drivers.confining:main"
_STEP_DOWN = "cloche.drivers.confining:step_down"
_WANTED = (0, 8)
_NOBODY = 0x6FFF_0000  # the first of 65,536 uids below those of the driver `namespaces`: nobody's
_JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'
_INSTALL = "install bubblewrap 0.8 or newer (apt install bubblewrap, dnf install bubblewrap)"


class Interpreter(NamedTuple):
    """The running Python, as it is shown inside: what to bind, and what to execute."""

    prefix: str | None
    """Bound at /run/cloche/python; None where the image shows it anyway."""
    executable: str


class BubblewrapDriver(spawned.SpawnedDriver):
    name = "bubblewrap"
    level: model.Level = "namespaces"
    agents = 2

    def __init__(self, home: str, *, program: str | None = None, landlock_abi: int | None = None) -> None:
        super().__init__(home, landlock_abi=landlock_abi)
        self._program = program
        self._is_root = os.geteuid() == 0
        self._missing: list[str] = []

    async def prepare(self) -> None:
        self._bwrap = self._program or shutil.which("bwrap") or "/usr/bin/bwrap"
        if not os.access(self._bwrap, os.X_OK):
            raise errors.error(
                "kernel_feature_missing", f"bubblewrap is not installed ({self._bwrap})", hint=_INSTALL
            )
        self._image = host.prepare(os.path.join(self.home, "images"))
        self._python = interpreter(self._image.layers)
        self._nested_closed = parse_version((await spawned.run([self._bwrap, "--version"]))[1]) >= _WANTED
        self._missing = self._sentences()
        probe = self._command(8, 8, [self._python.executable, "-I", "-S", "-c", "pass"])
        status, said = await spawned.run([*self._as_nobody(), *probe])
        if status != 0:
            raise errors.error(
                "kernel_feature_missing",
                f"bubblewrap cannot make a sandbox here: {said[:500] or f'it ended with {status}'}",
                hint="run `cloche doctor` for the cause and the fix",
            )

    def _sentences(self) -> list[str]:
        found = [
            "the root is read-only: bubblewrap gives no writable overlay of limited size",
            "disk space is memory (tmpfs), and each private directory has the whole of it",
        ]
        if not self._nested_closed:
            found.append(
                "bubblewrap is older than 0.8: nested user namespaces are closed by the system call filter only"
            )
        if not self.abi:
            found.append("Landlock is not enabled in this kernel")
        return found

    def held_features(self) -> set[str]:
        return {"seccomp", "user_namespace"} | ({"landlock"} if self.abi else set())

    def make(self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged) -> BubblewrapMachine:
        isolation = model.Isolation(
            level=self.level, driver=self.name, user_namespace=True, seccomp=True, landlock_abi=self.abi,
            uid_range=False, root="read-only", network="off", missing=tuple(self._missing),
        )  # fmt: skip
        here, there = wire.pair()
        made = BubblewrapMachine(self, sandbox_id, here, beginning.make_group(self.groups), isolation)
        resources = spec.resources
        disk = model.Limit(
            value=resources.disk_mib, enforcement="enforced", by="tmpfs per directory, counted as memory"
        )
        try:
            held = made.hold(resources, disk, agents=self.agents)
            entry = [self._python.executable, *spawned.program(_ENTRY, f"{_OURS}/lib")]
            shm_mib = max(1, min(resources.memory_mib // 2, 1024))
            command = self._command(resources.disk_mib, shm_mib, entry)
            self._launch(made, [*self._as_nobody(), *command], there.fileno())
            made.tell(self._message(spec, rules, held))
        except BaseException:
            made.kill_now()
            if made.host_pid < 0:
                made.died("it could not be started")
            raise
        finally:
            there.close()
        return made

    def _launch(self, made: BubblewrapMachine, command: list[str], link: int) -> None:
        # The cgroup first, so that whatever bubblewrap starts is in it from its first moment.
        joined = ["/bin/sh", "-c", _JOIN, "sh", *made.group_paths, "--", *command]
        made.launch(joined, [link])

    def _as_nobody(self) -> list[str]:
        """Root gives itself up first, to a uid that owns nothing (drivers/confining.py:step_down)."""
        if not self._is_root:
            return []
        uid = str(_NOBODY + secrets.randbelow(65_536))
        places = [
            word for number, source in enumerate(self._shown()) for word in (source, self._place(number))
        ]
        return [sys.executable, *spawned.program(_STEP_DOWN, spawned.PACKAGE_ROOT), uid, *places, "--"]

    def _message(
        self, spec: model.SandboxSpec, rules: policy.Merged, held: holding.Held
    ) -> dict[str, object]:
        program = seccomp.build(rules.syscalls.profile, deny=rules.syscalls.deny, notify=True)
        return {
            "rlimits": held.rlimits, "affinity": held.affinity,
            "landlock": _landlock_rules() if self.abi else [], "landlock_abi": self.abi,
            "filter": narrow.before(program, narrow.PINNED if held.affinity else ()).hex(), "terminals": "/dev/pts",
            "agent": {
                "env": {**self._image.environment, **spec.env}, "cwd": "/workspace", "uid": host.USER_ID,
                "can_switch": False,
            },
        }  # fmt: skip

    # ── the command line ────────────────────────────────────────────────────────────────────────

    def _command(self, disk_mib: int, shm_mib: int, entry: list[str]) -> list[str]:
        """Everything bubblewrap is asked for. Later options act on what earlier ones made."""
        user = str(host.USER_ID)
        return [
            # SAFETY: the user namespace by its own option: --unshare-all alone goes on without one where it is refused.
            # tests/drivers/test_bubblewrap.py::test_the_claims_hold_inside
            self._bwrap, "--unshare-all", "--unshare-user", *(["--disable-userns"] if self._nested_closed else []),
            "--uid", user, "--gid", user, "--hostname", "cloche", "--die-with-parent", "--as-pid-1",
            "--cap-drop", "ALL", "--clearenv", *self._root(), *_private(disk_mib), *_devices(shm_mib), *_proc(),
            *self._ours(), "--chdir", "/", "--", *entry,
        ]  # fmt: skip

    def _shown(self) -> list[str]:
        """Directories of ours, which only the caller may be able to reach."""
        shown = [self._image.skeleton, os.path.join(spawned.PACKAGE_ROOT, "cloche"), self._python.prefix]
        return [path for path in shown if path is not None]

    def _place(self, number: int) -> str:
        """Where bubblewrap finds one of them."""
        return f"{confining.STAGE}/{number}" if self._is_root else self._shown()[number]

    def _root(self) -> list[str]:
        layers = sorted(self._image.layers, key=lambda path: path.count("/"))
        shown = [("--ro-bind", self._place(0), "/"), *(("--ro-bind", path, path) for path in layers)]
        return [word for words in shown for word in words]

    def _ours(self) -> list[str]:
        """The interpreter and our package, read-only where nobody looks for anything."""
        shown = ["--ro-bind", self._place(1), f"{_OURS}/lib/cloche"]
        if self._python.prefix is not None:
            shown += ["--ro-bind", self._place(2), f"{_OURS}/python"]
            # A shared libpython was built for its old place.
            shown += ["--setenv", "LD_LIBRARY_PATH", f"{_OURS}/python/lib"]
        return [*_tmpfs("/run", _MIB, "0755"), *shown, "--remount-ro", "/run"]


def _tmpfs(path: str, size: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size), "--tmpfs", path]


def _private(disk_mib: int) -> list[str]:
    modes = {"/tmp": "1777", "/var/tmp": "1777"}
    return [
        word for path in mounts.PRIVATE for word in _tmpfs(path, disk_mib * _MIB, modes.get(path, "0755"))
    ]


def _devices(shm_mib: int) -> list[str]:
    return ["--dev", "/dev", *_tmpfs("/dev/shm", shm_mib * _MIB, "1777"), "--remount-ro", "/dev"]


def _proc() -> list[str]:
    words = ["--proc", "/proc"]
    for name in mounts.READ_ONLY:
        # SAFETY: bubblewrap leaves /proc/sys as it is where it looks unwritable.
        # tests/drivers/test_bubblewrap.py::test_what_the_host_owns_cannot_be_changed
        if os.path.isdir(f"/proc/{name}"):
            words += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for name in mounts.MASKED:
        path = f"/proc/{name}"
        if os.path.isdir(path):
            words += [*_tmpfs(path, 4096, "0000"), "--remount-ro", path]
        elif os.path.exists(path):
            words += ["--ro-bind", "/dev/null", path]
    return words


def _landlock_rules() -> list[tuple[str, int]]:
    writable = [(path, landlock.ALL) for path in (*mounts.PRIVATE, "/dev")]
    return [("/", landlock.READ_ONLY), *writable]


def interpreter(layers: tuple[str, ...]) -> Interpreter:
    """The base of the running Python (a virtual environment's is what it was made from)."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    if any(executable.startswith(layer + "/") for layer in layers):
        return Interpreter(None, executable)
    if not executable.startswith(prefix + "/"):
        raise errors.error(
            "kernel_feature_missing",
            f"this Python ({executable}) lies outside its own prefix ({prefix}) and cannot be shown in a sandbox",
            hint="run Cloche with another Python, e.g. the system's",
        )
    return Interpreter(prefix, f"{_OURS}/python{executable[len(prefix) :]}")


def parse_version(said: str) -> tuple[int, ...]:
    """`bubblewrap 0.8.0` → (0, 8, 0); what cannot be read counts as old."""
    words = said.split()
    parts = words[-1].split(".") if words else []
    return tuple(int(part) for part in parts) if parts and all(part.isdigit() for part in parts) else ()


class BubblewrapMachine(spawned.SpawnedMachine):
    @property
    def group_paths(self) -> list[str]:
        return self._group.paths if self._group is not None else []

    def read_only_rule(self, path: str) -> str | None:
        private = any(path == own or path.startswith(own + "/") for own in (*mounts.PRIVATE, "/dev/shm"))
        return None if private else "proc" if path.startswith("/proc/") else "root.read-only"

    def kill_now(self) -> None:
        """PID 1's death is the death of its pid namespace; the monitor follows. Before PID 1 is known, the other way."""
        spawned.signal_quietly(self._agent if self._agent >= 0 else self._pidfd, signal.SIGKILL)
        self.thaw()
