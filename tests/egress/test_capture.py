"""What is made in a namespace: the text, the routes, the sockets; and that it stays there."""

import os
import socket
import subprocess

import pytest

from cloche.egress import capture
from tests.egress import room

nft = capture.find_nft()
needs_nft = pytest.mark.skipif(nft is None, reason="nft is not installed")


def own_rules() -> str:
    assert nft is not None
    return subprocess.run([nft, "list", "ruleset"], capture_output=True, text=True, check=False).stdout


def test_a_failing_nft_says_why() -> None:
    with pytest.raises(capture.CaptureError) as caught:
        capture.apply_nft("/bin/false", capture.ruleset())
    assert caught.value.step == "nftables"
    with pytest.raises(capture.CaptureError) as caught:
        capture.apply_nft("/nonexistent/nft", capture.ruleset())
    assert isinstance(caught.value.__cause__, FileNotFoundError)


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
        assert "redirect to :15001" in listed.out, listed.err
    finally:
        inside.close()


def test_without_nft_it_says_what_is_missing() -> None:
    inside = room.Inside("user", "routes")
    try:
        assert inside.how == "routes"
        assert "nft is not installed" in inside.note
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
