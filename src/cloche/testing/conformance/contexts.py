"""Behaviours of code contexts: interpreters that remember, and give back more than text."""

from __future__ import annotations

import asyncio

from cloche import errors, model
from cloche.testing.conformance.bench import Bench, Box
from cloche.testing.conformance.registry import behaviour, expect, holds, lacks, refused, same


async def _run(bench: Bench, box: Box, code: str, **options: object) -> model.CodeResult:
    return await bench.engine.run_code(box.id, code, **options)  # type: ignore[arg-type]


@behaviour("contexts")
async def a_context_keeps_its_state(bench: Bench) -> None:
    """Names, imports and functions of one run are there in the next."""
    box = await bench.box()
    await _run(bench, box, "import math\nx = 41\ndef plus(n): return n + 1")
    same((await _run(bench, box, "plus(x) + math.floor(0.5)")).text, "42")


@behaviour("contexts")
async def a_context_returns_the_last_expression(bench: Bench) -> None:
    """The value of the last expression is the result; a statement has none."""
    box = await bench.box()
    same((await _run(bench, box, "a = [1, 2]\na + [3]")).text, "[1, 2, 3]")
    same((await _run(bench, box, "a = 5")).text, None)


@behaviour("contexts")
async def a_context_keeps_its_streams_apart(bench: Bench) -> None:
    """What code prints is in stdout or stderr of its own run, all of it."""
    box = await bench.box()
    code = "import sys, os\nprint('out')\nprint('err', file=sys.stderr)\nos.system('echo child')"
    result = await _run(bench, box, code)
    same((result.stdout, result.stderr), ("out\nchild\n", "err\n"))
    same((await _run(bench, box, "print('next')")).stdout, "next\n")


@behaviour("contexts")
async def a_context_gives_rich_results(bench: Bench) -> None:
    """A value that can show itself as HTML or Markdown comes with every form that it has."""
    box = await bench.box()
    code = (
        "class Rich:\n def __repr__(self): return 'plain'\n def _repr_html_(self): return '<b>rich</b>'\n"
        " def _repr_markdown_(self): return '**rich**'\nRich()"
    )
    result = (await _run(bench, box, code)).results[-1]
    same(
        (result.get("text/plain"), result.get("text/html"), result.get("text/markdown")),
        ("plain", "<b>rich</b>", "**rich**"),
    )


@behaviour("contexts")
async def an_error_in_code_is_data(bench: Bench) -> None:
    """The user's exception is in the result, with its name, value and traceback; the context lives on."""
    box = await bench.box()
    result = await _run(bench, box, "kept = 1\ndef f():\n    raise ValueError('wrong')\nf()")
    expect(result.error is not None, "there is no error in the result")
    error = result.error or model.CodeError(name="", value="", traceback="")
    same((error.name, error.value), ("ValueError", "wrong"))
    holds(error.traceback, "in f")
    same((await _run(bench, box, "kept")).text, "1")


@behaviour("contexts")
async def a_syntax_error_is_data(bench: Bench) -> None:
    """Code that cannot be compiled is told as an error of the run, and nothing of it ran."""
    box = await bench.box()
    result = await _run(bench, box, "ran = 1\nif True print(1)")
    same(result.error.name if result.error else None, "SyntaxError")
    same((await _run(bench, box, "'ran' in globals()")).text, "False")


@behaviour("contexts")
async def a_context_can_be_interrupted(bench: Bench) -> None:
    """An interrupt stops the run as KeyboardInterrupt and keeps the state."""
    box = await bench.box()
    context = await bench.engine.create_context(box.id)
    await bench.engine.run_code(box.id, "kept = 7", context=context.id)
    task = asyncio.ensure_future(
        bench.engine.run_code(box.id, "open('begun', 'w').close()\nwhile True: pass", context=context.id)
    )
    await box.out("while [ ! -e begun ]; do sleep 0.01; done")
    await bench.engine.interrupt_context(box.id, context.id)
    result = await task
    same(result.error.name if result.error else None, "KeyboardInterrupt")
    same((await bench.engine.run_code(box.id, "kept", context=context.id)).text, "7")


@behaviour("contexts")
async def a_run_past_its_time_is_stopped(bench: Bench) -> None:
    """timeout_s of a run ends it as TimeoutError; the sandbox and the next run are fine."""
    box = await bench.box()
    await _run(bench, box, "1")  # the interpreter's own start is not the run's time
    result = await _run(bench, box, "while True: pass", timeout_s=0.2)
    same(result.error.name if result.error else None, "TimeoutError")
    same((await _run(bench, box, "6 * 7")).text, "42")


