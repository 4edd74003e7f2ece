"""One loop for everybody: threads, notebooks, several loops, forks, interrupts, and the end of the process."""

import asyncio
import gc
import signal
import threading

import pytest

import cloche
from cloche import errors
from cloche.sdk import portal
from cloche.sdk.sandboxes import run as run_async

# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_a_forked_child_may_not_use_its_parents_sandboxes(python):
    said = python("""
        import os, warnings, cloche
        warnings.simplefilter("ignore", DeprecationWarning)
        with cloche.Sandbox() as box:
            stream = box.exec_stream("echo 1; cat")
            next(stream)
            if os.fork() == 0:
                for use in (box.info, lambda: box.exec("true"), box.delete, lambda: next(stream), box.files.list):
                    try:
                        use()
                    except cloche.Conflict as problem:
                        print(problem.code, "spawn" in problem.hint, flush=True)
                os._exit(0)
            os.wait()
            print(box.exec("echo parent").stdout, end="")
    """).stdout
    assert said == "used_after_fork True\n" * 5 + "parent\n"


def test_a_callback_may_not_block_the_loop_it_runs_in(sandbox):
    async def callback():
        return sandbox.info()

    with pytest.raises(RuntimeError, match="blocking"):
        portal.run(callback())


def test_after_the_end_handles_say_so(python):
    said = python("""
        import cloche
        from cloche.sdk import portal
        box = cloche.Sandbox()
        events = box.exec_stream("echo 1; cat")
        next(events)
        portal.close()
        portal.close()
        try:
            box.info()
        except cloche.ServerUnavailable as problem:
            print(problem.code)
        del events
        with cloche.Sandbox() as again:
            print(again.exec("echo anew").stdout, end="")
    """).stdout
    assert said == "server_unavailable\nanew\n"


# ── everybody else ─────────────────────────────────────────────────────────────────────────────────


def test_a_fork_waits_for_what_our_threads_import(python):
    """The engine sweeps after its first sandbox, and imports for it: a module's lock that was held at the fork is held for ever in
    the child."""
    said = python("""
        import os, sys, threading, time, warnings, cloche
        warnings.simplefilter("ignore", DeprecationWarning)
        begun = threading.Event()
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name in ("sqlite3", "cloche.engine.snapshots") and threading.current_thread() is not threading.main_thread():
                    begun.set()
                    time.sleep(0.5)
        sys.meta_path.insert(0, Slow())
        parent = cloche.Sandbox()
        begun.wait(20)
        if os.fork() == 0:
            import cloche.engine.snapshots, sqlite3
            print("imported", flush=True)
            os._exit(0)
        os.wait()
        print(parent.exec("echo parent").stdout, end="")
    """).stdout
    assert said == "imported\nparent\n"


def test_forks_of_several_threads_and_of_ours(python):
    said = python("""
        import asyncio, os, threading, warnings, cloche
        from cloche.sdk import portal
        warnings.simplefilter("ignore", DeprecationWarning)
        def fork():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        box = cloche.Sandbox()
        threads = [threading.Thread(target=fork) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        async def from_a_worker():
            await asyncio.get_running_loop().run_in_executor(None, fork)
        async def from_the_loop():
            fork()
        portal.run(from_a_worker())
        portal.run(from_the_loop())
        print(box.exec("echo parent").stdout, end="")
    """).stdout
    assert said == "parent\n"


def test_a_forked_child_makes_its_own(python):
    said = python("""
        import os, warnings, cloche
        warnings.simplefilter("ignore", DeprecationWarning)
        parent = cloche.Sandbox()
        if os.fork() == 0:
            with cloche.Sandbox() as box:
                print(box.exec("echo child").stdout, end="", flush=True)
            os._exit(0)
        os.wait()
        print(parent.exec("echo parent").stdout, end="")
    """).stdout
    assert said == "child\nparent\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(tmp_path, python, method):
    program = tmp_path / "pools.py"
    program.write_text(
        "import multiprocessing, sys, warnings, cloche\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "def work(number):\n"
        "    return cloche.run(['echo', str(number)]).stdout\n"
        "if __name__ == '__main__':\n"
        "    cloche.run('true')\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:\n"
        "        print(pool.map(work, range(6)))\n"
        "        pool.close()\n"
        "        pool.join()\n"
    )
    said = python("import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
                  if method == "fork" else f"import subprocess, sys; subprocess.run([sys.executable, {str(program)!r}, {method!r}], check=True)",
                  str(program), method)  # fmt: skip
    assert said.stdout == "['0\\n', '1\\n', '2\\n', '3\\n', '4\\n', '5\\n']\n"


