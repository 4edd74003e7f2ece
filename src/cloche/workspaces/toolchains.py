"""The programs behind the caller's PATH, so that `python`, `node` and `cargo` inside are the ones outside.

For each directory of PATH that the base root does not show already: what is the smallest tree that makes it work, and
does that tree hold nothing but programs? Managers keep versions and shims in one root, which is shown; a virtual
environment needs the interpreter it was made from; `~/.local/bin` is links into tools' own directories. Anything else is
shown as that one directory. Never a home, never what holds credentials (`~/.cargo/bin` is shown, `~/.cargo` is not).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from cloche.workspaces import places

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VISIBLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")  # the template `base` shows these
_NEVER = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/etc", "/boot", "/snap")
# Roots of managers, relative to home, each with the variable that moves it and whether programs inside need it set.
_MANAGERS = (
    (".pyenv", "PYENV_ROOT", True), (".rbenv", "RBENV_ROOT", True), (".nodenv", "NODENV_ROOT", True),
    (".asdf", "ASDF_DATA_DIR", True), (".local/share/mise", "MISE_DATA_DIR", True), (".volta", "VOLTA_HOME", True),
    (".nvm", "NVM_DIR", False), (".local/share/fnm", "FNM_DIR", False), (".sdkman", "SDKMAN_DIR", False),
    (".local/share/pnpm", "PNPM_HOME", False), (".bun", "BUN_INSTALL", False), (".deno", "DENO_INSTALL", False),
)  # fmt: skip
_MAX_TOOLS = 200


class Toolchains(NamedTuple):
    paths: tuple[str, ...]
    """Host paths to show read-only at their own place."""
    env: dict[str, str]


class _Finder:
    def __init__(self, home: str, environment: Mapping[str, str], root: str) -> None:
        self.home = os.path.realpath(home)
        self.environment = environment
        self.root = root
        self.shown: dict[str, None] = {}
        self.path: dict[str, None] = {}
        self.env: dict[str, str] = {}

    def find(self) -> Toolchains:
        for entry in self.environment.get("PATH", "").split(":"):
            if entry.startswith("/") and "\n" not in entry and os.path.isdir(entry):
                self.add_directory(entry)
        inside = [*self.path, *(part for part in BASE_PATH.split(":") if part not in self.path)]
        self.env["PATH"] = ":".join(inside)
        outermost = [
            path for path in self.shown if not any(places.beneath(path, above) for above in self.shown)
        ]
        return Toolchains(tuple(sorted(outermost)), self.env)

    def add_directory(self, entry: str) -> None:
        real = os.path.realpath(entry)
        if entry in BASE_PATH.split(":") or self.needs_nothing(real):
            if not any(places.within(entry, path) for path in ("/bin", "/sbin", "/usr")) or entry == real:
                self.add_path(entry, real)
            self.add_environment(real)
            return
        if self.is_nowhere(real):
            return
        known = self.manager(real) or self.prefix(real)
        if self.show(known or real):
            self.add_path(entry, real)
            self.add_environment(real)
            if real == os.path.realpath(f"{self.home}/.local/bin"):
                self.add_targets(real)

    def add_path(self, entry: str, real: str) -> None:
        if entry not in BASE_PATH.split(":"):
            self.path[entry if entry == real or self.is_visible(entry) else real] = None

    def is_visible(self, path: str) -> bool:
        """Whether the path as spelled leads there inside too: no part of it is a link outside of what is shown."""
        return any(places.within(path, shown) for shown in (*self.shown, *_VISIBLE, self.root))

    def needs_nothing(self, real: str) -> bool:
        return any(places.within(real, path) for path in (*_VISIBLE, self.root))

    def show(self, path: str) -> bool:
        """Show `path` if it holds programs only."""
        if self.needs_nothing(path):
            return True
        in_other_home = places.beneath(path, "/home") and not places.within(path, self.home)
        if in_other_home and not places.within(path, "/home/linuxbrew/.linuxbrew"):
            return False
        if places.shows_credentials(path, self.home) or self.is_nowhere(path):
            return False
        self.shown[path] = None
        return True

    def is_nowhere(self, path: str) -> bool:
        """Whether it is no place for programs. Some systems keep homes in /var, and those are."""
        return not places.beneath(path, self.home) and any(places.within(path, never) for never in _NEVER)

    def manager(self, real: str) -> str | None:
        for relative, variable, needed in _MANAGERS:
            root = os.path.realpath(self.environment.get(variable) or f"{self.home}/{relative}")
            if places.beneath(real, root) and not places.shows_credentials(root, self.home):
                if needed:
                    self.env[variable] = root
                return root
        cargo = os.path.realpath(self.environment.get("CARGO_HOME") or f"{self.home}/.cargo")
        rustup = os.path.realpath(self.environment.get("RUSTUP_HOME") or f"{self.home}/.rustup")
        if real == f"{cargo}/bin" and os.path.isdir(rustup) and self.show(rustup):
            self.env["RUSTUP_HOME"] = rustup
        return None

    def prefix(self, real: str) -> str | None:
        """The tree that a `bin` belongs to, where it is known to be one tool's own."""
        above = os.path.dirname(real)
        if os.path.basename(real) != "bin":
            return None
        marks = (
            "pyvenv.cfg",
            "conda-meta",
            "lib/node_modules",
            "go.env",
            "VERSION",
            "lib/jvm.cfg",
            "release",
            "Homebrew",
        )
        known = (
            any(os.path.lexists(f"{above}/{mark}") for mark in marks) or above == "/home/linuxbrew/.linuxbrew"
        )
        return above if known and not places.shows_credentials(above, self.home) else None

    def add_environment(self, real: str) -> None:
        """A virtual environment needs its base interpreter."""
        prefix = os.path.dirname(real)
        settings = _read_settings(f"{prefix}/pyvenv.cfg")
        if settings is None:
            return
        self.env.setdefault("VIRTUAL_ENV", prefix)
        self.add_interpreter(real, settings.get("home"))

    def add_interpreter(self, bin_directory: str, home: str | None) -> None:
        for path in (home, os.path.dirname(os.path.realpath(f"{bin_directory}/python3"))):
            if path and path.startswith("/") and os.path.isdir(path):
                self.show_whole(path)
                self.show_whole(os.path.realpath(path))

    def show_whole(self, bin_directory: str) -> None:
        """The tree of a `bin` that a program links to: its libraries lie beside it."""
        prefix = os.path.dirname(bin_directory) if os.path.basename(bin_directory) == "bin" else bin_directory
        if not self.show(prefix):
            self.show(bin_directory)

    def add_targets(self, directory: str) -> None:
        """What the links of `~/.local/bin` lead to: pipx, uv, npm and single programs."""
        for name in sorted(os.listdir(directory))[:_MAX_TOOLS]:
            path = f"{directory}/{name}"
            target = os.path.realpath(path)
            if not os.path.islink(path) or not os.path.isfile(target) or self.needs_nothing(target):
                continue
            folder = os.path.dirname(target)
            if os.path.basename(folder) == "bin" and self.prefix(folder):
                self.show_whole(folder)
                self.add_base(folder)
            elif "/node_modules/" in target:
                self.show(target[: target.index("/node_modules/")] + "/node_modules")
            else:
                self.show(target)

    def add_base(self, folder: str) -> None:
        settings = _read_settings(f"{os.path.dirname(folder)}/pyvenv.cfg")
        if settings is not None:
            self.add_interpreter(folder, settings.get("home"))


