"""Asking a person whether a sandbox may reach something.

A question waits for the first answer, from whoever follows the sandbox's questions or from the webhook of the settings; after
the time limit, and when the last follower leaves, it is refused. Several connections to one target share one question. Nobody
there means no, at once. What may be asked about is not decided here: denials by rule, private and metadata addresses never come
this far.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import msgspec

from cloche import errors, model

Ask = Callable[[model.Question], Awaitable[tuple[model.Answer, str]]]
_MOST_WAITING = 32  # questions of one sandbox at once; a person would not read more

Told = tuple[model.Answer, str]


class Asks:
    def __init__(self, *, timeout_s: float, webhook: Ask | None = None) -> None:
        self._timeout_s = timeout_s
        self._webhook = webhook
        self._followers: dict[str, list[asyncio.Queue[model.Question | None]]] = {}
        self._waiting: dict[str, dict[str, tuple[model.Question, asyncio.Future[Told]]]] = {}

    def anybody(self, sandbox: str) -> bool:
        return bool(self._followers.get(sandbox)) or self._webhook is not None

    async def ask(self, question: model.Question) -> Told:
        """The answer, and where it is no, a sentence why."""
        if not self.anybody(question.sandbox):
            return "deny", "a person would have to allow it, and nobody can be asked here"
        waiting = self._waiting.setdefault(question.sandbox, {})
        for asked, future in waiting.values():
            if asked.target == question.target:
                return await asyncio.shield(future)
        if len(waiting) >= _MOST_WAITING:
            return "deny", f"{_MOST_WAITING} questions of this sandbox wait for an answer already"
        return await self._put(question, waiting)

    async def _put(
        self, question: model.Question, waiting: dict[str, tuple[model.Question, asyncio.Future[Told]]]
    ) -> Told:
        question = msgspec.structs.replace(question, id=model.new_id(), timeout_s=self._timeout_s)
        future: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        waiting[question.id] = question, future
        for follower in self._followers.get(question.sandbox, ()):
            follower.put_nowait(question)
        calling = None if self._webhook is None else asyncio.ensure_future(self._call(question, future))
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError:
            told: Told = "deny", f"nobody answered within {self._timeout_s:g} s"
            if not future.done():
                future.set_result(told)
            return told
        finally:
            waiting.pop(question.id, None)
            if calling is not None:
                calling.cancel()
                with suppress(asyncio.CancelledError):
                    await calling

    async def _call(self, question: model.Question, future: asyncio.Future[Told]) -> None:
        assert self._webhook is not None
        try:
            told = await self._webhook(question)
        except (OSError, ValueError) as problem:
            if self._followers.get(question.sandbox):
                return  # somebody else may still answer
            told = "deny", f"the webhook that decides could not be asked: {problem}"
        if not future.done():
            future.set_result(told)

    def answer(self, sandbox: str, question: str, answer: model.Answer, reason: str) -> model.Question:
        found = self._waiting.get(sandbox, {}).get(question)
        if found is None or found[1].done():
            raise errors.error(
                "question_not_found",
                f"no question {question!r} of sandbox {sandbox} waits for an answer",
                hint="it may have been answered, or its time was up",
            )
        found[1].set_result(
            (answer, reason or ("somebody who was asked refused it" if answer == "deny" else ""))
        )
        return found[0]

    async def follow(
        self, sandbox: str, changed: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[model.Question]:
        """Questions of a sandbox; `changed` is awaited when the first follower comes and when the last has left."""
        queue: asyncio.Queue[model.Question | None] = asyncio.Queue()
        followers = self._followers.setdefault(sandbox, [])
        followers.append(queue)
        try:
            await changed()
            yield model.Question(id="", sandbox=sandbox)
            for question, _ in list(self._waiting.get(sandbox, {}).values()):
                yield question
            while (next_ := await queue.get()) is not None:
                yield next_
        finally:
            if queue in followers:
                followers.remove(queue)
            if not self.anybody(sandbox):
                self._refuse_all(sandbox, "whoever could be asked has left")
            await changed()

    def _refuse_all(self, sandbox: str, why: str) -> None:
        for _, future in self._waiting.get(sandbox, {}).values():
            if not future.done():
                future.set_result(("deny", why))

    def forget(self, sandbox: str) -> None:
        """The sandbox has ended: its followers are told, and nothing waits any more."""
        for follower in self._followers.pop(sandbox, ()):
            follower.put_nowait(None)
        self._refuse_all(sandbox, "the sandbox has ended")
        self._waiting.pop(sandbox, None)
