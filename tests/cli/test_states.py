"""`snapshot`, `restore`, `fork`, `volume`, `suspend --mode`, on a keeper."""

import json
import os

import pytest


@pytest.fixture
def one(kept):
    """A keeper with a sandbox named `one`."""
    text(kept("create", "--name", "one"))
    return kept


def text(result):
    assert (result.returncode, result.stderr) == (0, b""), result.stderr
    return result.stdout.decode()


def data(result):
    return json.loads(text(result))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["snapshot", "fly"], "invalid choice: 'fly'"),
        (["snapshot", "create"], "takes one name"),
        (["snapshot", "list", "x"], "takes no name"),
        (["snapshot", "diff", "x"], "takes two names"),
        (["snapshot", "list", "--name", "x"], "--name is for `cloche snapshot create`"),
        (["restore", "one"], "the following arguments are required: SNAPSHOT"),
        (["fork", "one", "--count", "many"], "--count is 'many'"),
        (["volume", "create"], "takes one name"),
        (["volume", "create", "v", "--size", "big"], "--size is 'big'"),
        (["volume", "create", "v", "--label", "x"], "the label 'x' is not K=V"),
        (["volume", "list", "--size", "1"], "--size is for `cloche volume create`"),
        (["create", "--pause-after", "0"], "--pause-after is '0'"),
        (["run", "--volume", "v", "--", "true"], "--volume is 'v'"),
        (["run", "--volume", "v:data", "--", "true"], "--volume is 'v:data'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused_with_words(kept, words, message):
    result = kept(*words)
    assert (result.returncode, result.stdout) == (125, b"")
    assert message in result.stderr.decode()


def test_what_is_not_there(one):
    for words in (["restore", "one", "no"], ["snapshot", "info", "no"], ["snapshot", "delete", "no"]):
        assert b"there is no snapshot 'no'" in one(*words).stderr
    assert b"there is no volume 'no'" in one("volume", "info", "no").stderr
    assert b"there is no volume 'no'" in one("run", "--volume", "no:/data", "--", "true").stderr
    assert b"cannot keep a sandbox's memory on disk" in one("suspend", "one", "--mode", "hibernate").stderr
    assert b"no snapshots" in one("snapshot", "list").stderr
    assert b"no volumes" in one("volume", "list").stderr


def test_snapshots(one):
    text(one("exec", "one", "--", "sh", "-c", "echo 1 > a"))
    first = text(one("snapshot", "create", "one", "--name", "first", "--tag", "x")).strip()
    text(one("exec", "one", "--", "sh", "-c", "echo 2 > a; echo b > b"))
    second = data(one("snapshot", "create", "one", "--json"))
    assert second["name"] is None
    assert [s["id"] for s in data(one("snapshot", "list", "--json"))] == [first, second["id"]]
    assert [s["id"] for s in data(one("snapshot", "list", "--tag", "x", "--json"))] == [first]
    assert "first" in text(one("snapshot", "list"))
    assert first in text(one("snapshot", "info", "first"))
    assert text(one("snapshot", "diff", "first", second["id"])) == (
        "modified /workspace/a\nadded    /workspace/b\n"
    )
    assert text(one("restore", "one", "first")) == "running\n"
    assert text(one("exec", "one", "--", "cat", "a")) == "1\n"
    assert text(one("run", "--snapshot", second["id"], "--", "cat", "a", "b")) == "2\nb\n"
    forks = text(one("fork", "one", "--count", "2")).split()
    assert [text(one("exec", fork, "--", "cat", "a")) for fork in forks] == ["1\n", "1\n"]
    text(one("delete", *forks))
    text(one("snapshot", "delete", "first", second["id"]))
    assert data(one("snapshot", "list", "--json")) == []


def test_volumes(one):
    assert text(one("volume", "create", "v", "--size", "16", "--label", "k=v")) == "v\n"
    text(one("run", "--volume", "v:/data", "--", "sh", "-c", "echo kept > /data/a"))
    assert text(one("run", "--volume", "v:/data:ro", "--", "cat", "/data/a")) == "kept\n"
    assert one("run", "--volume", "v:/data:ro", "--", "touch", "/data/b").returncode == 1
    info = data(one("volume", "info", "v", "--json"))
    assert (info["spec"]["size_mib"], info["spec"]["labels"], info["attached"]) == (16, {"k": "v"}, {})
    assert "16 MiB" in text(one("volume", "info", "v"))
    assert "v" in text(one("volume", "list"))
    text(one("volume", "delete", "v"))
    assert data(one("volume", "list", "--json")) == []


def test_an_archived_sandbox_outlives_its_keeper(one, until):
    text(one("exec", "one", "--", "sh", "-c", "echo kept > a"))
    assert text(one("suspend", "one", "--mode", "archive")) == "archived\n"
    assert data(one("info", "one", "--json"))["phase"] == "archived"
    assert one("gc", "--restart").returncode == 0
    until(lambda: data(one("list", "--json")))  # the keeper that had it takes a moment to leave
    [found] = data(one("list", "--json"))
    assert (found["name"], found["phase"]) == ("one", "archived")
    assert text(one("exec", "one", "--", "cat", "a")) == "kept\n"
    assert data(one("info", "one", "--json"))["phase"] == "running"
    assert os.listdir(f"{one.environment['CLOCHE_HOME']}/sandboxes") == []
