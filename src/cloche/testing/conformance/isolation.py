"""Behaviours of the glass: what code inside cannot reach. Each passes only if the effect is absent, whatever was said.

A refused system call is told apart from a failed one by its arguments: they are such that the bare kernel fails for
another reason (or succeeds without harm), so EPERM or ENOSYS can only come from the glass.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from cloche.linux import syscalls
from cloche.testing.conformance.bench import Bench, Box, eventually, processes_with, unique_seconds
from cloche.testing.conformance.registry import behaviour, expect, refused, same

_REFUSALS = (1, 13, 38)  # EPERM, EACCES, ENOSYS

# ── rights ─────────────────────────────────────────────────────────────────────────────────────────


async def _status(box: Box, field: str) -> set[str]:
    """A field of every task's status, as a command sees it of itself."""
    said = await box.out(["cat", "/proc/self/status"])
    return {line.split()[1] for line in said.splitlines() if line.startswith(f"{field}:")}


@behaviour("isolation")
async def commands_have_no_capabilities(bench: Bench) -> None:
    """Every capability set of a command is empty, the bounding set included."""
    box = await bench.box()
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        same({int(value, 16) for value in await _status(box, field)}, {0}, field)


@behaviour("isolation")
async def commands_cannot_gain_rights(bench: Bench) -> None:
    """no_new_privs is set: no set-uid program gives anything."""
    same(await _status(await bench.box(), "NoNewPrivs"), {"1"})


@behaviour("isolation")
async def commands_run_under_a_filter(bench: Bench) -> None:
    """A seccomp filter is in force."""
    same(await _status(await bench.box(), "Seccomp"), {"2"})


@behaviour("isolation")
async def commands_run_as_uid_1000(bench: Bench) -> None:
    """Inside, the user is called `user` and has uid and gid 1000, and no other group."""
    same(await (await bench.box()).out("id -u; id -g; id -un; id -G"), "1000\n1000\nuser\n1000\n")


@behaviour("isolation")
async def root_inside_is_nobody_outside(bench: Bench) -> None:
    """A command may run as root where there are uids for it; on the host it is a uid that owns nothing."""
    box = await bench.box()
    mark = unique_seconds()
    running = await box.start(f"id -u; exec sleep {mark}", user="root")
    same(await running.until(b"\n"), b"0\n")
    await eventually(lambda: processes_with(mark), "the command is not to be found on the host")
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in processes_with(mark)}
    expect(owners and not owners & {0, os.getuid()}, f"on the host it runs as {owners}")


@behaviour("isolation")
async def no_core_is_dumped(bench: Bench) -> None:
    """A crash writes no core file."""
    same(await (await bench.box()).out("ulimit -c"), "0\n")


# ── system calls ───────────────────────────────────────────────────────────────────────────────────

_CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
memory = ctypes.create_string_buffer(4096)
words = [ctypes.c_void_p(ctypes.addressof(memory)) if w == "memory" else w for w in map(eval, sys.argv[1:])]
made = libc.syscall(*[ctypes.c_long(w) if isinstance(w, int) else ctypes.c_char_p(w) if isinstance(w, bytes) else w for w in words])
print(json.dumps([made, ctypes.get_errno() if made == -1 else 0]))
"""


async def _is_refused(box: Box, name: str, *arguments: object) -> None:
    number = syscalls.TABLE[name][syscalls.ARCHITECTURES.index(syscalls.ARCH)]
    if number is None:
        return  # this architecture never had it
    result, code = await box.python(_CALL, *(repr(word) for word in (number, *arguments)))
    expect(result == -1 and code in _REFUSALS, f"{name} was not refused: it gave {result}, errno {code}")


@behaviour("isolation")
async def namespaces_cannot_be_made(bench: Bench) -> None:
    """unshare of a user, mount or network namespace is refused."""
    box = await bench.box()
    for flag in (syscalls.CLONE_NEWUSER, syscalls.CLONE_NEWNS, syscalls.CLONE_NEWNET):
        await _is_refused(box, "unshare", flag)
    await _is_refused(box, "setns", -1, syscalls.CLONE_NEWNET)


@behaviour("isolation")
async def nothing_can_be_mounted(bench: Bench) -> None:
    """mount, and the newer calls for it, are refused."""
    box = await bench.box()
    await _is_refused(box, "mount", b"none", b"/no-such-place", b"tmpfs", 0, 0)
    await _is_refused(box, "open_tree", -100, b"/no-such-place", 0)
    await _is_refused(box, "fsopen", b"no-such-filesystem", 0)


@behaviour("isolation")
async def programs_cannot_be_traced(bench: Bench) -> None:
    """ptrace and reading another process's memory are refused."""
    box = await bench.box()
    await _is_refused(box, "ptrace", 0, 0, 0, 0)
    await _is_refused(box, "process_vm_readv", -1, "memory", 1, "memory", 1, 0)


