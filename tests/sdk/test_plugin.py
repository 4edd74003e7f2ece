"""The fixtures that users get, in a pytest of their own."""

import os
import subprocess
import sys

TESTS = """
import cloche
import pytest

made = []

def test_a_sandbox(sandbox):
    made.append(sandbox)
    assert sandbox.exec("echo hi").stdout == "hi\\n"

def test_it_was_deleted():
    with pytest.raises(cloche.SandboxLost):
        made[0].info()

def test_several(make_sandbox):
    one, two = make_sandbox(memory_mib=64), make_sandbox(name="two")
    assert one.info().limits["memory_mib"].value == 64
    assert two.info().name == "two"
    one.delete()

class TestOptions:
    @pytest.fixture
    def sandbox_options(self):
        return {"profile": "restrictive"}

    def test_profile(self, sandbox):
        assert sandbox.info().profile == "restrictive"
"""


def test_the_fixtures(tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for arguments in ([], ["-p", "xdist", "-n", "2", "--dist", "loadfile"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "cloche.testing.plugin", "-W", "error", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert "4 passed" in done.stdout
