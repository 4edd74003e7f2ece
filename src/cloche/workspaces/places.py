"""Which directories may be a workspace, and which paths are never shown.

Refused before anything is made: what is not there, `/`, a home or what lies above one, what belongs to the system, what
holds credentials, and our own state (a sandbox that could write it could write what we believe).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cloche import errors

# Refused with everything beneath.
_SYSTEM = (
    "/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/lost+found", "/var/lib", "/var/log", "/var/run", "/var/spool", "/var/cache", "/var/lock", "/var/mail",
)  # fmt: skip
# Refused themselves; projects do live below.
_COMMON = (
    "/",
    "/home",
    "/root",
    "/opt",
    "/srv",
    "/mnt",
    "/media",
    "/tmp",
    "/var",
    "/var/tmp",
    "/var/home",
    "/snap",
)

# Relative to a home. Never a workspace, never shown with a toolchain.
CREDENTIALS = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config/gcloud", ".config/gh", ".config/op", ".netrc",
    ".git-credentials", ".config/git/credentials", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", ".cargo/credentials",
    ".cargo/credentials.toml", ".claude", ".claude.json", ".codex", ".gemini", ".password-store", ".mozilla",
    ".config/google-chrome", ".config/chromium", ".config/BraveSoftware", ".local/share/keyrings", ".bash_history",
    ".zsh_history", ".python_history", ".psql_history", ".pgpass", ".my.cnf", ".config/rclone", ".terraform.d",
    ".gem/credentials", ".m2/settings.xml", ".gradle/gradle.properties", ".vault-token", ".config/hub", ".config/containers",
)  # fmt: skip


def resolve(directory: str, *, home: str, state: str, environment: Mapping[str, str]) -> str:
    """The real path of a directory that may be a workspace; everything else raises."""
    if "\0" in directory or "\n" in directory or "\r" in directory:
        raise errors.error("path_invalid", "the path of a workspace holds a NUL or a line break")
    try:
        directory.encode()
    except UnicodeEncodeError:
        raise errors.error("path_invalid", f"the path of a workspace is not UTF-8: {directory!a}") from None
    if not directory:
        raise _missing(directory)
    try:
        root = os.path.realpath(directory, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(directory) from None
    except OSError as problem:
        code = "path_loop" if problem.errno == 40 else "workspace_not_found"
        raise errors.error(code, f"the workspace {directory!r} cannot be read: {problem.strerror}") from None
    if not os.path.isdir(root):
        raise errors.error(
            "not_directory",
            f"the workspace {directory!r} is not a directory",
            hint="name the directory that holds it",
        )
    reason = _refusal(root, os.path.realpath(home), os.path.realpath(state), environment)
    if reason:
        raise errors.error(
            "workspace_refused", f"{root!r} cannot be a workspace: {reason}",
            hint="name the directory of one project, such as ~/src/project",
        )  # fmt: skip
    return root


def _missing(directory: str) -> errors.ClocheError:
    return errors.error(
        "workspace_not_found",
        f"there is no directory {directory!r}",
        hint="create it first, or check the spelling",
    )


def _refusal(root: str, home: str, state: str, environment: Mapping[str, str]) -> str | None:
    if root == "/":
        return "it is the whole machine"
    if root == home or beneath(home, root):
        return "it is your home directory, or holds it"
    if root in _COMMON or any(within(root, path) for path in _SYSTEM):
        return "it belongs to the system"
    for ours in (state, _state_root(home, environment)):
        if within(root, ours) or within(ours, root):
            return "it is, or holds, the state directory of cloche"
    if any(within(root, f"{home}/{path}") for path in CREDENTIALS):
        return "it holds credentials"
    return None


def _state_root(home: str, environment: Mapping[str, str]) -> str:
    default = environment.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return os.path.realpath(environment.get("CLOCHE_HOME") or f"{default}/cloche")


def why_not_shown(path: str, *, home: str, state: str, environment: Mapping[str, str]) -> str | None:
    """Why a directory of the host must not be shown beside a workspace; None if it may be."""
    if not os.path.isdir(path):
        return "it is not a directory"
    if os.path.realpath(path) != path:
        return f"it is, or lies behind, a link; its own path is {os.path.realpath(path)}"
    home = os.path.realpath(home)
    if shows_credentials(path, home):
        return "it holds credentials"
    return _refusal(path, home, os.path.realpath(state), environment)


def beneath(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def within(path: str, directory: str) -> bool:
    return path == directory or beneath(path, directory)


def shows_credentials(path: str, home: str) -> bool:
    """Whether showing `path` would show something of `CREDENTIALS`, or the home itself."""
    if within(home, path):
        return True
    return any(within(path, f"{home}/{secret}") or within(f"{home}/{secret}", path) for secret in CREDENTIALS)