@behaviour("isolation")
async def io_uring_is_closed(bench: Bench) -> None:
    """No ring can be made: it would do work past the filter."""
    await _is_refused(await bench.box(), "io_uring_setup", 4, "memory")


@behaviour("isolation")
async def keyrings_are_closed(bench: Bench) -> None:
    """The kernel's keyrings, which no namespace separates, are refused."""
    await _is_refused(await bench.box(), "keyctl", 0, -2, 1)


@behaviour("isolation")
async def bpf_and_perf_are_closed(bench: Bench) -> None:
    """Programs in the kernel and its performance counters are refused."""
    box = await bench.box()
    await _is_refused(box, "bpf", 0xFFFF, "memory", 16)
    await _is_refused(box, "perf_event_open", "memory", 0x7FFFFFFF, -1, -1, 0)


@behaviour("isolation")
async def userfaultfd_is_closed(bench: Bench) -> None:
    """Stopping the kernel at a page fault is refused."""
    await _is_refused(await bench.box(), "userfaultfd", 1)


@behaviour("isolation")
async def nobody_types_on_a_terminal_but_its_user(bench: Bench) -> None:
    """TIOCSTI is refused: a program cannot put words into its terminal's input."""
    code = "import fcntl, termios\ntry: fcntl.ioctl(0, termios.TIOCSTI, b'x'); print('typed')\nexcept OSError: print('refused')"
    result = await (await bench.box()).exec(["python3", "-I", "-c", code], pty=(80, 24))
    same(result.stdout, "refused\r\n")


@behaviour("isolation")
async def what_the_glass_stopped_is_told(bench: Bench) -> None:
    """A refused call is in the result's denials, with its name and the evidence."""
    code = "import ctypes; ctypes.CDLL(None).unshare(0x10000000)"
    result = await (await bench.box()).exec(["python3", "-I", "-c", code])
    same({(d.kind, d.operation, d.evidence) for d in result.denials}, {("syscall", "unshare", "seccomp")})


@behaviour("isolation")
async def a_flood_of_refused_calls_ends(bench: Bench) -> None:
    """Asking a thousand times is answered a thousand times, with no."""
    code = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(json.dumps(sorted({libc.unshare(0x10000000) for _ in range(1000)})))"
    same(await (await bench.box()).python(code), [-1])


# ── the host's files ───────────────────────────────────────────────────────────────────────────────


@behaviour("isolation")
async def a_file_of_the_host_is_not_read(bench: Bench) -> None:
    """A file on the host that anybody may read cannot be read inside."""
    result = await (await bench.box()).exec(["cat", bench.canary])
    expect(bench.secret not in result.stdout + result.stderr, "the host's file was read")


@behaviour("isolation")
async def a_file_of_the_host_is_not_written(bench: Bench) -> None:
    """A directory on the host that anybody may write stays as it is."""
    line = 'echo planted >"$1/planted"; echo changed >"$1/canary"; rm -f "$1/canary"; chmod 000 "$1/canary"; true'
    await (await bench.box()).exec(["sh", "-c", line, "sh", bench.host])
    same(os.listdir(bench.host), ["canary"], "files on the host")
    with open(bench.canary) as file:
        same(file.read(), bench.secret, "the host's file")


@behaviour("isolation")
async def the_state_directory_is_hidden(bench: Bench) -> None:
    """Cloche's own state, keys and other sandboxes' files are not to be found inside."""
    code = "def look(p):\n    try: return os.listdir(p)\n    except OSError: return []\nprint(json.dumps(look(sys.argv[1])))"
    with open(os.path.join(bench.home, "a-secret-of-ours"), "w"):
        same(await (await bench.box()).python(code, bench.home), [])


