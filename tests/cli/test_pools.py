"""`template`, `pool` and `claim` on a keeper: refusals first, then the way through, then a restart."""

import json
import os
import re
import shlex
import signal
import subprocess

import pytest

from tests.cli import test_docs

TEMPLATE = b"name: data\nenv: {GREETING: hello}\nstartup:\n- run: echo made > /tmp/state\n"


def text(result):
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


def data(result):
    return json.loads(text(result))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["template", "create"], "needs a name"),
        (["template", "list", "x"], "takes no name"),
        (["template", "create", "/nowhere.yaml"], "/nowhere.yaml"),
        (["template", "info", "nowhere"], "there is no template 'nowhere'"),
        (["template", "delete", "base"], "built in"),
        (["pool", "create", "nowhere"], "there is no template 'nowhere'"),
        (["pool", "create", "base", "--size", "-1"], "size is -1"),
        (["pool", "create", "base", "--size", "1.5"], "it is a whole number"),
        (["pool", "create", "base", "--min", "4", "--max", "2"], "max is 2"),
        (["pool", "create", "base", "--preset", "claude"], "did you mean 'claude-code'?"),
        (["pool", "info", "nowhere"], "there is no pool 'nowhere'"),
        (["pool", "scale", "nowhere", "3"], "there is no pool 'nowhere'"),
        (["pool", "scale", "base"], "to what size?"),
        (["claim"], "claim what?"),
        (["claim", "base", "--list"], "claim what?"),
        (["claim", "nowhere"], "neither a pool nor a template 'nowhere'"),
        (["claim", "base", "--label", "x"], "not of the form K=V"),
        (["claim", "base", "--env", "NOT_SET_AT_ALL"], "you have no variable NOT_SET_AT_ALL"),
        (["claim", "base", "--file", "a=/nowhere"], "/nowhere"),
        (["claim", "base", "--memory", "1"], "memory_mib is 1"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_made(kept, words, message):
    result = kept(*words)
    assert result.returncode == 125
    assert message in result.stderr.decode()
    assert data(kept("list", "--json")) == []
    assert data(kept("pool", "list", "--json")) == []


def test_a_pool_from_a_template_and_a_claim_from_the_pool(kept, tmp_path):
    assert text(kept("template", "create", "-", stdin=TEMPLATE)).startswith("data ")
    assert "data" in text(kept("template", "list"))
    assert data(kept("template", "info", "data", "--json"))["spec"]["env"] == {"GREETING": "hello"}
    assert text(kept("pool", "create", "data", "--size", "2", "--wait", "40")) == "data\n"
    (tmp_path / "notes").write_bytes(b"\xffnotes")
    claimed = kept(
        "claim", "data", "--name", "mine", "--env", "A=1", "--file", f"in/notes={tmp_path}/notes", "--label", "k=v",
        "--memory", "128", "--timeout", "99", "--json",
    )  # fmt: skip
    claim = data(claimed)
    assert claim["warm"], claim["cold_reason"]
    box = claim["sandbox"]
    assert box in text(kept("claim", "--list"))
    said = text(kept("exec", box, "--", "sh", "-c", "echo $A $GREETING; cat /tmp/state; wc -c < in/notes"))
    assert said == "1 hello\nmade\n6\n"
    info = data(kept("info", box, "--json"))
    assert (info["labels"], info["limits"]["memory_mib"]["value"]) == ({"k": "v"}, 128)
    pool = data(kept("pool", "info", "data", "--json"))
    assert (pool["hits"], pool["misses"]) == (1, 0)
    assert "1, 1 warm" in text(kept("pool", "info", "data"))
    conflict = kept("claim", "data", "--name", "mine")
    assert conflict.returncode == 125
    assert b"name_conflict" in kept("claim", "data", "--name", "mine", "--json").stdout + conflict.stderr
    refused = kept("template", "delete", "data")
    assert b"used by the pool 'data'" in refused.stderr
    assert text(kept("pool", "scale", "data", "0")) == "data\n"
    assert text(kept("delete", box)) == ""
    cold = kept("claim", "data")
    assert b"started cold" in cold.stderr
    text(kept("delete", "--all"))
    text(kept("pool", "delete", "data"))
    text(kept("template", "delete", "data"))


def test_a_pool_stays_when_the_keeper_does_not(kept):
    text(kept("template", "create", "-", stdin=TEMPLATE))
    text(kept("pool", "create", "data", "--size", "1", "--wait", "40"))
    claim = data(kept("claim", "data", "--name", "mine", "--json"))
    assert kept.keeper is not None
    os.kill(kept.keeper.pid, signal.SIGKILL)
    kept.keeper.wait()
    kept.start_keeper()
    (pool,) = data(kept("pool", "list", "--json"))
    assert (pool["name"], pool["spec"]["size"]) == ("data", 1)
    lost = kept("exec", claim["sandbox"], "--", "true")
    assert lost.returncode == 125
    again = data(kept("claim", "data", "--name", "mine", "--wait", "40", "--json"))
    assert again["sandbox"] != claim["sandbox"]


@pytest.mark.parametrize("page", ["guides/pools.md", "guides/benchmarking.md"])
def test_the_commands_of_a_guide_print_what_it_says(kept, page, tmp_path):
    wrapper = tmp_path / "bin/cloche"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(kept.argv())} "$@"\n')
    wrapper.chmod(0o755)
    environment = {**kept.environment, "PATH": f"{wrapper.parent}:{kept.environment['PATH']}"}
    tried = 0
    for line, shown in test_docs.sessions((test_docs.DOCS / page).read_text()):
        ran = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=55
        )
        pattern = re.escape(shown.strip()).replace(re.escape("..."), ".*")
        said = (ran.stdout + ran.stderr).strip()
        assert re.fullmatch(pattern, said, re.DOTALL), (line, said)
        tried += 1
    assert tried
