"""Runs as a program: becomes a network namespace, sends its sockets out, and runs commands in it when told.

python inside.py FD MODE CAPTURE     MODE user | root, CAPTURE nft | routes | explicit
"""

import os
import socket
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "src"))

from cloche.egress import capture
from cloche.guest import wire
from cloche.linux import namespaces, syscalls

_PROXY = f"http://127.0.0.1:{capture.PROXY_PORT}"
PROXY_ENVIRONMENT = {
    "http_proxy": _PROXY, "https_proxy": _PROXY, "HTTPS_PROXY": _PROXY, "HTTP_PROXY": _PROXY,
    "no_proxy": "localhost,127.0.0.1,::1",
}  # fmt: skip


def enter(mode: str) -> None:
    kinds = syscalls.CLONE_NEWNET | syscalls.CLONE_NEWNS
    uid, gid = os.getuid(), os.getgid()
    if mode == "user":
        syscalls.unshare(syscalls.CLONE_NEWUSER | kinds)
        for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
    else:
        syscalls.unshare(kinds)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    namespaces.raise_loopback()
    resolver = f"/tmp/cl-resolv-{os.getpid()}"
    with open(resolver, "w") as file:
        file.write("nameserver 127.0.0.1\noptions timeout:3 attempts:1\n")
    syscalls.mount(resolver, os.path.realpath("/etc/resolv.conf"), "", syscalls.MS_BIND)
    os.unlink(resolver)


def run(order: "dict[str, object]") -> "dict[str, object]":
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "HOME": "/tmp", "GIT_CONFIG_NOSYSTEM": "1"}
    if order["proxy"]:
        env.update(PROXY_ENVIRONMENT)
    env.update(order["env"])  # type: ignore[call-overload]
    try:
        done = subprocess.run(
            order["argv"],
            env=env,
            capture_output=True,
            timeout=40,
            cwd=order["cwd"],
            stdin=subprocess.DEVNULL,
        )  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return {"code": -1, "out": "", "err": "the command did not end"}
    return {
        "code": done.returncode,
        "out": done.stdout.decode("utf-8", "replace"),
        "err": done.stderr.decode("utf-8", "replace"),
    }


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    enter(sys.argv[2])
    how = sys.argv[3]
    made = capture.prepare(nft=how != "routes", transparent=how != "explicit")
    roles = [role for role, _ in made.sockets]
    wire.send(
        link, {"roles": roles, "how": made.how, "note": made.note}, [one.fileno() for _, one in made.sockets]
    )
    made.close()
    while (received := wire.receive(link)) is not None:
        wire.send(link, run(received[0]))


if __name__ == "__main__":
    main()
