"""System calls by name: one table of numbers, one door into the kernel, thin wrappers over it.

The table is the single list of system calls for everything here: the wrappers below use it to call, and
`seccomp` uses it to filter. It covers both architectures that we run on, up to Linux 6.18. A call that is
missing from it cannot be made by us and is answered ENOSYS by our filters, so a new kernel does not widen
what a sandbox can reach.

There is one door, `raw`, because each foreign function costs about 85 µs when a freshly forked process first
calls it: one function is paid for once, and `prime` pays in the parent. Arguments are declared `void *`,
which ctypes fills from an int, bytes, a ctypes buffer or None without a wrapper object; a failing call raises
the matching `OSError`.

`typing` and `collections` are left out on purpose: they cost a forked process more than all of this module.
"""

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Argument = int | bytes | ctypes.Array[Any] | None
    Path = str | bytes

# name: (x86_64, aarch64). Sorted; checked against the kernel's own headers by tests/linux/test_syscalls.py.
# fmt: off
TABLE: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None), "accept": (43, 202), "accept4": (288, 242), "access": (21, None),
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "afs_syscall": (183, None),
    "alarm": (37, None), "arch_prctl": (158, None), "bind": (49, 200), "bpf": (321, 280), "brk": (12, 214),
    "cachestat": (451, 451), "capget": (125, 90), "capset": (126, 91), "chdir": (80, 49),
    "chmod": (90, None), "chown": (92, None), "chroot": (161, 51), "clock_adjtime": (305, 266),
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435), "close": (3, 57),
    "close_range": (436, 436), "connect": (42, 203), "copy_file_range": (326, 285), "creat": (85, None),
    "create_module": (174, None), "delete_module": (176, 106), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_ctl_old": (214, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "epoll_wait": (232, None), "epoll_wait_old": (215, None), "eventfd": (284, None), "eventfd2": (290, 19),
    "execve": (59, 221), "execveat": (322, 281), "exit": (60, 93), "exit_group": (231, 94),
    "faccessat": (269, 48), "faccessat2": (439, 439), "fadvise64": (221, 223), "fallocate": (285, 47),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "fchdir": (81, 50), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "fcntl": (72, 25), "fdatasync": (75, 83), "fgetxattr": (193, 10), "file_getattr": (468, 468),
    "file_setattr": (469, 469), "finit_module": (313, 273), "flistxattr": (196, 13), "flock": (73, 32),
    "fork": (57, None), "fremovexattr": (199, 16), "fsconfig": (431, 431), "fsetxattr": (190, 7),
    "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "fstat": (5, 80),
    "fstatfs": (138, 44), "fsync": (74, 82), "ftruncate": (77, 46), "futex": (202, 98),
    "futex_requeue": (456, 456), "futex_wait": (455, 455), "futex_waitv": (449, 449),
    "futex_wake": (454, 454), "futimesat": (261, None), "get_kernel_syms": (177, None),
    "get_mempolicy": (239, 236), "get_robust_list": (274, 100), "get_thread_area": (211, None),
    "getcpu": (309, 168), "getcwd": (79, 17), "getdents": (78, None), "getdents64": (217, 61),
    "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176), "getgroups": (115, 158),
    "getitimer": (36, 102), "getpeername": (52, 205), "getpgid": (121, 155), "getpgrp": (111, None),
    "getpid": (39, 172), "getpmsg": (181, None), "getppid": (110, 173), "getpriority": (140, 141),
    "getrandom": (318, 278), "getresgid": (120, 150), "getresuid": (118, 148), "getrlimit": (97, 163),
    "getrusage": (98, 165), "getsid": (124, 156), "getsockname": (51, 204), "getsockopt": (55, 209),
    "gettid": (186, 178), "gettimeofday": (96, 169), "getuid": (102, 174), "getxattr": (191, 8),
    "getxattrat": (464, 464), "init_module": (175, 105), "inotify_add_watch": (254, 27),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_rm_watch": (255, 28),
    "io_cancel": (210, 3), "io_destroy": (207, 1), "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    "io_setup": (206, 0), "io_submit": (209, 2), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None),
    "iopl": (172, None), "ioprio_get": (252, 31), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "kill": (62, 129),
    "landlock_add_rule": (445, 445), "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446), "lchown": (94, None), "lgetxattr": (192, 9), "link": (86, None),
    "linkat": (265, 37), "listen": (50, 201), "listmount": (458, 458), "listxattr": (194, 11),
    "listxattrat": (465, 465), "llistxattr": (195, 12), "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15), "lseek": (8, 62), "lsetxattr": (189, 6), "lsm_get_self_attr": (459, 459),
    "lsm_list_modules": (461, 461), "lsm_set_self_attr": (460, 460), "lstat": (6, None),
    "madvise": (28, 233), "map_shadow_stack": (453, 453), "mbind": (237, 235), "membarrier": (324, 283),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "migrate_pages": (256, 238),
    "mincore": (27, 232), "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None),
    "mknodat": (259, 33), "mlock": (149, 228), "mlock2": (325, 284), "mlockall": (151, 230),
    "mmap": (9, 222), "modify_ldt": (154, None), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "move_pages": (279, 239), "mprotect": (10, 226), "mq_getsetattr": (245, 185),
    "mq_notify": (244, 184), "mq_open": (240, 180), "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182), "mq_unlink": (241, 181), "mremap": (25, 216), "mseal": (462, 462),
    "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188), "msgsnd": (69, 189), "msync": (26, 227),
    "munlock": (150, 229), "munlockall": (152, 231), "munmap": (11, 215), "name_to_handle_at": (303, 264),
    "nanosleep": (35, 101), "newfstatat": (262, 79), "nfsservctl": (180, 42), "open": (2, None),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "openat": (257, 56), "openat2": (437, 437), "pause": (34, None), "perf_event_open": (298, 241),
    "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pipe": (22, None), "pipe2": (293, 59), "pivot_root": (155, 41),
    "pkey_alloc": (330, 289), "pkey_free": (331, 290), "pkey_mprotect": (329, 288), "poll": (7, None),
    "ppoll": (271, 73), "prctl": (157, 167), "pread64": (17, 67), "preadv": (295, 69),
    "preadv2": (327, 286), "prlimit64": (302, 261), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pselect6": (270, 72), "ptrace": (101, 117), "putpmsg": (182, None), "pwrite64": (18, 68),
    "pwritev": (296, 70), "pwritev2": (328, 287), "query_module": (178, None), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "read": (0, 63), "readahead": (187, 213), "readlink": (89, None),
    "readlinkat": (267, 78), "readv": (19, 65), "reboot": (169, 142), "recvfrom": (45, 207),
    "recvmmsg": (299, 243), "recvmsg": (47, 212), "remap_file_pages": (216, 234), "removexattr": (197, 14),
    "removexattrat": (466, 466), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "request_key": (249, 218), "restart_syscall": (219, 128), "rmdir": (84, None), "rseq": (334, 293),
    "rt_sigaction": (13, 134), "rt_sigpending": (127, 136), "rt_sigprocmask": (14, 135),
    "rt_sigqueueinfo": (129, 138), "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "rt_tgsigqueueinfo": (297, 240), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_getaffinity": (204, 123), "sched_getattr": (315, 275),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "sched_rr_get_interval": (148, 127),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_yield": (24, 124), "seccomp": (317, 277),
    "security": (185, None), "select": (23, None), "semctl": (66, 191), "semget": (64, 190),
    "semop": (65, 193), "semtimedop": (220, 192), "sendfile": (40, 71), "sendmmsg": (307, 269),
    "sendmsg": (46, 211), "sendto": (44, 206), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "set_robust_list": (273, 99), "set_thread_area": (205, None),
    "set_tid_address": (218, 96), "setdomainname": (171, 162), "setfsgid": (123, 152),
    "setfsuid": (122, 151), "setgid": (106, 144), "setgroups": (116, 159), "sethostname": (170, 161),
    "setitimer": (38, 103), "setns": (308, 268), "setpgid": (109, 154), "setpriority": (141, 140),
    "setregid": (114, 143), "setresgid": (119, 149), "setresuid": (117, 147), "setreuid": (113, 145),
    "setrlimit": (160, 164), "setsid": (112, 157), "setsockopt": (54, 208), "settimeofday": (164, 170),
    "setuid": (105, 146), "setxattr": (188, 5), "setxattrat": (463, 463), "shmat": (30, 196),
    "shmctl": (31, 195), "shmdt": (67, 197), "shmget": (29, 194), "shutdown": (48, 210),
    "sigaltstack": (131, 132), "signalfd": (282, None), "signalfd4": (289, 74), "socket": (41, 198),
    "socketpair": (53, 199), "splice": (275, 76), "stat": (4, None), "statfs": (137, 43),
    "statmount": (457, 457), "statx": (332, 291), "swapoff": (168, 225), "swapon": (167, 224),
    "symlink": (88, None), "symlinkat": (266, 36), "sync": (162, 81), "sync_file_range": (277, 84),
    "syncfs": (306, 267), "sysfs": (139, None), "sysinfo": (99, 179), "syslog": (103, 116),
    "tee": (276, 77), "tgkill": (234, 131), "time": (201, None), "timer_create": (222, 107),
    "timer_delete": (226, 111), "timer_getoverrun": (225, 109), "timer_gettime": (224, 108),
    "timer_settime": (223, 110), "timerfd_create": (283, 85), "timerfd_gettime": (287, 87),
    "timerfd_settime": (286, 86), "times": (100, 153), "tkill": (200, 130), "truncate": (76, 45),
    "tuxcall": (184, None), "umask": (95, 166), "umount2": (166, 39), "uname": (63, 160),
    "unlink": (87, None), "unlinkat": (263, 35), "unshare": (272, 97), "uprobe": (336, None),
    "uretprobe": (335, None), "uselib": (134, None), "userfaultfd": (323, 282), "ustat": (136, None),
    "utime": (132, None), "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None),
    "vhangup": (153, 58), "vmsplice": (278, 75), "vserver": (236, None), "wait4": (61, 260),
    "waitid": (247, 95), "write": (1, 64), "writev": (20, 66),
}
# fmt: on