def test_errors_cross_process_pools(python):
    said = python("""
        import pickle, cloche
        with cloche.Sandbox() as box:
            try:
                box.exec("exit 3", check=True)
            except cloche.CommandFailed as problem:
                copy = pickle.loads(pickle.dumps(problem))
                print(copy.code, copy.result.exit_code, copy.hint)
    """).stdout
    assert said == "command_failed 3 None\n"


def test_threads_share_one_engine(sandbox):
    outputs, threads = {}, []

    def work(number):
        with cloche.Sandbox() as own:
            outputs[number] = [
                sandbox.exec(["echo", str(number)]).stdout,
                own.exec(["echo", str(number)]).stdout,
            ]

    for number in range(8):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert outputs == {number: [f"{number}\n"] * 2 for number in range(8)}


def test_first_callers_that_come_together_share_one_engine(python):
    said = python("""
        import threading, cloche
        from cloche.sdk import portal
        boxes = []
        threads = [threading.Thread(target=lambda: boxes.append(cloche.Sandbox())) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(boxes), len(cloche.Sandbox.list()), len(portal.get().backends))
    """).stdout
    assert said == "6 6 1\n"


def test_it_works_inside_a_running_loop():
    async def notebook():
        with cloche.Sandbox() as box:
            assert [e.data for e in box.exec_stream("echo streamed") if isinstance(e, cloche.Output)] == [
                b"streamed\n"
            ]
            return box.exec("echo cell").stdout

    assert asyncio.run(notebook()) == "cell\n"


def test_one_sandbox_serves_several_loops():
    async def make():
        return await cloche.AsyncSandbox.create()

    async def use(box):
        seen = [e.data async for e in box.exec_stream("echo x") if isinstance(e, cloche.Output)]
        return seen, (await box.exec("echo y")).stdout

    box = asyncio.run(make())
    assert asyncio.run(use(box)) == asyncio.run(use(box)) == ([b"x\n"], "y\n")
    asyncio.run(box.delete())


def test_asynchronous_handles():
    async def scenario():
        async with cloche.AsyncSandbox(env={"A": "1"}) as box:
            first, second = await asyncio.gather(box.exec("echo $A"), box.run_code("6 * 7"))
            await box.files.write("a", "x" * 10)
            pieces = [piece async for piece in await box.files.read("a", format="stream")]
            process = await box.start("cat")
            await process.write("hello")
            await process.close_stdin()
            found = await (await cloche.AsyncSandbox.get(box.id)).info()
            assert found.id in [info.id for info in await cloche.AsyncSandbox.list()]
            return first.stdout, second.text, pieces, (await process.wait()).stdout, repr(box)

    stdout, text, pieces, echoed, shown = asyncio.run(scenario())
    assert (stdout, text, pieces, echoed) == ("1\n", "42", [b"x" * 10], "hello")
    assert shown.startswith("<AsyncSandbox ")
    assert asyncio.run(run_async("echo one shot")).stdout == "one shot\n"


def test_a_handle_that_was_not_created_says_so():
    assert repr(cloche.AsyncSandbox()) == "<AsyncSandbox not created>"


def test_a_cancelled_task_kills_its_command():
    async def scenario():
        async with cloche.AsyncSandbox() as box:
            task = asyncio.ensure_future(box.exec("echo on > started; sleep 1000"))
            async for _ in _appears(box, "started"):
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while any(p.running for p in await box.processes.list()):
                pass

    asyncio.run(asyncio.wait_for(scenario(), 30))


async def _appears(box, path):
    while not await box.files.exists(path):
        pass
    yield path