@behaviour("isolation")
async def the_hosts_accounts_are_hidden(bench: Bench) -> None:
    """/etc/shadow cannot be read, and /etc/passwd is not the host's."""
    code = "try: print(json.dumps(open(sys.argv[1]).read()))\nexcept OSError: print('null')"
    box = await bench.box()
    same(await box.python(code, "/etc/shadow"), None)
    with open("/etc/passwd") as file:
        expect(await box.python(code, "/etc/passwd") != file.read(), "the host's list of users is shown")


@behaviour("isolation")
async def programs_of_the_host_are_not_changed(bench: Bench) -> None:
    """Writing next to the host's programs changes nothing outside, whoever tries."""
    name = f"/usr/bin/cloche-conformance-{secrets.token_hex(8)}"
    await (await bench.box()).exec(["touch", name])
    existed = os.path.exists(name)
    if existed:
        os.unlink(name)
    expect(not existed, f"{name} appeared on the host")


@behaviour("isolation")
async def root_may_write_the_root_and_the_host_stays(bench: Bench) -> None:
    """With the moderate profile root changes the sandbox's system, which is thrown away with it."""
    box = await bench.box()
    name = f"/usr/bin/cloche-conformance-{secrets.token_hex(8)}"
    same(
        await box.out(
            ["sh", "-c", 'printf "#!/bin/sh\necho installed\n" >"$1" && chmod 755 "$1"; "$1"', "sh", name],
            user="root",
        ),
        "installed\n",
    )
    expect(not os.path.exists(name), f"{name} appeared on the host")
    same((await (await bench.box()).exec([name])).exit_code, 127, "in the next sandbox")


@behaviour("isolation")
async def a_restrictive_root_is_read_only(bench: Bench) -> None:
    """With the restrictive profile the root is mounted read-only, the workspace is not, and root is refused."""
    box = await bench.box(profile="restrictive")
    code = (
        "print(json.dumps([bool(os.statvfs(p).f_flag & os.ST_RDONLY) for p in ('/', '/usr', os.getcwd())]))"
    )
    same(await box.python(code), [True, True, False])
    with refused("user_refused"):
        await box.exec("id", user="root")


@behaviour("isolation")
async def the_kernels_settings_cannot_be_opened(bench: Bench) -> None:
    """Files of /proc that change the kernel cannot be opened for writing."""
    code = (
        "opened = []\nfor p in ('/proc/sys/kernel/hostname', '/proc/sys/vm/drop_caches', '/proc/sysrq-trigger', '/proc/kcore'):\n"
        "    try: os.close(os.open(p, os.O_RDONLY if p.endswith('kcore') else os.O_WRONLY)); opened.append(p)\n"
        "    except OSError: pass\n"
        "print(json.dumps([p for p in opened if os.path.getsize(p) or not p.endswith('kcore')]))"
    )
    same(await (await bench.box()).python(code), [])


@behaviour("isolation")
async def devices_of_the_host_cannot_be_opened(bench: Bench) -> None:
    """Of devices there are the harmless ones, and no other can be made."""
    code = (
        "import stat\nopened = []\nfor p in ('/dev/kmsg', '/dev/mem', '/dev/kvm', '/dev/fuse', '/dev/net/tun'):\n"
        "    try: os.close(os.open(p, os.O_RDONLY | os.O_NONBLOCK)); opened.append(p)\n    except OSError: pass\n"
        "try: os.mknod('made', stat.S_IFCHR | 0o666, os.makedev(1, 3)); opened.append('made')\nexcept OSError: pass\n"
        "print(json.dumps(opened))"
    )
    same(await (await bench.box()).python(code), [])


# ── processes and descriptors ──────────────────────────────────────────────────────────────────────

_CMDLINES = """
said = b""
for name in os.listdir("/proc"):
    try: said += open(f"/proc/{name}/cmdline", "rb").read() + b"\\0"
    except OSError: pass
print(json.dumps(open("mark", "rb").read() in said))
"""


async def _sees(box: Box, mark: str) -> bool:
    """Whether a command line in /proc has this mark; handed over in a file, so that the looker has not."""
    await box.write("mark", mark)
    return bool(await box.python(_CMDLINES))