ARCHITECTURES = ("x86_64", "aarch64")

ARCH = os.uname().machine
if ARCH == "arm64":
    ARCH = "aarch64"

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOSYMFOLLOW = 0x100
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_UNBINDABLE = 0x20000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MS_SHARED = 0x100000
MS_RELATIME = 0x200000

MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC

MOVE_MOUNT_F_SYMLINKS = 0x1
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_SYMLINKS = 0x10
MOVE_MOUNT_T_EMPTY_PATH = 0x40

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_IDMAP = 0x00100000
MOUNT_ATTR_NOSYMFOLLOW = 0x00200000

RESOLVE_NO_XDEV = 0x1
RESOLVE_NO_MAGICLINKS = 0x2
RESOLVE_NO_SYMLINKS = 0x4
RESOLVE_BENEATH = 0x8
RESOLVE_IN_ROOT = 0x10
RESOLVE_CACHED = 0x20

CLOSE_RANGE_CLOEXEC = 0x4
CLOSE_RANGE_LAST = 0xFFFFFFFF

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_FOWNER = 3
CAP_FSETID = 4
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SETPCAP = 8
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21

_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_HEADER = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
_CAPABILITY_WORDS = struct.Struct("=6I")
_MOUNT_ATTR = struct.Struct("=4Q")
_OPEN_HOW = struct.Struct("=3Q")

