"""Inside a container: the right rung is taken, or none with the reason, and the doctor names the very cause."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import AS_USER, Package

HERE = Path(__file__).parent


def look(package: Package, *options: str, user: bool = True) -> dict[str, Any]:
    """What `look.py` finds in a container, as an ordinary user or as root in it."""
    files = {name: (HERE / name).read_text() for name in ("container.py", "look.py")}
    inside = [*(AS_USER if user else ()), *package.command(package.python, "-c", files["look.py"])]
    command = package.command(package.python, "-c", files["container.py"], *options, "--", *inside)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(found: dict[str, Any]) -> str:
    assert found["rungs"]["namespaces"]["refused"] == "isolation_too_low"
    return str(found["rungs"]["namespaces"]["because"])


def test_on_the_bare_host_namespaces_are_taken(package: Package) -> None:
    command = package.as_user(package.python, "-c", (HERE / "look.py").read_text())
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["rungs"]["namespaces"] == {"driver": "namespaces", "said": "works\n"}
    assert found["facts"]["user_namespaces"]["state"] == "ok"


def test_a_masked_proc_leaves_the_process_rung_to_an_ordinary_user(package: Package) -> None:
    found = look(package)
    assert "mount" in refusal(found)
    assert found["rungs"]["process"] == {"driver": "process", "said": "works\n"}
    fact = found["facts"]["proc_mount"]
    assert fact["state"] == "missing"
    assert "masked" in fact["cause"]
    assert "systempaths=unconfined" in fact["fix"]


@pytest.mark.parametrize("user", [False, True], ids=["root", "user"])
def test_a_filter_that_refuses_mount_is_named(package: Package, user: bool) -> None:
    found = look(package, "--refuse", "mount", user=user)
    assert "mount" in refusal(found)
    assert found["rungs"]["process"] == {"driver": "process", "said": "works\n"}
    fact = found["facts"]["user_namespaces"]
    assert (fact["state"], fact["cause"]) == (
        "missing",
        "a seccomp filter around this process refuses mount: it runs in a container",
    )
    assert "seccomp=unconfined" in fact["fix"]


@pytest.mark.parametrize("user", [False, True], ids=["root", "user"])
def test_a_filter_that_refuses_unshare_is_named(package: Package, user: bool) -> None:
    found = look(package, "--refuse", "unshare", user=user)
    assert "unshare" in refusal(found)
    assert found["rungs"]["process"] == {"driver": "process", "said": "works\n"}
    fact = found["facts"]["user_namespaces"]
    assert (fact["state"], fact["cause"]) == (
        "missing",
        "a seccomp filter around this process refuses unshare: it runs in a container",
    )
    assert "seccomp=unconfined" in fact["fix"]
