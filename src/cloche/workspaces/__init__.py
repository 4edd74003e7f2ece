"""The host's side of `--workspace DIR`: a directory shown inside at its own path, writable, and safe to come back to.

Lives here: which directories may be shown, what of them is protected and how, git configuration that a sandbox may write
without the host obeying it, the toolchains that go along, the report at the end, and `diff` and `apply` of an overlay.
Does not: mounting. `prepare` describes the mounts (description.py says in which order and with which meaning), a driver
makes them. Called by the drivers' owner before a sandbox starts and after its last process has ended.
"""

from cloche.workspaces.description import Applied, Bind, Change, Prepared, Report, lost
from cloche.workspaces.lending import LocalWorkspaces
from cloche.workspaces.overlays import apply, diff
from cloche.workspaces.plan import explain
from cloche.workspaces.session import finish, prepare, survey, sweep

__all__ = [
    "Applied",
    "Bind",
    "Change",
    "LocalWorkspaces",
    "Prepared",
    "Report",
    "apply",
    "diff",
    "explain",
    "finish",
    "lost",
    "prepare",
    "survey",
    "sweep",
]