# A racing rename makes a confined lookup answer EAGAIN; who races may be hostile, so the patience is bounded.
_OPENAT2_ATTEMPTS = 16

libc = ctypes.CDLL(None, use_errno=True)

_COLUMN = ARCHITECTURES.index(ARCH) if ARCH in ARCHITECTURES else None
_PADDING = ((0,) * 6, (0,) * 5, (0,) * 4, (0,) * 3, (0,) * 2, (0,), ())

# By item, which makes an object of our own: the argument types below must not bind other users of `libc`.
_syscall = libc["syscall"]
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_void_p] * 7

_CLONE_VM, _SIGCHLD = 0x100, 17
_clone = libc["clone"]
_clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
_pause = ctypes.cast(libc["pause"], ctypes.c_void_p)
_idle_stack = ctypes.create_string_buffer(16384)
_IDLE_TOP = (ctypes.addressof(_idle_stack) + len(_idle_stack)) & ~0xF  # stacks grow downwards


def number(name: str, *, arch: str = ARCH) -> int | None:
    """The number of a system call, None where the architecture has none; KeyError for an unknown name."""
    pair = TABLE[name]
    if arch not in ARCHITECTURES:
        return None
    return pair[ARCHITECTURES.index(arch)]


def raw(name: str, *args: "Argument") -> int:
    """Make a system call; its non-negative result, or the OSError it stands for.

    Never pass `str`: ctypes would hand over wide characters. Buffers that the kernel writes into are ctypes
    arrays.
    """
    nr = TABLE[name][_COLUMN] if _COLUMN is not None else None
    if nr is None:
        raise OSError(errno.ENOSYS, f"{name} does not exist on {ARCH}")
    result = _syscall(nr, *args, *_PADDING[len(args)])
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(result)


