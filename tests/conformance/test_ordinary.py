"""Network, snapshots, volumes and ports for a user without privilege, from the installed package."""

import json
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).with_name("ordinary.py")


def test_an_ordinary_user_has_a_network_snapshots_volumes_and_ports(package):
    ran = subprocess.run(
        package.as_user(package.python, "-I", "-c", PROGRAM.read_text()),
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    denied, allowed, before, after = found["network"]
    assert denied.startswith("a.test:")
    assert (allowed, before, after) == ("hi", "", "hi")
    assert found["snapshots"] == ["one", "two"]
    kept, refused = found["volumes"]
    assert kept == "stays\n"
    assert "Read-only file system" in refused
    assert found["ports"] == ["port_closed", "HTTP/1.0 200"]
