"""What is said when a command has ended: its result as JSON, what the glass stopped, or why there is no result.

Standard library only, and imported only when there is something to say.
"""

import json
import sys
from typing import Any

from cloche import errors
from cloche.cli import talk

OUR_FAILURE = 125


def show(body: bytes, *, as_json: bool) -> None:
    """The body of a `run`'s RESULT frame."""
    message = json.loads(body)
    result = message["result"]
    if as_json:
        made = shape(result, message["code"], message.get("sandbox"))
        if message.get("report"):
            made["workspace"] = message["report"]
        print(json.dumps(made), flush=True)
        return
    _report(message.get("report") or {})
    if message["code"] != 0:
        for line in dict.fromkeys(_denial(d) for d in result["denials"]):
            talk.say(line)
    if message.get("sandbox"):
        talk.say(f"kept: {message['sandbox']}")


def _report(report: dict[str, list[str]]) -> None:
    """What happened to a workspace's control files: the person who comes back to it should know."""
    for line in report.get("warnings", ()):
        talk.warning(line)
    for field, words in _REPORTED.items():
        for line in report.get(field, ()):
            talk.say(f"{words}: {line}")


_REPORTED = {
    "control_files_changed": "control file changed",
    "config_dropped": "git configuration not taken over",
}


def shape(result: dict[str, Any], code: int, sandbox: str | None = None) -> dict[str, Any]:
    """One result as the CLI prints it: text beside the facts; bytes that are no text also as base64."""
    made: dict[str, Any] = {"code": code}
    for field in ("exit_code", "signal", "timed_out", "oom_killed"):
        made[field] = result[field]
    for stream in ("stdout", "stderr"):
        made.update(_text(stream, result[f"{stream}_bytes"]))
    for field in (
        "truncated",
        "stdout_total",
        "stderr_total",
        "duration_ms",
        "cpu_ms",
        "max_rss_mib",
        "denials",
    ):
        made[field] = result[field]
    made["isolation"] = result["isolation"]
    made["execution"] = result["execution"]
    if sandbox is not None:
        made["sandbox"] = sandbox
    return made


def _text(stream: str, encoded: str) -> dict[str, str]:
    from binascii import a2b_base64

    raw = a2b_base64(encoded)
    try:
        return {stream: raw.decode()}
    except UnicodeDecodeError:
        return {stream: raw.decode(errors="replace"), f"{stream}_base64": encoded}


def _denial(denial: dict[str, str]) -> str:
    line = f"denied: {denial['operation']} {denial['target']} ({denial['rule']})"
    return line + (f"; {denial['hint']}" if denial["hint"] else "")


def fail(body: bytes, *, started: bool, as_json: bool) -> int:
    """The body of an ERROR frame, or nothing where the connection just ended; the exit code."""
    if body:
        problem = errors.from_dict(json.loads(body))
    else:
        problem = errors.error(
            "connection_lost",
            "the keeper ended while the command ran"
            if started
            else "the keeper ended before the command was started",
            hint="its sandboxes ended with it; run the command again",
        )
    return tell(problem, as_json=as_json)


def tell(problem: errors.ClocheError, *, as_json: bool = False) -> int:
    if as_json:
        print(json.dumps({"error": problem.to_dict()}), flush=True)
    else:
        talk.error(problem.message, problem.hint)
    return errors.TABLE[problem.code].cli if problem.code in errors.TABLE else OUR_FAILURE


def internal(problem: BaseException, *, as_json: bool = False) -> int:
    """A defect of ours is one sentence too; the traceback goes where somebody asked for it."""
    import os

    if os.environ.get("CLOCHE_DEBUG"):
        import traceback

        traceback.print_exception(problem, file=sys.stderr)
    made = errors.error(
        "internal_error", f"{type(problem).__name__}: {problem}",
        hint="this is a defect of Cloche; CLOCHE_DEBUG=1 shows where",
    )  # fmt: skip
    return tell(made, as_json=as_json)
