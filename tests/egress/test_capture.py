"""What is made in a namespace: the text, the routes, the sockets; and that it stays there."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.egress import capture, nftables
from tests.egress import room

nft = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin")
needs_nft = pytest.mark.skipif(nft is None, reason="nft is not installed")


def own_rules() -> str:
    assert nft is not None
    return subprocess.run([nft, "list", "ruleset"], capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_without_privilege_rules_are_refused() -> None:
    with pytest.raises(PermissionError):
        nftables.load(1, 2)


def test_a_port_that_is_taken_is_told_with_its_cause() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    try:
        with pytest.raises(capture.CaptureError) as caught:
            capture._listener(socket.AF_INET, "127.0.0.1", taken.getsockname()[1])
        assert isinstance(caught.value.__cause__, OSError)
    finally:
        taken.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_without_privilege_routes_are_refused() -> None:
    with pytest.raises(capture.CaptureError):
        capture.add_routes()


@needs_nft
@pytest.mark.parametrize("mode", ["user", "root"])
def test_rules_stay_in_their_namespace(mode: str) -> None:
    before = own_rules()
    inside = room.Inside(mode)
    try:
        assert inside.how == "nft", inside.note
        assert inside.note == ""
        assert [role for role, _ in inside.sockets] == ["proxy", "transparent", "dns"]
        assert "table inet cloche" not in own_rules().replace(before, "")
        ports = [one.getsockname()[1] for _, one in inside.sockets]
        assert ports == [capture.PROXY_PORT, capture.CAPTURE_PORT, capture.DNS_PORT]
        listed = inside.run(str(nft), "list", "ruleset")
        # Versions of nft have a number or a name for this priority.
        assert listed.out.replace("priority dstnat", "priority -100") == capture.ruleset(), listed.err
    finally:
        inside.close()


def test_without_nft_it_says_what_is_missing() -> None:
    inside = room.Inside("user", "routes")
    try:
        assert inside.how == "routes"
        assert "servers inside cannot use them" in inside.note
        assert [role for role, _ in inside.sockets] == ["proxy", "transparent", "transparent", "dns"]
    finally:
        inside.close()


def test_only_loopback_exists() -> None:
    inside = room.Inside("user")
    try:
        found = inside.run("cat", "/proc/net/dev").out.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in found] == ["lo"]
    finally:
        inside.close()


ORDINARY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from cloche.egress import capture
from cloche.linux import namespaces, syscalls
if os.getuid() == 0:
    os.setgroups([]); os.setresgid(4321, 4321, 4321); os.setresuid(4321, 4321, 4321)
    syscalls.prctl(4, 1)  # dumpable again, so that /proc/self is ours
uid, gid = os.getuid(), os.getgid()
syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNET)
for name, text in (("uid_map", f"1000 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"1000 {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
namespaces.raise_loopback()
made = capture.prepare()
print(made.how, made.note)
"""


def test_an_ordinary_user_whose_namespace_has_no_root_gets_all_of_it() -> None:
    """A program started from there would have no privilege left: it must be done by the process itself."""
    source = str(Path(capture.__file__).parent.parent.parent)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import os, sys; src = open(0).read(); exec(src)", source],
        input=ORDINARY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "nft", done.stderr
