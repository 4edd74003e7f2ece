"""A small stand-in for a driver: makes the mounts of a `Prepared` in a child's namespaces and runs a shell line there.

The root stays the host's; what is under test is what the mounts allow and forbid. Works as root and as an ordinary user.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import traceback
from typing import NamedTuple

from cloche import workspaces
from cloche.linux import syscalls

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x20000


class Ran(NamedTuple):
    status: int
    output: str


def run(
    prepared: workspaces.Prepared, line: str, *, shell: str = "/bin/bash", env: dict[str, str] | None = None
) -> Ran:
    """Run `line` in the workspace, everything on one stream."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            enter(prepared)
            os.chdir(prepared.cwd)
            os.execve(
                shell,
                [shell, "-c", line],
                {"HOME": "/nonexistent", "LC_ALL": "C", **prepared.env, **(env or {})},
            )
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(125)
    os.close(write_end)
    with open(read_end, errors="replace") as file:
        output = file.read()
    return Ran(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output)


def enter(prepared: workspaces.Prepared) -> None:
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    syscalls.mount(None, "/", None, syscalls.MS_REC | 0x40000)  # private
    if prepared.private:
        syscalls.mount("tmpfs", "/run", "tmpfs", 0, "mode=0755")  # a fresh place for fresh mount points
    for source, target in prepared.private:
        os.makedirs(target)
        bind(source, target, writable=True)
    late = [(path, path, True) for path in prepared.pinned]
    late += [(source, target, False) for source, target in prepared.protect]
    for source, target, writable in sorted(late, key=lambda step: step[1].count("/")):
        bind(source, target, writable=writable)


def bind(source: str, target: str, *, writable: bool) -> None:
    tree = syscalls.open_tree(
        syscalls.AT_FDCWD, source, syscalls.OPEN_TREE_CLONE | syscalls.AT_SYMLINK_NOFOLLOW
    )
    if not writable:
        syscalls.mount_setattr(tree, "", syscalls.AT_EMPTY_PATH, set_attributes=syscalls.MOUNT_ATTR_RDONLY)
    syscalls.move_mount(tree, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def git(directory: str, *arguments: str, check: bool = True, env: dict[str, str] | None = None) -> str:
    """The host's git, as a user would run it."""
    identity = {
        "GIT_AUTHOR_NAME": "h",
        "GIT_AUTHOR_EMAIL": "h@h",
        "GIT_COMMITTER_NAME": "h",
        "GIT_COMMITTER_EMAIL": "h@h",
    }
    plain = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        **identity,
        **(env or {}),
    }
    done = subprocess.run(["git", *arguments], cwd=directory, env=plain, capture_output=True, text=True)
    if check and done.returncode:
        raise AssertionError(f"git {arguments}: {done.stderr}")
    return done.stdout
