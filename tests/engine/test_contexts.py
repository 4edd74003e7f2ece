"""Code contexts through the engine: state, results, and every way a run can end badly."""

import asyncio
import threading

import pytest

import cloche
from cloche import AsyncSandbox

SLOW_SPIN = """
import os, time
while True:
    open("/workspace/spinning", "w").close()
"""
SPIN = "open('/workspace/spinning', 'w').close()\nwhile True: pass"


def refused(action, code):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    assert caught.value.code == code, caught.value


class Running:
    """A run in a thread, because it does not end by itself."""

    def __init__(self, run, *arguments, **options):
        self.result = self.error = None
        self._thread = threading.Thread(target=self._go, args=(run, arguments, options), daemon=True)
        self._thread.start()

    def _go(self, run, arguments, options):
        try:
            self.result = run(*arguments, **options)
        except cloche.ClocheError as problem:
            self.error = problem

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_language_is_refused_and_starts_nothing(sandbox):
    refused(lambda: sandbox.run_code("1", language="cobol"), "language_unknown")
    refused(lambda: sandbox.contexts.create("cobol"), "language_unknown")
    assert sandbox.contexts.list() == []


def test_bad_arguments_have_their_own_codes(sandbox):
    refused(lambda: sandbox.run_code("1", timeout_s=-1), "limit_invalid")
    refused(lambda: sandbox.run_code("1", env={"A=B": "x"}), "environment_invalid")
    refused(lambda: sandbox.contexts.create(cwd="../up"), "path_invalid")
    refused(lambda: sandbox.contexts.create(cwd="/nowhere"), "cwd_not_found")
    refused(lambda: sandbox.run_code("echo \0", language="bash"), "argument_invalid")
    assert [c.language for c in sandbox.contexts.list()] in ([], ["bash"])


def test_a_deleted_context_is_not_found(sandbox):
    context = sandbox.contexts.create()
    context.delete()
    for act in (lambda: context.run("1"), context.interrupt, context.restart, context.delete):
        refused(act, "context_not_found")


# ── state and results ──────────────────────────────────────────────────────────────────────────────


def test_state_is_kept(sandbox):
    first = sandbox.run_code("x = 41")
    assert (first.text, first.error, first.stdout) == (None, None, "")
    assert sandbox.run_code("x + 1").text == "42"
    assert sandbox.run_code("import os; os.getcwd()").text == "'/workspace'"


def test_printed_text_is_apart_from_results(sandbox):
    result = sandbox.run_code("import sys; print('out'); print('err', file=sys.stderr); 'value'")
    assert (result.stdout, result.stderr, result.text) == ("out\n", "err\n", "'value'")


def test_what_children_print_belongs_to_the_run(sandbox):
    assert sandbox.run_code("import os; os.system('echo from a child'); None").stdout == "from a child\n"


def test_the_users_error_is_data(sandbox):
    result = sandbox.run_code("def f():\n    return 1 / 0\nf()")
    assert (result.error.name, result.error.value) == ("ZeroDivisionError", "division by zero")
    assert "in f" in result.error.traceback
    assert result.text is None
    broken = sandbox.run_code("this is no python")
    assert broken.error.name == "SyntaxError"
    assert sandbox.run_code("'still alive'").text == "'still alive'"


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "exit()", "raise KeyboardInterrupt"])
def test_leaving_is_an_error_of_the_run_and_not_the_end(sandbox, code):
    sandbox.run_code("x = 1")
    assert sandbox.run_code(code).error is not None
    assert sandbox.run_code("x").text == "1"


def test_rich_results(sandbox):
    code = "class Table:\n    def _repr_html_(self): return '<b>hi</b>'\nTable()"
    (result,) = sandbox.run_code(code).results
    assert result["text/html"] == "<b>hi</b>"
    assert result["main"] is True


def test_the_environment_of_a_run(sandbox):
    assert sandbox.run_code("import os; os.environ['A']", env={"A": "it's"}).text == '"it\'s"'
    assert sandbox.run_code("echo $A", language="bash", env={"A": "it's"}).stdout == "it's\n"