@behaviour("isolation")
async def processes_of_the_host_are_unseen(bench: Bench) -> None:
    """The host's command lines, which hold secrets often enough, are not in the sandbox's /proc."""
    neighbour = bench.neighbour()
    expect(not await _sees(await bench.box(), neighbour.mark), "a process of the host is seen")


@behaviour("isolation")
async def processes_of_the_host_cannot_be_signalled(bench: Bench) -> None:
    """A signal to the pid of a process of the same user outside does not arrive."""
    neighbour = bench.neighbour()
    await (await bench.box()).exec(["kill", "-9", str(neighbour.pid)])
    expect(neighbour.answers(), "the host's process was killed")


@behaviour("isolation")
async def the_agent_cannot_be_read(bench: Bench) -> None:
    """The parent of a command, which is ours, shows neither memory nor environment nor descriptors."""
    code = (
        "opened = []\nfor name in ('mem', 'environ', 'fd/0', 'maps'):\n"
        "    try: os.close(os.open(f'/proc/{os.getppid()}/{name}', os.O_RDONLY)); opened.append(name)\n    except OSError: pass\n"
        "print(json.dumps(opened))"
    )
    same(await (await bench.box()).python(code), [])


@behaviour("isolation")
async def no_descriptor_is_inherited(bench: Bench) -> None:
    """A command has descriptors 0, 1 and 2, although the caller left another one inheritable."""
    code = (
        "def is_open(n):\n    try: os.fstat(n); return True\n    except OSError: return False\n"
        "print(json.dumps([n for n in range(4096) if is_open(n)]))"
    )
    same(await (await bench.box()).python(code), [0, 1, 2])


@behaviour("isolation")
async def the_host_has_another_name(bench: Bench) -> None:
    """The sandbox does not tell the host's name."""
    expect(
        (await (await bench.box()).out(["uname", "-n"])).strip() != os.uname().nodename,
        "it is the host's name",
    )


# ── network ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _listening(family: int, kind: int, address: object) -> Iterator[socket.socket]:
    with closing(socket.socket(family, kind)) as server:
        server.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            server.listen(5)
        server.setblocking(False)
        yield server


def _reached(server: socket.socket) -> bool:
    try:
        if server.type & socket.SOCK_STREAM == socket.SOCK_STREAM:
            server.accept()[0].close()
        else:
            server.recv(10)
    except BlockingIOError:
        return False
    return True


_SEND = """
import socket
family, kind, address = getattr(socket, sys.argv[1]), getattr(socket, sys.argv[2]), eval(sys.argv[3])
try:
    s = socket.socket(family, kind); s.settimeout(2); s.connect(address); s.send(b"x"); print('"sent"')
except OSError as problem:
    print(json.dumps(str(problem)))
"""


async def _host_unreached(
    bench: Bench, family: socket.AddressFamily, kind: socket.SocketKind, host: str | bytes
) -> None:
    box = await bench.box()
    inet = family in (socket.AF_INET, socket.AF_INET6)
    with _listening(family, kind, (host, 0) if inet else host) as server:
        address = (host, server.getsockname()[1]) if inet else host
        await box.python(_SEND, family.name, kind.name, repr(address))
        expect(not _reached(server), f"the host was reached at {address!r}")


