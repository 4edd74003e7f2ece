"""A callback that decides what a sandbox may reach, where no rule does.

    Sandbox(allow=["pypi.org"], ask=lambda question: "sandbox" if question.host.endswith(".example.com") else "deny")

The callback runs in a thread, so it may take its time and ask a person; an asynchronous one runs in the loop that made the
sandbox. What it raises, or says that is no answer, is a refusal with that reason. "always" is for the sandbox and, by
`allow_always`, for sandboxes to come; where a rule says `ask`, it is for the sandbox only, for such a rule asks every time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, get_args

from cloche import errors, interfaces, model

_tasks: set[asyncio.Task[None]] = set()


async def begin(
    backend: interfaces.Backend,
    sandbox: str,
    callback: Callable[[model.Question], Any],
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Have the callback asked from now on, until the sandbox ends. In the backend's loop; `loop` is the caller's."""
    here = asyncio.get_running_loop()
    ready: asyncio.Future[None] = here.create_future()
    _keep(_serve(backend, sandbox, callback, loop, ready), f"asks {sandbox}")
    await ready


def _keep(work: Any, name: str) -> None:
    task = asyncio.get_running_loop().create_task(work, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _serve(
    backend: interfaces.Backend,
    sandbox: str,
    callback: Callable[[model.Question], Any],
    loop: asyncio.AbstractEventLoop,
    ready: asyncio.Future[None],
) -> None:
    try:
        async for question in backend.follow_asks(sandbox):
            if question.id:
                _keep(_answer(backend, question, callback, loop), f"ask {question.id}")
            elif not ready.done():
                ready.set_result(None)
    except errors.ClocheError as problem:
        if not ready.done():
            ready.set_exception(problem)
    finally:
        if not ready.done():
            ready.cancel()


async def _answer(
    backend: interfaces.Backend,
    question: model.Question,
    callback: Callable[[model.Question], Any],
    loop: asyncio.AbstractEventLoop,
) -> None:
    answer, reason = await decide(question, callback, loop)
    if answer == "always":
        answer = "sandbox"
        if not question.rule:
            with suppress(errors.ClocheError):  # a server that is not ours has no policy file of ours
                await backend.allow_always(question.target)
    with suppress(errors.ClocheError):  # its time was up, or the sandbox went
        await backend.answer_ask(question.sandbox, question.id, answer, reason)


async def decide(
    question: model.Question, callback: Callable[[model.Question], Any], loop: asyncio.AbstractEventLoop
) -> tuple[model.Answer, str]:
    try:
        said = await asyncio.to_thread(callback, question)
        if inspect.isawaitable(said):
            said = await _elsewhere(said, loop)
    except Exception as problem:
        return "deny", f"the callback that decides failed: {type(problem).__name__}: {problem}"
    if said not in get_args(model.Answer):
        words = ", ".join(get_args(model.Answer))
        return "deny", f"the callback that decides said {said!r}, which is none of {words}"
    return said, ""


async def _elsewhere(work: Awaitable[Any], loop: asyncio.AbstractEventLoop) -> Any:
    if loop is asyncio.get_running_loop():
        return await work

    async def whole() -> Any:
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(whole(), loop))