def test_a_long_text_comes_whole(sandbox):
    assert len(sandbox.run_code("print('x' * 3_000_000)").stdout) == 3_000_001


def test_bash_keeps_its_state(sandbox):
    sandbox.run_code("x=5; cd /tmp; f() { echo f $1; }", language="bash")
    result = sandbox.run_code("f $x; pwd; echo err >&2; (exit 7)", language="bash")
    assert (result.stdout, result.stderr, result.exit_code) == ("f 5\n/tmp\n", "err\n", 7)
    assert result.error is None


def test_contexts_do_not_share_their_state(sandbox):
    one, two = sandbox.contexts.create(), sandbox.contexts.create(cwd="/tmp")
    one.run("x = 1")
    assert two.run("x").error.name == "NameError"
    assert one.run("x").text == "1"
    assert two.run("import os; os.getcwd()").text == "'/tmp'"
    shell = sandbox.contexts.create("bash")
    assert (one.language, shell.language) == ("python", "bash")
    assert {c.id for c in sandbox.contexts.list()} == {one.id, two.id, shell.id}
    one.delete()
    assert {c.id for c in sandbox.contexts.list()} == {two.id, shell.id}


def test_several_contexts_run_at_once(sandbox, until):
    one, two = sandbox.contexts.create(), sandbox.contexts.create()
    wait = "import os, time\nwhile not os.path.exists('/workspace/go'): time.sleep(0.01)\n'done'"
    runs = [Running(one.run, wait)]
    assert two.run("open('/workspace/go', 'w').close(); 'first'").text == "'first'"
    assert runs[0].join().result.text == "'done'"


def test_runs_of_one_context_queue_up(sandbox):
    sandbox.run_code("order = []")
    runs = [Running(sandbox.run_code, f"order.append({i}); len(order)") for i in range(10)]
    lengths = sorted(int(run.join().result.text) for run in runs)
    assert lengths == list(range(1, 11))


# ── endings ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("language", ["python", "bash"])
def test_an_interrupt_ends_the_run_and_keeps_the_state(sandbox, until, language):
    context = sandbox.contexts.create(language)
    context.run("x=7")
    endless = SPIN if language == "python" else "touch /workspace/spinning; sleep 1000"
    run = Running(context.run, endless)
    until(lambda: sandbox.files.exists("spinning"))
    context.interrupt()
    result = run.join().result
    if language == "python":
        assert result.error.name == "KeyboardInterrupt"
        assert context.run("x").text == "7"
    else:
        assert result.exit_code == 130
        assert context.run("echo $x").stdout == "7\n"


def test_an_interrupt_of_nothing_is_harmless(sandbox):
    context = sandbox.contexts.create()
    context.interrupt()
    assert context.run("1").text == "1"


@pytest.mark.parametrize(("language", "endless"), [("python", "while True: pass"), ("bash", "sleep 1000")])
def test_a_time_out_interrupts_and_keeps_the_state(sandbox, language, endless):
    context = sandbox.contexts.create(language)
    context.run("x=7")
    result = context.run(endless, timeout_s=0.3)
    assert result.error.name == "TimeoutError"
    assert "7" in (context.run("print(x)") if language == "python" else context.run("echo $x")).stdout


def test_code_that_is_deaf_to_interrupts_costs_the_context_its_state(sandbox):
    deaf = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nx = 1\nwhile True: time.sleep(1)"
    context = sandbox.contexts.create()
    assert context.run(deaf, timeout_s=0.2).error.name == "TimeoutError"
    assert context.run("x").error.name == "NameError"
    assert context.run("2 + 2").text == "4"


def test_a_restart_forgets(sandbox):
    context = sandbox.contexts.create()
    context.run("x = 1")
    for _ in range(5):
        context.restart()
        assert context.run("x").error.name == "NameError"
        assert context.run("x = 1; x").text == "1"