@behaviour("isolation")
async def the_hosts_loopback_is_unreachable_by_tcp(bench: Bench) -> None:
    """A server on the host's 127.0.0.1 gets no connection."""
    await _host_unreached(bench, socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1")


@behaviour("isolation")
async def the_hosts_loopback_is_unreachable_by_udp(bench: Bench) -> None:
    """A datagram does not arrive at the host's 127.0.0.1."""
    await _host_unreached(bench, socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1")


@behaviour("isolation")
async def unix_sockets_of_the_host_are_unreachable(bench: Bench) -> None:
    """Neither a socket in the file system nor an abstract one of the host can be connected to."""
    await _host_unreached(
        bench, socket.AF_UNIX, socket.SOCK_STREAM, f"{bench.directory}/{secrets.token_hex(4)}.sock"
    )
    await _host_unreached(
        bench, socket.AF_UNIX, socket.SOCK_STREAM, b"\0cloche-" + secrets.token_hex(8).encode()
    )


@behaviour("isolation")
async def there_is_no_network_but_loopback(bench: Bench) -> None:
    """The only interface is the sandbox's own loopback."""
    same(
        await (await bench.box()).python(
            "import socket; print(json.dumps([n for _, n in socket.if_nameindex()]))"
        ),
        ["lo"],
    )


_SERVER = """
import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True)
c, _ = s.accept(); c.sendall(c.recv(100).upper()); c.close()
"""


@behaviour("isolation")
async def loopback_works_inside(bench: Bench) -> None:
    """Programs in a sandbox talk to each other over loopback."""
    box = await bench.box()
    server = await box.start(["python3", "-I", "-c", _SERVER])
    port = (await server.until(b"\n")).strip().decode()
    code = "import socket; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.sendall(b'hello'); print(json.dumps(s.recv(100).decode()))"
    same(await box.python(code, port), "HELLO")


@behaviour("isolation")
async def a_port_inside_can_be_reached_by_the_engine(bench: Bench) -> None:
    """The machine gives a connection to a port of the sandbox, and only the sandbox's."""
    box = await bench.box()
    with (
        _listening(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)) as outside,
        refused("port_closed"),
    ):
        os.close(await box.machine.connect(outside.getsockname()[1]))
    server = await box.start(["python3", "-I", "-c", _SERVER])
    port = int(await server.until(b"\n"))
    with socket.socket(fileno=await box.machine.connect(port)) as link:
        link.settimeout(5)
        link.sendall(b"knock")
        same(link.recv(100), b"KNOCK")


# ── sandboxes among themselves ─────────────────────────────────────────────────────────────────────


@behaviour("isolation")
async def sandboxes_do_not_see_each_others_files(bench: Bench) -> None:
    """What one sandbox writes to its workspace, home, /tmp or shared memory is not in another."""
    one, two = await bench.box(), await bench.box()
    line = 'for d in . "$HOME" "${TMPDIR:-/tmp}" /tmp /var/tmp /dev/shm; do echo x >"$d/$1"; done 2>/dev/null; echo done'
    mark = f"mark-{one.id}"
    same(await one.out(["sh", "-c", line, "sh", mark]), "done\n")
    look = 'for d in . "$HOME" "${TMPDIR:-/tmp}" /tmp /var/tmp /dev/shm; do [ -e "$d/$1" ] && echo "$d"; done; rm -f "/tmp/$1" "/var/tmp/$1" "/dev/shm/$1"; true'
    same(await two.out(["sh", "-c", look, "sh", mark]), "")


@behaviour("isolation")
async def sandboxes_do_not_see_each_others_processes(bench: Bench) -> None:
    """A command of one sandbox is not in another's /proc."""
    one, two = await bench.box(), await bench.box()
    mark = unique_seconds()
    running = await one.start(f"echo ready; exec sleep {mark}")
    await running.until(b"ready")
    expect(not await _sees(two, mark), "the other sandbox's process is seen")


@behaviour("isolation")
async def sandboxes_cannot_signal_each_other(bench: Bench) -> None:
    """A signal from one sandbox to a process of another does not arrive, by whatever pid."""
    one, two = await bench.box(), await bench.box()
    running = await one.start("echo up; read x; echo alive", open_stdin=True)
    await running.until(b"up")
    pids = [str(running.pid), *(str(p) for p in processes_with("read x; echo alive"))]
    for pid in pids:
        if pid != "1":
            await two.exec(["kill", "-9", pid])
    await running.write(b"\n")
    same((await running.wait()).stdout, "up\nalive\n")


_ABSTRACT = """
import socket
try:
    s = socket.socket(socket.AF_UNIX); s.bind(b"\\0" + sys.argv[1].encode()); s.listen(); print("listening", flush=True)
    sys.stdin.read()
except OSError: print("listening to nothing", flush=True)
"""


@behaviour("isolation")
async def sandboxes_cannot_meet_at_an_abstract_socket(bench: Bench) -> None:
    """An abstract socket of one sandbox cannot be connected to from another."""
    one, two = await bench.box(), await bench.box()
    name = f"cloche-{secrets.token_hex(8)}"
    server = await one.start(["python3", "-I", "-c", "import sys\n" + _ABSTRACT, name], open_stdin=True)
    await server.until(b"listening")
    said = await two.python(_SEND, "AF_UNIX", "SOCK_STREAM", repr(b"\0" + name.encode()))
    expect(said != "sent", "the other sandbox was reached")