def prime() -> None:
    """Pay the first-use costs of this module, so that processes forked afterwards do not."""
    raw("getpid")
    prctl(PR_GET_DUMPABLE)
    ctypes.get_errno()
    try:
        raw("close", -1)  # the failing path too: it builds strings and an exception
    except OSError:
        pass


# --- namespaces ---------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    # SAFETY: changes only the calling process; a namespace is never joined by it
    # (test_unshare_makes_a_new_namespace).
    raw("unshare", flags)


def setns(fd: int, kind: int = 0) -> None:
    """Enter the namespace behind `fd`; `kind`, CLONE_NEW* flags, makes the kernel check what it is."""
    # SAFETY: a wrong descriptor must not be entered silently; callers pass `kind`
    # (test_setns_checks_the_kind).
    raw("setns", fd, kind)


def clone_idle(flags: int) -> int:
    """A child in new namespaces (CLONE_NEW* `flags`) that does nothing: its pid. Kill it with SIGKILL and reap it.

    It runs libc's `pause` on a stack of its own and shares our memory, so neither page tables are copied nor pages
    touched: a fork of a Python process costs ten times as much. For processes with a single thread; one at a time.
    """
    # SAFETY: no line of Python runs in the child, and `pause` returns only from a signal handler, which nobody's signal
    # runs; if it did, libc ends the child (test_clone_idle).
    child: int = _clone(_pause, _IDLE_TOP, flags | _CLONE_VM | _SIGCHLD, None)
    if child == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"clone: {os.strerror(code)}")
    return child


# --- mounts -------------------------------------------------------------------------------------------------


def pivot_root(new_root: "Path", put_old: "Path") -> None:
    # SAFETY: refused by the kernel unless `new_root` is a mount point of this namespace
    # (test_mount_wrappers).
    raw("pivot_root", os.fsencode(new_root), os.fsencode(put_old))


def mount(
    source: "Path | None",
    target: "Path",
    fstype: "Path | None" = None,
    flags: int = 0,
    data: "Path | None" = None,
) -> None:
    # SAFETY: `target` is resolved by the kernel, symlinks included; untrusted targets go by descriptor,
    # through `move_mount` or /proc/self/fd (test_mount_wrappers).
    raw(
        "mount",
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if fstype is None else os.fsencode(fstype),
        flags,
        None if data is None else os.fsencode(data),
    )


def umount2(target: "Path", flags: int = 0) -> None:
    # SAFETY: UMOUNT_NOFOLLOW is the caller's duty where the path is not its own (test_mount_wrappers).
    raw("umount2", os.fsencode(target), flags)


def open_tree(dirfd: int, path: "Path", flags: int) -> int:
    """A descriptor of a mount tree, a detached copy of it with OPEN_TREE_CLONE; closed on exec."""
    return raw("open_tree", dirfd, os.fsencode(path), flags | OPEN_TREE_CLOEXEC)


def move_mount(from_dirfd: int, from_path: "Path", to_dirfd: int, to_path: "Path", flags: int) -> None:
    # SAFETY: both ends may be descriptors with empty paths, so that nothing is looked up twice
    # (test_mount_wrappers).
    raw("move_mount", from_dirfd, os.fsencode(from_path), to_dirfd, os.fsencode(to_path), flags)


def mount_setattr(
    dirfd: int,
    path: "Path",
    flags: int,
    *,
    set_attributes: int = 0,
    clear_attributes: int = 0,
    propagation: int = 0,
    userns_fd: int = 0,
) -> None:
    """Change a mount, with AT_RECURSIVE all beneath it, atomically: all of the mounts are changed or none."""
    # SAFETY: unlike MS_REMOUNT it never drops flags that it was not asked about (test_mount_wrappers).
    attributes = _MOUNT_ATTR.pack(set_attributes, clear_attributes, propagation, userns_fd)
    raw("mount_setattr", dirfd, os.fsencode(path), flags, attributes, len(attributes))