def test_a_restart_under_a_run_ends_it(sandbox, until):
    context = sandbox.contexts.create()
    run = Running(context.run, SPIN)
    until(lambda: sandbox.files.exists("spinning"))
    context.restart()
    assert run.join().error.code == "context_lost"
    assert context.run("1 + 1").text == "2"


def test_a_crash_of_the_interpreter_is_told_and_mendable(sandbox):
    context = sandbox.contexts.create()
    with pytest.raises(cloche.SandboxLost) as caught:
        context.run("import os, sys; print('last words', file=sys.stderr); sys.stderr.flush(); os.abort()")
    assert caught.value.code == "context_lost"
    assert "last words" in caught.value.message
    refused(lambda: context.run("1"), "context_lost")
    context.restart()
    assert context.run("1").text == "1"


def test_the_default_context_is_made_anew_after_a_crash(sandbox):
    refused(lambda: sandbox.run_code("import os; os._exit(1)"), "context_lost")
    assert sandbox.run_code("1").text == "1"
    refused(lambda: sandbox.run_code("exec false", language="bash"), "context_lost")
    assert sandbox.run_code("echo 1", language="bash").stdout == "1\n"


def test_deleting_a_context_ends_its_run(sandbox, until):
    context = sandbox.contexts.create()
    run = Running(context.run, SPIN)
    until(lambda: sandbox.files.exists("spinning"))
    context.delete()
    assert run.join().error.code == "context_lost"


def test_deleting_the_sandbox_ends_its_runs(sandbox, until):
    run = Running(sandbox.run_code, SPIN)
    until(lambda: sandbox.files.exists("spinning"))
    sandbox.delete()
    assert run.join().error.code in ("context_lost", "sandbox_lost")


def test_a_caller_that_gives_up_interrupts_its_run():
    async def scenario():
        async with AsyncSandbox() as box:
            await box.run_code("x = 1")
            task = asyncio.ensure_future(box.run_code(SLOW_SPIN))
            async for event in box.files.watch():
                if event.path == "spinning":
                    break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await box.run_code("x + 1")).text

    assert asyncio.run(scenario()) == "2"


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(b"\xff\xff\xff\xff", id="a frame of 4 GiB"),
        pytest.param(b"\x00\x00\x00\x05hello", id="a frame that is no JSON"),
        pytest.param(b"\x00\x00\x00\x02[]", id="a frame of another shape"),
    ],
)
def test_a_forged_frame_costs_the_context_only(sandbox, attack):
    code = f"""
import os, stat
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.write(fd, {attack!r})
    except OSError:
        pass
"""
    refused(lambda: sandbox.run_code(code), "context_lost")
    assert sandbox.exec("echo alive").stdout == "alive\n"


def test_a_flood_of_text_does_not_stop_the_engine(sandbox, make_sandbox, until):
    other = make_sandbox()
    flood = "import subprocess; open('/workspace/spinning', 'w').close(); subprocess.run(['yes'])"
    run = Running(sandbox.run_code, flood)
    until(lambda: sandbox.files.exists("spinning"))
    for _ in range(20):
        assert other.exec("echo alive").stdout == "alive\n"
    sandbox.delete()
    run.join()


# ── told as it happens ─────────────────────────────────────────────────────────────────────────────


def test_a_stream_of_code_that_cannot_be_is_refused(sandbox):
    refused(lambda: list(sandbox.run_code_stream("1", language="cobol")), "language_unknown")
    refused(lambda: list(sandbox.run_code_stream("1", timeout_s=-1)), "limit_invalid")
    assert sandbox.contexts.list() == []


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os, sys, time\nprint('one')\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('two', file=sys.stderr)"),
        ("bash", "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two >&2"),
    ],
)  # fmt: skip
def test_code_tells_what_it_prints_while_it_runs(sandbox, language, code):
    told = []
    for event in sandbox.run_code_stream(code, language=language):
        told.append(event)
        if isinstance(event, cloche.CodeOutput) and event.stream == "stdout":
            sandbox.files.write("go", "")  # the code waits for it
    assert told[0] == cloche.CodeBegan(execution_count=1)
    assert told[1:3] == [
        cloche.CodeOutput(stream="stdout", text="one\n"),
        cloche.CodeOutput(stream="stderr", text="two\n"),
    ]
    (ended,) = told[3:]
    assert (ended.result.stdout, ended.result.stderr, ended.result.error) == ("one\n", "two\n", None)


