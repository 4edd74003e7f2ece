"""Startup actions: what a new sandbox does before it counts as ready.

In order, each waited for; the first that fails ends the sandbox with `startup_failed`, whose message has the tail of what
was written. `suspend` pauses as soon as what stands before it is done, `suspend_at` sets a timer. What happened is kept in
`Sandbox.startup`, one sentence an action, and told in the conditions of the claim that gets the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from cloche import errors, interfaces, model
from cloche.engine import files, sandboxes

_TAIL = 2000


async def perform(made: sandboxes.Sandbox, clock: interfaces.Clock) -> None:
    """All actions of the sandbox's spec; raises `startup_failed` at the first that fails."""
    for number, action in enumerate(made.spec.startup, 1):
        begun = time.perf_counter()
        try:
            words = await asyncio.wait_for(_ACTS[action.kind](made, action, clock), _patience(action))
        except TimeoutError:
            raise _failed(number, action, f"it was not done within {_patience(action):g} s") from None
        except errors.ClocheError as problem:
            if problem.code == "startup_failed":
                raise
            raise _failed(number, action, problem.message) from None
        made.startup.append(f"{number}: {words} ({(time.perf_counter() - begun) * 1000:.0f} ms)")


def _patience(action: model.Action) -> float:
    return action.wait_for.timeout_s if action.wait_for is not None else action.timeout_s


def _failed(number: int, action: model.Action, why: str, tail: str = "") -> errors.ClocheError:
    return errors.error(
        "startup_failed",
        f"startup action {number} ({_shown(action)}) failed: {why}" + (f"\n{tail}" if tail else ""),
        hint="run it by hand in a sandbox without startup actions",
        action=number,
        output=tail,
    )


def _shown(action: model.Action) -> str:
    if action.run is not None:
        text = action.run if isinstance(action.run, str) else " ".join(action.run)
        return f"run {text[:100]!r}"
    if action.write is not None:
        return f"write {action.write.path}"
    if action.wait_for is not None:
        probe = action.wait_for
        return (
            f"wait for port {probe.port}"
            if probe.port is not None
            else f"wait for {str(probe.command)[:100]!r}"
        )
    return action.kind


async def _run(made: sandboxes.Sandbox, action: model.Action, _clock: interfaces.Clock) -> str:
    assert action.run is not None
    result = await _execute(made, action.run, action.user, action.timeout_s)
    if not result.ok:
        tail = (result.stdout + result.stderr)[-_TAIL:].strip()
        why = f"it exited with {result.shell_code}"
        raise _failed(len(made.startup) + 1, action, why, tail)
    return f"{_shown(action)} exited with 0"


async def _execute(
    made: sandboxes.Sandbox, command: str | list[str], user: str, timeout_s: float | None
) -> model.ExecResult:
    running = await made.start(model.ExecRequest(command=command, user=user, timeout_s=timeout_s))
    return await asyncio.shield(running.result)


async def _write(made: sandboxes.Sandbox, action: model.Action, _clock: interfaces.Clock) -> str:
    assert action.write is not None
    wanted = action.write
    await files.write(made.machine, wanted.path, wanted.content.encode(), user=action.user, mode=wanted.mode)
    return f"wrote {wanted.path}"


async def _wait_for(made: sandboxes.Sandbox, action: model.Action, _clock: interfaces.Clock) -> str:
    probe = action.wait_for
    assert probe is not None
    while not await _answers(made, probe, action.user):  # noqa: ASYNC110 - nobody inside tells us
        await asyncio.sleep(probe.every_s)
    return f"{_shown(action)} answered"


async def _answers(made: sandboxes.Sandbox, probe: model.Probe, user: str) -> bool:
    if probe.port is not None:
        with suppress(errors.ServerUnavailable):
            os.close(await made.machine.connect(probe.port))
            return True
        return False
    assert probe.command is not None
    return (await _execute(made, probe.command, user, probe.timeout_s)).ok


async def _suspend(made: sandboxes.Sandbox, _action: model.Action, _clock: interfaces.Clock) -> str:
    await made.pause()
    return "suspended"


async def _suspend_at(made: sandboxes.Sandbox, action: model.Action, clock: interfaces.Clock) -> str:
    assert action.suspend_at is not None
    made.at(max(0.0, action.suspend_at - clock.time()), made.pause)
    return f"will be suspended at {action.suspend_at:.0f}"


_ACTS: dict[str, Callable[[sandboxes.Sandbox, model.Action, interfaces.Clock], Awaitable[str]]] = {
    "run": _run,
    "write": _write,
    "wait_for": _wait_for,
    "suspend": _suspend,
    "suspend_at": _suspend_at,
}
