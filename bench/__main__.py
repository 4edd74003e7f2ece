"""`python -m bench`: measure, show, keep, and on request publish.

scripts/bench --quick --only row3       a look while working
scripts/bench --with-peers --full       everything
scripts/bench --with-peers --full --publish   the same, and the page in docs/
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

# Byte code is part of the figures: a user's second command finds it, so ours must too. Before our own imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from bench import (  # noqa: E402
    commands,
    cost,
    density,
    latency,
    leaks,
    network,
    noise,
    peers,
    plots,
    pools,
    records,
    serving,
    setup,
    states,
    tables,
    throughput,
    wires,
)
from cloche.linux import processes  # noqa: E402

Measurement = Callable[[setup.Bench], list[records.Row]]
ROWS: dict[str, Measurement] = {
    "row2": latency.cold,
    "row3": latency.execute,
    "row4": latency.write_and_run,
    "row5": latency.code,
    "row6": commands.run,
    "row7": density.memory,
    "row8": throughput.sustained,
    "row8b": cost.per_cycle,
    "row9": leaks.leftovers,
    "row10": latency.pause,
    "row11": latency.audit,
    "row12": latency.decisions,
    "row13": network.request,
    "row14": network.download,
    "row15": network.tunnels,
    "row16": network.binding,
    "row20": pools.first_output,
    "row21": pools.first_result,
    "row22": pools.burst,
    "row23": pools.sustained,
    "row24": pools.idle,
    "row30": states.waking,
    "row31": states.snapshots,
    "row33": states.copies,
    "row34": states.paused,
    "row40": wires.mcp,
    "row41": wires.e2b,
    "row43": serving.execute,
    "row44": serving.first_byte,
    "row45": serving.sustained,
    "row46": serving.streams,
    "row47": serving.memory,
}
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PAGE = os.path.join(_ROOT, "docs", "benchmarks.md")
_SHOWN = os.path.join(_ROOT, "docs", "benchmarks")
_KEPT = os.path.join(_ROOT, "bench", "results", "local")
_PEERS = os.path.join(_ROOT, ".cache", "peers")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure the numbers of docs/benchmarks.md on this machine."
    )
    parser.add_argument(
        "--only",
        default="",
        help=f"comma-separated rows of {', '.join(ROWS)} (row1, the floor, comes with row2)",
    )
    parser.add_argument("--quick", action="store_true", help="a twentieth of the samples; never publishable")
    parser.add_argument("--full", action="store_true", help="10,000 runs in row 9 instead of 500")
    parser.add_argument(
        "--with-peers",
        action="store_true",
        help="install Codex and sandbox-runtime by npm below .cache/peers",
    )
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks.md, its JSON and its plot"
    )
    parser.add_argument(
        "--noisy", action="store_true", help="publish even if the machine was busy; the page then says so"
    )
    parser.add_argument(
        "--name", default=time.strftime("%Y-%m-%d-%H%M%S"), help="name of the file below bench/results/local"
    )
    return parser.parse_args(arguments)


def chosen(only: str) -> list[str]:
    """The rows asked for, in the table's order; SystemExit names one that there is not."""
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    wanted = ["row2" if word == "row1" else word for word in wanted]
    for word in wanted:
        if word not in ROWS:
            raise SystemExit(f"bench: there is no {word!r}; the rows are {', '.join(ROWS)}")
    return [key for key in ROWS if not wanted or key in wanted]


def measure(bench: setup.Bench, keys: list[str]) -> None:
    for key in keys:
        bench.say(f"{key} …")
        before = noise.look()
        rows = _attempt(bench, key)
        others = noise.foreign(before, noise.look())
        for row in rows:
            row.foreign = others
        bench.rows += rows
        setup.close_engine()
        noise.reap()


def _attempt(bench: setup.Bench, key: str) -> list[records.Row]:
    """A row that fails is reported and left out; hours of other rows are not thrown away for it."""
    try:
        return ROWS[key](bench)
    except Exception as problem:
        traceback.print_exc(limit=-2)
        bench.skip(key, f"failed: {type(problem).__name__}: {problem}")
        return []


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    keys = chosen(options.only)
    if options.with_peers and (problem := peers.install(_PEERS)):
        say(f"peers: {problem}")
    run = records.Run(when=time.strftime("%Y-%m-%d"), host=noise.host(), arguments=arguments)
    run.noise["start"] = noise.weather()
    say(f"load {run.noise['start']['load']}; pressure {run.noise['start']['pressure']}")
    bench = _measured(options, keys)
    run.rows, run.skipped = bench.rows, bench.skipped
    run.noise["end"] = noise.weather()
    partial = len(keys) < len(ROWS) or any(skipped.name in ROWS for skipped in run.skipped)
    gaps = records.gaps(run, quick=options.quick, partial=partial)
    run.objections = gaps + records.noises(run)
    _show(run, options.name)
    if not options.publish:
        return 0
    if gaps or (run.objections and not options.noisy):
        say("nothing was published" + ("" if gaps else "; --noisy publishes with the objections on the page"))
        return 1
    publish(run)
    return 0


def _measured(options: argparse.Namespace, keys: list[str]) -> setup.Bench:
    processes.become_subreaper()  # launchers and keepers detach; so we still know them as ours
    directory = tempfile.mkdtemp(prefix="cloche-bench-")
    os.environ["CLOCHE_HOME"] = os.path.join(directory, "home")
    os.environ.pop("CLOCHE_URL", None)
    bench = setup.Bench(
        home=os.environ["CLOCHE_HOME"], quick=options.quick, full=options.full, peers=_PEERS, say=say
    )
    gc.collect()
    gc.disable()  # a collection in the client would be charged to whoever is measured at that moment
    try:
        measure(bench, keys)
    finally:
        gc.enable()
        setup.close_engine()
        shutil.rmtree(directory, ignore_errors=True)
    return bench


def _show(run: records.Run, name: str) -> None:
    print(tables.for_terminal(run))
    say(f"load {run.noise['end']['load']}; pressure {run.noise['end']['pressure']}")
    for objection in run.objections:
        say(f"not publishable: {objection}")
    os.makedirs(_KEPT, exist_ok=True)
    path = os.path.join(_KEPT, f"{name}.json")
    records.write(run, path)
    say(f"every sample is in {os.path.relpath(path, _ROOT)}")


def publish(run: records.Run) -> None:
    os.makedirs(_SHOWN, exist_ok=True)
    with open(_PAGE) as file:
        page = tables.publish(file.read(), tables.for_page(run))
    with open(_PAGE, "w") as file:
        file.write(page)
    records.write(run, os.path.join(_SHOWN, "results.json"))
    with open(os.path.join(_SHOWN, "ratios.svg"), "w") as file:
        file.write(plots.svg(run))
    say("published in docs/benchmarks.md")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
