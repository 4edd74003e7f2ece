"""Be a container, as engines make them: paths of /proc masked, and a filter that refuses some calls; then run a program.

    python container.py [--refuse CALL] -- PROGRAM ARGUMENT...

A program of its own, run by the installed package's interpreter, because what it does to itself cannot be undone.
"""

import os
import struct
import sys

from cloche.linux import seccomp, syscalls

MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug")
EMPTIED = ("/proc/acpi", "/proc/scsi", "/sys/firmware")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE_WITH_EPERM = 0x7FFF0000, 0x00050001


def mask() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    for path in filter(os.path.exists, MASKED):
        syscalls.mount("/dev/null", path, None, syscalls.MS_BIND)
    for path in filter(os.path.exists, EMPTIED):
        syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_RDONLY)
    for path in filter(os.path.exists, READ_ONLY):
        syscalls.mount(path, path, None, syscalls.MS_BIND)
        syscalls.mount(None, path, None, syscalls.MS_BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY)


def refuse(name: str) -> None:
    number = syscalls.TABLE[name][syscalls.ARCHITECTURES.index(syscalls.ARCH)]
    program = [
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _REFUSE_WITH_EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.load(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))


if __name__ == "__main__":
    options, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    mask()
    if options:
        refuse(options[1])
    os.execvp(command[0], command)
