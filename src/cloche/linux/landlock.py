"""Landlock: a process gives up files, TCP, signals and abstract sockets, without privilege and for ever.

Everything not named is denied. A rule gives *access* to a directory and all beneath it (or to one file); a
second rule can only add, so Landlock cannot deny below an allow: lay out trees accordingly.

Kernels differ by ABI version. Rights newer than the kernel's are left out here, and `restrict` returns what
it really enforced, so that nobody has to guess:

    1  files          2  + moving between directories     3  + truncation      4  + TCP
    5  + ioctl of devices      6  + signals and abstract sockets      7  + audit flags (unused)

With ABI 1 every move between directories is refused, whatever the rules say. Rights are bound to a file when
it is opened: descriptors held before `restrict` keep working.

Standard library and `syscalls` only.
"""

import errno
import os
import stat
import struct

from cloche.linux import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_CHAR = 1 << 6
_MAKE_DIR = 1 << 7
_MAKE_REG = 1 << 8
_MAKE_SOCK = 1 << 9
_MAKE_FIFO = 1 << 10
_MAKE_BLOCK = 1 << 11
_MAKE_SYM = 1 << 12
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15

# How many of the rights above each ABI knows; later ones so far added none.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NEWEST_RIGHTS = 16

# What may be granted on a file; the others make sense on a directory only, and the kernel refuses them.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

READ = _READ_FILE | _READ_DIR
WRITE = (
    _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_SOCK
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
EXECUTE = _EXECUTE
DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
READ_ONLY = READ | EXECUTE
READ_WRITE = READ | WRITE | EXECUTE
ALL = (1 << _NEWEST_RIGHTS) - 1

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_BIND_AND_CONNECT_TCP = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

_RULESET = struct.Struct("=3Q")
_PATH_BENEATH = struct.Struct("=Qi")


def abi() -> int:
    """The version of Landlock that this kernel offers, 0 when there is none or it was not enabled at boot."""
    try:
        return syscalls.raw("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):  # EPERM: a filter around us
            return 0
        raise


def restrict(
    rules: "Sequence[tuple[str | bytes | int, int]]",
    *,
    abi: int | None = None,
    scope: bool = True,
    no_tcp: bool = False,
) -> frozenset[str]:
    """Confine this thread and all it will start to the files that the rules give, each (path or descriptor,
    access).

    `scope` also keeps signals and abstract sockets within what is started from here, `no_tcp` refuses all
    binding and connecting. Returns what holds afterwards, of `files`, `tcp`, `signals`, `abstract_sockets`; a
    kernel without Landlock is an OSError. Sets no_new_privs. `abi` is for a caller that knows it already.
    """
    version = _version(abi)
    handled = (1 << _RIGHTS.get(version, _NEWEST_RIGHTS)) - 1
    tcp = _BIND_AND_CONNECT_TCP if no_tcp and version >= 4 else 0
    scoped = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if scope and version >= 6 else 0
    attributes = _RULESET.pack(handled, tcp, scoped)[: _ruleset_size(version)]
    ruleset = syscalls.raw("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for where, access in rules:
            _allow(ruleset, where, access & handled)
        # SAFETY: Landlock asks for it, so that no set-uid program runs confined unawares
        # (test_restrict_sets_no_new_privs).
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        # SAFETY: nothing can widen it again; further rulesets only narrow
        # (test_a_second_ruleset_only_narrows).
        syscalls.raw("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    held = {"files"} | ({"tcp"} if tcp else set()) | ({"signals", "abstract_sockets"} if scoped else set())
    return frozenset(held)


def _version(given: int | None) -> int:
    version = abi() if given is None else given
    if version < 1:
        raise OSError(errno.EOPNOTSUPP, "this kernel offers no Landlock")
    return version


def _ruleset_size(version: int) -> int:
    """Bytes of the attributes that an ABI knows: an older kernel refuses what it does not know if not zero,
    and some refuse the length itself."""
    return 8 if version < 4 else 16 if version < 6 else 24


def _allow(ruleset: int, where: str | bytes | int, access: int) -> None:
    fd = where if isinstance(where, int) else os.open(where, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _FILE_RIGHTS
        if access:  # a rule without any right is refused, and means what no rule means
            syscalls.raw("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, _PATH_BENEATH.pack(access, fd), 0)
    finally:
        if fd is not where:
            os.close(fd)
