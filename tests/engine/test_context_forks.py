"""Copies of a live context: what is refused leaves it as it was; each copy has its memory, its streams and its own end."""

import time

import pytest

import cloche


def code_of(action):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    return caught.value.code


@pytest.fixture
def context(sandbox):
    return sandbox.contexts.create()


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_number_that_is_none(context, count):
    assert code_of(lambda: context.fork(count)) == "limit_invalid"


def test_threads(sandbox, context):
    context.run(
        "x = 1; import threading; gate = threading.Event(); t = threading.Thread(target=gate.wait); t.start()"
    )
    before = len(sandbox.contexts.list())
    assert code_of(lambda: context.fork(3)) == "context_has_threads"
    assert len(sandbox.contexts.list()) == before
    assert context.run("x").text == "1"
    context.run("gate.set(); t.join()")
    assert [copy.run("x").text for copy in context.fork(2)] == ["1", "1"]


def test_bash_cannot(sandbox):
    shell = sandbox.contexts.create("bash")
    assert code_of(shell.fork) == "argument_invalid"
    assert shell.run("echo alive").stdout == "alive\n"


def test_a_context_that_is_not_there(sandbox, context):
    context.delete()
    assert code_of(context.fork) == "context_not_found"


def test_more_than_the_sandbox_may_have(make_sandbox):
    box = make_sandbox(pids=20)
    context = box.contexts.create()
    context.run("x = 1")
    assert code_of(lambda: context.fork(60)) == "capacity_exceeded"
    assert context.run("x").text == "1"
    assert len(box.contexts.list()) == 1
    _until(lambda: box.exec("ls -d /proc/[0-9]* | wc -l").ok)
    assert [copy.run("x").text for copy in context.fork(3)] == ["1"] * 3


# ── copies ─────────────────────────────────────────────────────────────────────────────────────────


def test_each_has_the_memory_and_changes_its_own(sandbox, context):
    context.run("import json, sys; data = {'n': [1, 2, 3]}\ndef double(x): return 2 * x")
    copies = context.fork(5)
    assert len({copy.id for copy in copies} | {context.id}) == 6
    for number, copy in enumerate(copies):
        assert copy.run(f"data['n'].append({number}); double(sum(data['n']))").text == str(2 * (6 + number))
    assert context.run("data['n']").text == "[1, 2, 3]"
    assert {info.id for info in sandbox.contexts.list()} >= {copy.id for copy in copies}


def test_each_has_its_streams_and_its_errors(context):
    left, right = context.fork(2)
    said = left.run("import sys; print('out'); print('err', file=sys.stderr); 1/0")
    assert (said.stdout, said.stderr, said.error.name) == ("out\n", "err\n", "ZeroDivisionError")
    assert right.run("print('mine')").stdout == "mine\n"
    assert context.run("print('first')").stdout == "first\n"


def test_each_is_interrupted_and_ends_alone(sandbox, context):
    left, right = context.fork(2)
    said = left.run("import time; time.sleep(100)", timeout_s=0.5)
    assert said.error.name == "TimeoutError"
    assert left.run("1 + 1").text == "2"
    pid = left.run("import os; os.getpid()").text
    left.delete()
    assert code_of(lambda: left.run("1")) == "context_not_found"
    _until(lambda: not sandbox.exec(f"test -d /proc/{pid}").ok)
    assert right.run("1 + 1").text == "2"
    context.delete()
    assert right.run("1 + 2").text == "3"


def test_a_copy_that_dies_is_lost_alone(context):
    left, right = context.fork(2)
    assert code_of(lambda: left.run("import os; os._exit(3)")) == "context_lost"
    assert right.run("1 + 1").text == "2"


def test_copies_of_copies(context):
    context.run("x = 0")
    [child] = context.fork()
    child.run("x += 1")
    grandchildren = child.fork(2)
    assert [made.run("x += 1; x").text for made in grandchildren] == ["2", "2"]
    assert (context.run("x").text, child.run("x").text) == ("0", "1")


def test_the_code_does_not_meet_them_as_children(context):
    context.fork(3)
    said = context.run("import os\ntry: os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError: print('none')")
    assert said.stdout == "none\n"


def test_a_loop_stays_with_the_original(context):
    context.run("import asyncio; await asyncio.sleep(0)")
    [copy] = context.fork()
    code = "await asyncio.sleep(0.01); (await asyncio.create_subprocess_exec('true')).pid > 0"
    for made in (copy, context, copy):
        assert made.run(code).text == "True"


def test_they_end_with_the_sandbox(make_sandbox):
    box = make_sandbox()
    copies = box.contexts.create().fork(3)
    box.delete()
    for copy in copies:
        assert code_of(lambda copy=copy: copy.run("1")) == "sandbox_lost"


def _until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
