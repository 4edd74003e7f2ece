"""The template `base`: the host's programs under a synthetic root.

Shown read-only: /usr, /opt and what of /bin, /sbin, /lib* is not a link into /usr. The rest is a *skeleton*, a small
directory made once per state directory: empty mount points, links, a synthetic /etc with an allow-list of the host's
files copied in. Nothing of any home, /run, /var/lib or /root is in it.
"""

from __future__ import annotations

import os
import stat
import zlib
from typing import NamedTuple

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
# Copied from the host's /etc: public, needed to run programs, and nothing that names the host or its users.
ETC = (
    "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "alternatives", "ld.so.conf",
    "ld.so.conf.d", "ld.so.cache", "localtime", "timezone", "nsswitch.conf", "mime.types", "protocols", "services",
    "java-17-openjdk", "java-21-openjdk", "java-11-openjdk", "fonts", "debian_version", "os-release", "inputrc",
    "bash.bashrc", "magic", "python3", "perl", "crypto-policies", "pki",
)  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_ID = 1000
_DIRECTORIES = {
    "dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777,
    "var/log": 0o755, "var/cache": 0o755, "var/lib": 0o755, "root": 0o755, "home": 0o755, "mnt": 0o755, "srv": 0o755, "etc": 0o755,
}  # fmt: skip
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost cloche\n::1 localhost\n",
    "etc/hostname": "cloche\n",
    "etc/resolv.conf": "nameserver 127.0.0.1\n",  # what an empty file means too; nobody listens there without a network
    "etc/machine-id": "c10c4ec10c4ec10c4ec10c4ec10c4e00\n",
    "etc/shells": "/bin/sh\n/bin/bash\n",
}


class HostImage(NamedTuple):
    skeleton: str
    layers: tuple[str, ...]
    environment: dict[str, str]


def prepare(images: str) -> HostImage:
    """The skeleton for this host, made if it is not there yet. Safe against a second maker at the same time."""
    layers = tuple(p for p in PROGRAMS if os.path.isdir(p) and not os.path.islink(p) and os.listdir(p))
    layers += tuple(_mounts_beneath(layers))
    target = os.path.join(images, "base-" + _signature(layers))
    if not os.path.isdir(target):
        import shutil  # once per state directory

        os.makedirs(images, mode=0o700, exist_ok=True)
        draft = f"{target}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        _build(draft, layers)
        try:
            os.rename(draft, target)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)  # somebody else was first
    return HostImage(target, layers, environment())


def environment() -> dict[str, str]:
    return {
        "PATH": PATH, "HOME": "/home/user", "USER": "user", "LOGNAME": "user", "LANG": "C.UTF-8",
        "SHELL": "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "TMPDIR": "/tmp",
    }  # fmt: skip


def _build(root: str, layers: tuple[str, ...]) -> None:
    privileged = os.geteuid() == 0
    os.mkdir(root, 0o755)
    for name, mode in _DIRECTORIES.items():
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", mode)
    for name in ("home/user", "workspace"):
        os.mkdir(f"{root}/{name}", 0o755)
        if privileged:
            os.chown(f"{root}/{name}", USER_ID, USER_ID)
    for program in PROGRAMS:
        if os.path.islink(program):
            os.symlink(os.readlink(program), root + program)
        elif os.path.isdir(program):
            os.mkdir(root + program, 0o755)
    for name in ETC:
        _copy(f"/etc/{name}", f"{root}/etc/{name}")
    for name, text in FILES.items():
        with open(f"{root}/{name}", "w") as file:
            file.write(text)
    os.symlink("/proc/self/mounts", f"{root}/etc/mtab")
    os.symlink("/run", f"{root}/var/run")
    _open_up(root)


def _open_up(root: str) -> None:
    """Everybody may read what was made under whatever umask; setting that instead would touch the caller's threads."""
    for directory, _, names in os.walk(root):
        os.chmod(directory, _DIRECTORIES.get(os.path.relpath(directory, root), 0o755))
        for name in names:
            if not os.path.islink(f"{directory}/{name}"):
                os.chmod(f"{directory}/{name}", 0o644)


def _copy(source: str, target: str) -> None:
    """Links as links, regular world-readable files as files, anything else not at all."""
    import shutil

    try:
        info = os.lstat(source)
    except OSError:
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(info.st_mode):
        link = os.readlink(source)
        resolved = os.path.normpath(os.path.join(os.path.dirname(source), link))
        if resolved.startswith("/etc/") or resolved.startswith("/usr/"):
            os.symlink(link, target)
        elif os.path.isfile(source):
            shutil.copyfile(source, target)
    elif stat.S_ISDIR(info.st_mode):
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(source):
            _copy(f"{source}/{name}", f"{target}/{name}")
    elif stat.S_ISREG(info.st_mode) and info.st_mode & stat.S_IROTH:
        shutil.copyfile(source, target)
        os.chmod(target, 0o644)


def _signature(layers: tuple[str, ...]) -> str:
    """Changes when what was copied, or the code that copies, changes. Checksums suffice: nobody else chooses the input."""
    facts = repr((layers, ETC, sorted(FILES.items()), os.geteuid() == 0, 5))
    for name in ETC:
        try:
            info = os.stat(f"/etc/{name}")
            facts += f"{name} {info.st_mtime_ns} {info.st_size}"
        except OSError:
            continue
    data = facts.encode()
    return f"{zlib.crc32(data):08x}{zlib.adler32(data):08x}"


def _mounts_beneath(layers: tuple[str, ...]) -> list[str]:
    """File systems mounted below a layer, which a copy of the layer's own mount would not show."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            point = line.split()[4].replace("\\040", " ")
            if any(point.startswith(layer + "/") for layer in layers) and os.path.isdir(point):
                found.append(point)
    return found