def find(*, home: str, environment: Mapping[str, str], root: str) -> Toolchains:
    return _Finder(home, environment, root).find()


def _read_settings(path: str) -> dict[str, str] | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return None
    pairs = (line.partition("=") for line in lines)
    return {key.strip().lower(): value.strip() for key, equals, value in pairs if equals}


def git_settings(*, home: str, environment: Mapping[str, str], directories: tuple[str, ...]) -> str:
    """The global configuration of git inside: who commits, and that the workspace's owner is to be trusted.

    Global, so that a repository's own name and address win; by environment (`GIT_CONFIG_KEY_0`) they would lose. What the
    sandbox's own home says comes last and wins over ours.
    """
    lines = ["[safe]", *(f"\tdirectory = {_quoted(path)}" for path in directories)]
    # `git init` copies templates into .git/hooks, which is read-only; without samples there is nothing to copy.
    lines += ["[init]", '\ttemplateDir = ""']
    lines += [
        line
        for key, value in _identity(home, environment)
        for line in ("[user]", f"\t{key[5:]} = {_quoted(value)}")
    ]
    lines += ["[include]", "\tpath = ~/.config/git/config", "\tpath = ~/.gitconfig"]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    return f'"{escaped}"'


def _identity(home: str, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The caller's name and address from the global configuration; nothing where there is no git or no such entry."""
    hardened = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    env = {
        "HOME": home,
        "PATH": environment.get("PATH", BASE_PATH),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }
    env |= {key: environment[key] for key in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL") if key in environment}
    query = ["config", "--global", "--includes", "--null", "--get-regexp", r"^user\.(name|email)$"]
    try:
        # In "/", so that no repository's configuration is looked at.
        run = subprocess.run(
            [*hardened, *query], env=env, cwd="/", capture_output=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found: dict[str, str] = {}
    for record in run.stdout.decode("utf-8", "replace").split("\0"):
        key, _, value = record.partition("\n")
        if value and "\n" not in value:
            found[key] = value
    return list(found.items())