def test_a_stream_that_is_cancelled_while_it_waits_is_closed():
    async def scenario():
        async with cloche.AsyncSandbox() as box:

            async def follow():
                async for _ in box.exec_stream("sleep 1000"):
                    pass

            task = asyncio.ensure_future(follow())
            while not await box.processes.list():
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while any(p.running for p in await box.processes.list()):
                pass

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_an_interrupt_cancels_the_call_and_the_sandbox_stays(start_python):
    program = start_python("""
        import cloche
        with cloche.Sandbox() as box:
            try:
                for event in box.exec_stream("echo waiting; sleep 1000"):
                    if isinstance(event, cloche.Output):
                        print(event.data.decode(), end="", flush=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            try:
                box.files.write("x", "")
                process = box.start("cat")
                print("again", flush=True)
                process.wait()
            except KeyboardInterrupt:
                print(box.exec("echo alive").stdout, end="", flush=True)
            for process in box.processes.list():
                print(process.command, process.running)
    """)
    with program:
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        assert program.stdout.readline() == "again\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "alive\n"
        rest = program.stdout.read()  # not `communicate`, which knows nothing of what readline has read ahead
    assert rest == "echo waiting; sleep 1000 False\ncat True\necho alive False\n"
    assert program.returncode == 0


@pytest.mark.parametrize("handed_over", [True, False])
def test_an_interrupt_before_the_first_step_does_not_wait(handed_over):
    async def work():
        raise AssertionError("cancelled before it began")

    home = portal.get()
    call = portal._Call(work(), home)
    leave = home.rest()
    try:
        if handed_over:
            home.loop.call_soon_threadsafe(call._start)
        home.loop.call_soon_threadsafe(call._cancel)
    finally:
        leave.set()
    assert call._done.acquire(timeout=20)


def test_a_stream_may_be_forgotten_anywhere(sandbox):
    for _ in range(20):
        events = sandbox.exec_stream("echo x; sleep 1000")
        next(events)
        cycle = [events]
        cycle.append(cycle)
        del events, cycle

        async def collect():
            gc.collect()  # in the portal's own thread, which must not wait for itself

        portal.run(collect())
    assert sandbox.exec("echo alive").stdout == "alive\n"


def test_a_process_that_exits_leaves_nothing(python, until):
    import os

    from cloche.linux import processes

    before = set(processes.descendants(os.getpid()))
    python("""
        import cloche
        boxes = [cloche.Sandbox() for _ in range(3)]
        boxes[0].start("setsid sleep 1000 & sleep 1000")
        boxes[1].run_code("1")
    """)

    def left():
        return [p for p in set(processes.descendants(os.getpid())) - before if processes.is_running(p)]

    until(lambda: not left())


def test_a_umask_does_not_shut_the_sandbox(python, tmp_path, monkeypatch):
    monkeypatch.setenv("CLOCHE_HOME", str(tmp_path / "s"))
    said = python("""
        import os, cloche
        os.umask(0o077)
        print(cloche.run("cat /etc/hostname; pwd; touch x; stat -c %a x /etc/passwd /").stdout, end="")
    """).stdout
    assert said == "cloche\n/workspace\n644\n644\n755\n"


def test_one_shot():
    assert cloche.run("uname -s").stdout == "Linux\n"
    assert cloche.run(["cat"], stdin="x", cwd="/tmp", env={"A": "1"}, memory_mib=64).stdout == "x"
    with pytest.raises(errors.CommandFailed):
        cloche.run("false", check=True)
    assert cloche.run("sleep 1000", timeout_s=0.1).timed_out
    with pytest.raises(TypeError):
        cloche.run("true", colour="blue")  # type: ignore[call-arg]


def test_a_handle_shows_itself(sandbox):
    assert repr(sandbox) == f"<Sandbox {sandbox.id}>"
    process = sandbox.start("cat")
    assert repr(process) == f"<Process {process.id} pid={process.pid}>"
    context = sandbox.contexts.create()
    assert repr(context) == f"<Context {context.id} python>"


def test_leaving_the_block_of_a_sandbox_that_is_gone_is_fine():
    with cloche.Sandbox() as box:
        box.delete()


def test_the_settings_file_gives_the_defaults(python, tmp_path, monkeypatch):
    (tmp_path / "cloche").mkdir()
    (tmp_path / "cloche/settings.toml").write_text(
        '[defaults]\nprofile = "restrictive"\ntimeout_s = 77\nresources = { memory_mib = 99 }\n'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    said = python("""
        import cloche
        with cloche.Sandbox() as box, cloche.Sandbox(profile="moderate", timeout_s=None, memory_mib=64) as other:
            for info in (box.info(), other.info()):
                life = info.expires_at and round(info.expires_at - info.created_at)
                print(info.profile, life, info.limits["memory_mib"].value)
    """).stdout
    assert said == "restrictive 77 99\nmoderate None 64\n"
