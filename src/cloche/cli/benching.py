"""`bench`: how fast it is on this machine, in half a minute, by the definitions of docs/guides/benchmarking.md.

Each figure stands beside a plain `subprocess` of the same run, because machines differ. What is measured is what a program would
get: an engine in this process, or the keeper if one runs; with nothing of the isolation switched off.
"""

import argparse
import asyncio
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cloche import errors
from cloche.cli import output, talk, thin

_ECHO = ["/bin/echo", "x"]
_BURST = 20


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("--count", metavar="N", default="50", help="samples of each figure (default: 50)")
    parser.add_argument("--template", metavar="T", default="base", help="what to claim (default: base)")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    count = thin.number(chosen.count)
    if count is None or not 1 <= count <= 10_000:
        raise errors.error("limit_invalid", f"--count is {chosen.count!r}; it is a number from 1 to 10000")
    found = Bench(int(count), chosen.template, quiet=chosen.json).run()
    if chosen.json:
        output.as_json(found)
        return 0
    output.table(
        ("WHAT", "N", "P50 ms", "P99 ms", "WORST ms"),
        [(name, f["n"], f["p50_ms"], f["p99_ms"], f["max_ms"]) for name, f in found["figures"].items()],
    )
    talk.say(f"isolation: {found['isolation']}; {found['warm']} of {found['claims']} claims were warm")
    return 0


class Bench:
    def __init__(self, count: int, template: str, *, quiet: bool) -> None:
        self._count = count
        self._template = template
        self._quiet = quiet
        self._samples: dict[str, list[float]] = {}

    def run(self) -> dict[str, Any]:
        import cloche

        self._say("cold starts")
        for _ in range(self._count):
            self._time("subprocess", lambda: subprocess.run(_ECHO, capture_output=True, check=True))
            self._time("cold: create → first output", lambda: self._first(cloche.Sandbox()))
        self._say("filling a pool")
        with cloche.Pool(self._template, name="bench-cli", size=_BURST) as pool:
            pool.wait_ready(timeout_s=120)
            isolation = self._claims(pool)
            self._say(f"bursts of {_BURST}")
            for _ in range(5):
                pool.wait_ready(timeout_s=120)
                self._time(f"burst: {_BURST} claims, all answered", lambda: asyncio.run(_burst(pool)))
            info = pool.info()
        return {
            "isolation": isolation, "claims": info.hits + info.misses, "warm": info.hits,
            "figures": {name: _figures(samples) for name, samples in self._samples.items()},
        }  # fmt: skip

    def _claims(self, pool: Any) -> str:
        self._say("claims")
        bound = {"env": {"TASK": "7"}, "files": {"task/in.txt": "hello"}}
        isolation = ""
        for _ in range(self._count):
            box = self._time(
                "warm: claim → first output (TFFI)", lambda: self._first(pool.claim(**bound), keep=True)
            )
            self._time("exec of true in it", partial(box.exec, ["true"]))
            if not isolation:
                info = box.info()
                isolation = f"{info.isolation.level} by {info.isolation.driver}, engine {info.server}"
            box.delete()
            pool.wait_ready(timeout_s=60)
        return isolation

    def _first(self, box: Any, *, keep: bool = False) -> Any:
        from cloche import model

        events = box.exec_stream(_ECHO)
        next(event for event in events if isinstance(event, model.Output))
        self._stopped = time.perf_counter()
        for _ in events:
            pass
        if not keep:
            box.delete()
        return box

    def _time(self, name: str, work: Callable[[], Any]) -> Any:
        before, self._stopped = time.perf_counter(), 0.0
        result = work()
        self._samples.setdefault(name, []).append(((self._stopped or time.perf_counter()) - before) * 1e3)
        return result

    def _say(self, words: str) -> None:
        if not self._quiet:
            talk.say(f"{words} …")


async def _burst(pool: Any) -> None:
    twin = pool._async
    boxes = await asyncio.gather(*(twin.claim() for _ in range(_BURST)))
    await asyncio.gather(*(box.delete() for box in boxes))


def _figures(samples: list[float]) -> dict[str, Any]:
    ordered = sorted(samples)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    return {"n": len(ordered), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}