def openat2(dirfd: int, path: "Path", flags: int, mode: int = 0, resolve: int = 0) -> int:
    """open(2) with rules for the lookup (RESOLVE_*); the descriptor is closed on exec."""
    # SAFETY: with RESOLVE_BENEATH no symlink, `..` or mount planted below `dirfd` leads outside, also under a
    # race (test_openat2_does_not_leave_the_directory).
    how = _OPEN_HOW.pack(flags | os.O_CLOEXEC, mode, resolve)
    name = os.fsencode(path)
    for attempt in range(_OPENAT2_ATTEMPTS):
        try:
            return raw("openat2", dirfd, name, how, len(how))
        except OSError as error:
            if error.errno != errno.EAGAIN or resolve & RESOLVE_CACHED or attempt == _OPENAT2_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


# --- processes ----------------------------------------------------------------------------------------------


def syncfs(fd: int) -> None:
    """Write out whatever the file system of `fd` still holds in memory."""
    # SAFETY: only writes what was already asked to be written (test_syncfs).
    raw("syncfs", fd)


def pidfd_send_signal(pidfd: int, signal: int) -> None:
    raw("pidfd_send_signal", pidfd, signal, None, 0)


def close_range(first: int, last: int = CLOSE_RANGE_LAST, flags: int = 0) -> None:
    """Close, or with CLOSE_RANGE_CLOEXEC mark, every descriptor from `first` to `last`."""
    # SAFETY: one call, so no descriptor opened meanwhile by a library is missed (test_close_range).
    raw("close_range", first, last, flags)


def prctl(
    option: int, arg2: "Argument" = 0, arg3: "Argument" = 0, arg4: "Argument" = 0, arg5: "Argument" = 0
) -> int:
    return raw("prctl", option, arg2, arg3, arg4, arg5)


def setfsuid(uid: int) -> int:
    """Do file access as `uid`, in this thread; returns the uid used before.

    The system call cannot fail visibly: refused, it changes nothing. A second call asks what holds now.
    """
    previous = raw("setfsuid", uid)
    # SAFETY: going on as the old user would write files with its rights (test_setfsuid_tells_a_refusal).
    if raw("setfsuid", -1) & 0xFFFFFFFF != uid:
        raise PermissionError(errno.EPERM, f"setfsuid({uid}): refused")
    return previous & 0xFFFFFFFF


def setfsgid(gid: int) -> int:
    """`setfsuid` for the group."""
    previous = raw("setfsgid", gid)
    # SAFETY: as above (test_setfsuid_tells_a_refusal).
    if raw("setfsgid", -1) & 0xFFFFFFFF != gid:
        raise PermissionError(errno.EPERM, f"setfsgid({gid}): refused")
    return previous & 0xFFFFFFFF


# --- capabilities -------------------------------------------------------------------------------------------


def get_caps() -> tuple[int, int, int]:
    """Effective, permitted and inheritable capabilities of this thread, as bit masks."""
    buffer = ctypes.create_string_buffer(_CAPABILITY_WORDS.size)
    raw("capget", _CAPABILITY_HEADER, buffer)
    low_e, low_p, low_i, high_e, high_p, high_i = _CAPABILITY_WORDS.unpack(buffer.raw)
    return low_e | high_e << 32, low_p | high_p << 32, low_i | high_i << 32


def set_caps(effective: int, permitted: int, inheritable: int) -> None:
    """Set this thread's capabilities to exactly these bit masks."""
    words = (effective, permitted, inheritable)
    data = _CAPABILITY_WORDS.pack(*(w & 0xFFFFFFFF for w in words), *(w >> 32 for w in words))
    # SAFETY: the kernel lets permitted shrink only, so no call here gains anything
    # (test_capabilities_are_dropped).
    raw("capset", _CAPABILITY_HEADER, data)


def drop_bounding_set(keep: int = 0) -> None:
    """Empty the ambient set, and the bounding set but for the capabilities in the bit mask `keep`.

    Works until the kernel knows no further capability, so that one newer than this code goes too. Needs
    CAP_SETPCAP.
    """
    # SAFETY: with an empty bounding set no set-uid or file capability gives any back
    # (test_capabilities_are_dropped).
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    drop = TABLE["prctl"][_COLUMN or 0]  # forty times, in every sandbox: without the layers above
    for capability in range(64):
        if not keep >> capability & 1 and _syscall(drop, PR_CAPBSET_DROP, capability, 0, 0, 0, 0) == -1:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return
            raise OSError(code, f"prctl: {os.strerror(code)}")