def test_what_was_printed_before_a_display_is_told_before_it(sandbox):
    code = "import os, time\nprint('a')\ndisplay(1)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('b')\n{}['c']"
    told = []
    for event in sandbox.run_code_stream(code):
        told.append(event)
        if isinstance(event, cloche.CodeShown):
            sandbox.files.write(
                "go", ""
            )  # what is printed later might be in the pipe already, and told with it
    assert [type(event).__name__ for event in told] == [
        "CodeBegan", "CodeOutput", "CodeShown", "CodeOutput", "CodeFailed", "CodeEnded",
    ]  # fmt: skip
    assert told[2].result["text/plain"] == "1"
    assert told[4].error.name == "KeyError"
    assert told[5].result.error == told[4].error


def test_a_character_is_never_torn(sandbox):
    code = "import os\nfor b in 'é€'.encode(): os.write(1, bytes([b]))\nos.write(1, b'\\xff\\xe2')"
    told = list(sandbox.run_code_stream(code))
    text = "".join(event.text for event in told if isinstance(event, cloche.CodeOutput))
    assert text == told[-1].result.stdout == "é€\ufffd\ufffd"


def test_leaving_a_stream_interrupts_the_code_and_keeps_the_state(sandbox):
    for event in sandbox.run_code_stream("kept = 3\nprint('on')\nwhile True: pass"):
        if isinstance(event, cloche.CodeOutput):
            break
    assert sandbox.run_code("kept").text == "3"


def test_a_stream_past_its_time_keeps_what_was_printed(sandbox):
    sandbox.run_code("1")
    told = list(sandbox.run_code_stream("print('said')\nwhile True: pass", timeout_s=3))
    assert told[-1].result.error.name == "TimeoutError"
    assert told[-1].result.stdout == "said\n"


def test_a_stream_of_a_context_that_dies_says_so(sandbox):
    told = []
    with pytest.raises(cloche.SandboxLost) as caught:
        told.extend(sandbox.run_code_stream("import os\nprint('last', flush=True)\nos._exit(1)"))
    assert caught.value.code == "context_lost"
    assert sandbox.run_code("2").text == "2"


def test_callbacks_are_told(sandbox):
    out: list[str] = []
    err: list[str] = []
    shown: list[dict] = []
    code = "import sys\nprint('o')\nprint('e', file=sys.stderr)\n5"
    result = sandbox.run_code(code, on_stdout=out.append, on_stderr=err.append, on_result=shown.append)
    assert ("".join(out), "".join(err), [s["text/plain"] for s in shown]) == ("o\n", "e\n", ["5"])
    assert result.text == "5"
    context = sandbox.contexts.create()
    context.run("print(1)", on_stdout=lambda text: out.append(sandbox.files.list("/") and text))
    assert out[-1] == "1\n"


def test_a_callback_that_raises_interrupts_the_code(sandbox):
    def complain(text):
        raise ValueError(text)

    with pytest.raises(ValueError, match="on"):
        sandbox.run_code("kept = 4\nprint('on')\nwhile True: pass", on_stdout=complain)
    assert sandbox.run_code("kept").text == "4"


def test_an_asynchronous_handle_calls_back_in_its_own_loop():
    told = []

    async def main():
        here = asyncio.get_running_loop()

        async def tell(text):
            told.append((asyncio.get_running_loop() is here, text))

        async with AsyncSandbox() as box:
            await box.run_code("print('x')", on_stdout=tell)

    asyncio.run(main())
    assert told == [(True, "x\n")]
