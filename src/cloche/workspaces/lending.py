"""`interfaces.Workspaces` on this host: sessions, each in a state directory of its own that its engine holds locked.

The lock is the kernel's, so it ends with the process that holds it; whoever finds a state directory unlocked finishes
what its dead owner began.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence

from cloche import interfaces, model, policy
from cloche.workspaces import description, overlays, plan, session

_LOCK = "owner"


class LocalWorkspaces(interfaces.Workspaces):
    def __init__(self, home: str, environment: Mapping[str, str]) -> None:
        self._states = os.path.join(home, "workspaces")
        self._environment = dict(environment)

    def open(
        self, directory: str, *, rules: policy.Merged, sandbox_id: str, overlay: bool, path: str | None = None
    ) -> LentWorkspace:
        state = os.path.join(self._states, sandbox_id)
        os.makedirs(state, mode=0o700)
        lock = _lock(state)
        environment = {**self._environment, **({"PATH": path} if path is not None else {})}
        home = environment.get("HOME") or os.path.expanduser("~")
        try:
            prepared = session.prepare(
                directory, rules=rules, home=home, state=state, environment=environment, overlay=overlay
            )
        except BaseException:
            shutil.rmtree(state, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            raise
        return LentWorkspace(prepared, rules, lock)

    def show(self, *, rules: policy.Merged) -> Beside:
        home = self._environment.get("HOME") or os.path.expanduser("~")
        found = plan.shown(rules, home=home, state=self._states, environment=self._environment)
        return Beside(found)

    def sweep(self) -> list[str]:
        swept = []
        for name in _entries(self._states):
            state = os.path.join(self._states, name)
            lock = _lock(state)
            if lock is None:
                continue  # its engine lives
            session.sweep(state)
            shutil.rmtree(state, ignore_errors=True)
            os.close(lock)
            swept.append(name)
        return swept


class LentWorkspace(interfaces.Workspace):
    def __init__(self, prepared: description.Prepared, rules: policy.Merged, lock: int | None) -> None:
        self._prepared = prepared
        self._rules = rules
        self._lock = lock
        self._report: model.WorkspaceReport | None = None
        self.exposure = _exposure(prepared)

    def diff(self, upper: str) -> list[model.FileChange]:
        return [
            model.FileChange(kind=c.kind, path=c.path, type=c.type, size=c.size, refused=c.refused)
            for c in overlays.diff(self._prepared.root, upper, rules=self._rules)
        ]

    def apply(self, upper: str, paths: Sequence[str] | None = None) -> list[str]:
        return list(overlays.apply(self._prepared.root, upper, paths, rules=self._rules).applied)

    def finish(self) -> model.WorkspaceReport:
        if self._report is None:
            found = session.finish(self._prepared)
            self._report = model.WorkspaceReport(
                control_files_changed=found.control_files_changed, config_merged=found.config_merged,
                config_dropped=found.config_dropped, warnings=found.warnings,
            )  # fmt: skip
            shutil.rmtree(self._prepared.state, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
        return self._report


class Beside(interfaces.Workspace):
    """Directories of the host that are shown where there is no workspace."""

    def __init__(self, shown: list[tuple[str, bool]]) -> None:
        owner = next((os.stat(path) for path, writable in shown if writable), None)
        ids = (os.geteuid(), os.getegid()) if owner is None else (owner.st_uid, owner.st_gid)
        self.exposure = interfaces.Exposure(
            root="", owner=ids, cwd="/workspace", shown=tuple(path for path, _ in shown),
            binds=tuple(interfaces.Shown(path, path, writable, writable) for path, writable in shown),
        )  # fmt: skip

    def diff(self, upper: str) -> list[model.FileChange]:
        return []

    def apply(self, upper: str, paths: Sequence[str] | None = None) -> list[str]:
        return []

    def finish(self) -> model.WorkspaceReport:
        return model.WorkspaceReport()


def _exposure(prepared: description.Prepared) -> interfaces.Exposure:
    info = os.stat(prepared.root)
    return interfaces.Exposure(
        root=prepared.root, owner=(info.st_uid, info.st_gid), overlay=prepared.overlay,
        binds=tuple(interfaces.Shown(*bind) for bind in prepared.binds), private=prepared.private,
        pinned=prepared.pinned, protect=prepared.protect, deny=prepared.deny, env=tuple(prepared.env.items()),
        cwd=prepared.cwd, shown=prepared.shown, warnings=prepared.warnings,
    )  # fmt: skip


def _lock(state: str) -> int | None:
    """The state's lock, for as long as this process lives; None if another holds it."""
    descriptor = os.open(os.path.join(state, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