@behaviour("contexts")
async def a_restarted_context_has_forgotten(bench: Bench) -> None:
    """After a restart the context answers under its id, with nothing in it."""
    box = await bench.box()
    context = await bench.engine.create_context(box.id)
    await bench.engine.run_code(box.id, "gone = 1", context=context.id)
    await bench.engine.restart_context(box.id, context.id)
    same((await bench.engine.run_code(box.id, "'gone' in globals()", context=context.id)).text, "False")


@behaviour("contexts")
async def contexts_do_not_share_their_state(bench: Bench) -> None:
    """Two contexts of a sandbox are two interpreters."""
    box = await bench.box()
    one, two = await bench.engine.create_context(box.id), await bench.engine.create_context(box.id)
    await bench.engine.run_code(box.id, "x = 'one'", context=one.id)
    same((await bench.engine.run_code(box.id, "'x' in globals()", context=two.id)).text, "False")
    expect(one.pid != two.pid, "both contexts are one process")
    same({c.id for c in await bench.engine.contexts(box.id)}, {one.id, two.id})


@behaviour("contexts")
async def a_deleted_context_is_gone(bench: Bench) -> None:
    """A deleted context is not found any more, and its process ends."""
    box = await bench.box()
    context = await bench.engine.create_context(box.id)
    await bench.engine.run_code(
        box.id, "import fcntl; f = open('lock', 'w'); fcntl.flock(f, 2)", context=context.id
    )
    await bench.engine.delete_context(box.id, context.id)
    same(await box.out("flock --timeout 5 lock echo free"), "free\n")
    with refused("context_not_found"):
        await bench.engine.run_code(box.id, "1", context=context.id)


@behaviour("contexts")
async def a_context_that_dies_says_so(bench: Bench) -> None:
    """Code that ends its interpreter gives context_lost, and the next run gets a fresh one."""
    box = await bench.box()
    with refused("context_lost"):
        await _run(bench, box, "import os; os._exit(3)")
    same((await _run(bench, box, "1 + 1")).text, "2")


@behaviour("contexts")
async def a_context_works_where_files_are(bench: Bench) -> None:
    """Code and files share the working directory."""
    box = await bench.box()
    await box.write("data.txt", "from a file")
    same((await _run(bench, box, "open('data.txt').read()")).text, "'from a file'")
    await _run(bench, box, "with open('made.txt', 'w') as f: f.write('by code')")
    same(await box.read("made.txt"), b"by code")


@behaviour("contexts")
async def a_context_has_the_sandboxs_environment(bench: Bench) -> None:
    """Code sees the sandbox's variables and those of its run, and none of the caller's."""
    box = await bench.box(env={"BOX": "1"})
    code = "import os; (os.environ.get('BOX'), os.environ.get('RUN'), str(dict(os.environ)))"
    text = (await _run(bench, box, code, env={"RUN": "2"})).text or ""
    holds(text, "('1', '2', ")
    lacks(text, bench.secret, "the caller's environment leaked")


@behaviour("contexts")
async def a_context_holds_nothing_but_its_own_descriptors(bench: Bench) -> None:
    """No descriptor of the engine is open in the interpreter but the pipes and the socket it was given."""
    box = await bench.box()
    code = (
        "import os\nfound = []\nfor n in os.listdir('/proc/self/fd'):\n    try: found.append(os.readlink('/proc/self/fd/' + n))\n"
        "    except OSError: pass\nsorted(f for f in found if not f.startswith(('pipe:', 'socket:', '/dev/', '/proc/', '/memfd:')))"
    )
    same((await _run(bench, box, code)).text, "[]")


@behaviour("contexts")
async def a_bash_context_keeps_its_state(bench: Bench) -> None:
    """Variables, functions and the working directory of bash last from run to run."""
    box = await bench.box()
    await _run(bench, box, "x=41; mkdir -p sub; cd sub; f() { echo $((x + 1)); }", language="bash")
    result = await _run(bench, box, "f; basename $PWD", language="bash")
    same((result.stdout, result.exit_code), ("42\nsub\n", 0))


@behaviour("contexts")
async def a_bash_context_tells_the_exit_code(bench: Bench) -> None:
    """Each run of bash has the exit code of its last command, and its streams apart."""
    box = await bench.box()
    result = await _run(bench, box, "echo out; echo err >&2; (exit 9)", language="bash")
    same((result.exit_code, result.stdout, result.stderr), (9, "out\n", "err\n"))
    same((await _run(bench, box, "true", language="bash")).exit_code, 0)


@behaviour("contexts")
async def a_context_ends_with_its_sandbox(bench: Bench) -> None:
    """A run under way when the sandbox goes raises; it does not wait for ever."""
    box = await bench.box()
    task = asyncio.ensure_future(_run(bench, box, "open('begun', 'w').close()\nwhile True: pass"))
    await box.out("while [ ! -e begun ]; do sleep 0.01; done")
    await bench.engine.delete(box.id)
    try:
        await task
    except errors.SandboxError:
        return
    expect(False, "the run came back with a result")
