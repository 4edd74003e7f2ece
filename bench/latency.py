"""Rows 1 to 5 and 10 to 12: how long one caller waits for one thing, through the synchronous SDK.

Cold means: no sandbox waits for the caller. The engine runs, and its launcher keeps an *embryo* (a forked process with
namespaces, a cgroup and a disk, but no root, no filter, no limits, nobody's) as it does for every caller. Row 2 gives it
the time between two requests to make the next one; row 2b asks again at once, so that nothing is ready.
"""

from __future__ import annotations

import os
import time
from typing import Any

import cloche
from bench import baselines, records, setup
from cloche import model

SCRIPT = "#!/bin/sh\necho hello\n"
_FIRST_BYTE = "`Sandbox()` is called → first byte of `/bin/echo` is in the caller's hands"


def cold(bench: setup.Bench) -> list[records.Row]:
    """Rows 1, 2 and 2b."""
    floor = bench.attempt("floor", lambda: baselines.Floor(bench.scratch))
    wrapped = bench.attempt("bubblewrap", lambda: baselines.Bubblewrap(bench.home))
    rows = _cold_rows()
    subject = _Cold(rows)
    beside = _contestants(floor, wrapped)
    try:
        rounds = bench.count(300)
        setup.interleave(rounds, (rows[1].subject, subject.paced), *beside)
        setup.interleave(bench.count(100), (rows[2].subject, subject.at_once))
    finally:
        for thing in (floor, wrapped):
            if thing is not None:
                thing.close()
        setup.close_engine()
    series = [series for series, _ in beside]
    for row in rows[1:]:
        row.beside = series
    if floor is None:
        return rows[1:]
    rows[0].subject = series[0]
    return rows


def _contestants(
    floor: baselines.Floor | None, wrapped: baselines.Bubblewrap | None
) -> list[tuple[records.Series, Any]]:
    found: list[tuple[records.Series, Any]] = []
    if floor is not None:
        found.append((records.Series(name="floor"), floor.measure))
    if wrapped is not None:
        found.append((records.Series(name="bwrap"), wrapped.measure))
    found.append((records.Series(name="subprocess"), lambda: baselines.first_byte(baselines.ECHO)))
    return found


class _Cold:
    """Sandboxes made to print one byte. Each is deleted before the next contestant starts."""

    def __init__(self, rows: list[records.Row]) -> None:
        self._rows = rows

    def paced(self) -> float:
        taken, box = _make()
        if not self._rows[1].held:
            for row in self._rows[1:]:
                setup.hold(row, box.info())
        box.delete()
        time.sleep(0.02)  # what deletion leaves to the kernel must not be charged to the next contestant
        return taken

    def at_once(self) -> float:
        taken, box = _make()
        box.delete()
        return taken


def _make() -> tuple[float, Any]:
    before = time.perf_counter()
    box = cloche.Sandbox(timeout_s=None)
    events = box.exec_stream(baselines.ECHO)
    first = next(event for event in events if isinstance(event, model.Output))
    taken = (time.perf_counter() - before) * 1e3
    assert first.data == b"x\n"
    for _ in events:
        pass
    return taken, box


def _cold_rows() -> list[records.Row]:
    return [
        records.Row(
            key="row1", name="the floor: fork, all namespaces, exec, in C",
            boundary="clone() is called → first byte of `/bin/echo` is read", subject=records.Series(name="floor"),
            held="namespaces only: no root, filter, limits or id map", anchor="1.2–1.6 ms on the development machines",
        ),
        records.Row(
            key="row2", name="cold create → first output", boundary=_FIRST_BYTE, subject=records.Series(name="cloche"),
            bars=[records.Bar(value=4, of="floor"), records.Bar(value=1, of="bwrap")], anchor="agentkernel 800 ms; Firecracker boots in 125 ms",
            notes=["no sandbox waits; the launcher's usual embryo does"],
        ),
        records.Row(
            key="row2b", name="cold create → first output, back to back", boundary=_FIRST_BYTE,
            subject=records.Series(name="cloche"), bars=[records.Bar(value=4, of="floor"), records.Bar(value=1, of="bwrap")],
            anchor="as above", notes=["asked again as soon as the last one is deleted: the next embryo is still being made"],
        ),
    ]  # fmt: skip


def execute(bench: setup.Bench) -> list[records.Row]:
    """Row 3."""
    row = records.Row(
        key="row3", name="exec of `true` in a live sandbox", boundary="`exec([\"true\"])` is called → its result returned",
        subject=records.Series(name="cloche"), beside=[records.Series(name="subprocess")],
        bars=[records.Bar(value=2)], anchor="agentkernel 19 ms",
    )  # fmt: skip
    with setup.sandbox() as box:
        setup.hold(row, box.info())
        setup.interleave(
            bench.count(1000),
            (row.subject, setup.timed(lambda: box.exec(["true"]))),
            (row.beside[0], setup.timed(baselines.run_true)),
        )
    return [row]


def write_and_run(bench: setup.Bench) -> list[records.Row]:
    """Row 4."""
    row = records.Row(
        key="row4", name="write a file, then run it",
        boundary="`files.write(\"hello.sh\", …)` is called → result of `exec([\"./hello.sh\"])` returned",
        subject=records.Series(name="cloche"), beside=[records.Series(name="open + subprocess")],
        bars=[records.Bar(value=4)], anchor="agentkernel 400 ms, with a goal of 200 ms",
    )  # fmt: skip
    path = os.path.join(bench.scratch, "hello.sh")

    def subject(box: Any) -> None:
        box.files.write("hello.sh", SCRIPT, mode=0o755)
        assert box.exec(["./hello.sh"]).stdout_bytes == b"hello\n"

    with setup.sandbox() as box:
        setup.hold(row, box.info())
        setup.interleave(
            bench.count(500),
            (row.subject, setup.timed(lambda: subject(box))),
            (row.beside[0], setup.timed(lambda: baselines.write_and_run(path, SCRIPT))),
        )
    return [row]


def code(bench: setup.Bench) -> list[records.Row]:
    """Row 5."""
    row = records.Row(
        key="row5", name="`run_code(\"1+1\")` in a live context", boundary="`run_code` is called → its result returned",
        subject=records.Series(name="cloche"), beside=[records.Series(name="plain Python child")],
        bars=[records.Bar(value=3)], anchor="–",
    )  # fmt: skip
    plain = baselines.Calculator()
    try:
        with setup.sandbox() as box:
            assert box.run_code("1+1").text == "2"
            setup.hold(row, box.info())
            setup.interleave(
                bench.count(1000),
                (row.subject, setup.timed(lambda: box.run_code("1+1"))),
                (row.beside[0], setup.timed(lambda: plain.ask("1+1"))),
            )
    finally:
        plain.close()
    return [row]


def pause(bench: setup.Bench) -> list[records.Row]:
    """Row 10."""
    row = records.Row(
        key="row10", name="pause → resume → exec",
        boundary="`suspend()` is called → `resume()` → result of `exec([\"true\"])` returned",
        subject=records.Series(name="cloche"), beside=[records.Series(name="exec alone"), records.Series(name="subprocess")],
        bars=[records.Bar(value=3)], anchor="Blaxel resumes within 25 ms",
    )  # fmt: skip

    def subject(box: Any) -> None:
        box.suspend()
        box.resume()
        box.exec(["true"])

    with setup.sandbox() as box:
        try:
            box.suspend()
        except cloche.ClocheError as problem:
            bench.skip("row10", str(problem))
            return []
        setup.hold(row, box.info())
        setup.interleave(
            bench.count(300),
            (row.subject, setup.timed(lambda: subject(box))),
            (row.beside[0], setup.timed(lambda: box.exec(["true"]))),
            (row.beside[1], setup.timed(baselines.run_true)),
        )
    return [row]


def audit(bench: setup.Bench) -> list[records.Row]:
    """Row 11: what the audit log adds to an execution, its two lines masked, hashed and handed to the kernel."""
    from cloche import events, settings
    from cloche.audit import writing

    log = writing.Log(os.path.join(bench.scratch, "audited"), settings.Audit(), "bench:1")
    row = records.Row(
        key="row11", name="audit: the two lines of an execution", boundary="two events are handed over → both lines are the kernel's",
        subject=records.Series(name="cloche"), bars=[records.Bar(value=0.05)],
    )  # fmt: skip
    for number in range(bench.count(2000)):
        start = time.perf_counter()
        log.append(
            log.masked(
                events.Started(
                    sandbox="k" * 20,
                    time=number,
                    actor="uid:0",
                    execution="e" * 20,
                    command="python3 -m pytest -q tests",
                )
            )
        )
        log.flush()
        log.append(
            events.Exited(sandbox="k" * 20, time=number, actor="guest", execution="e" * 20, exit_code=0)
        )
        due = log.flush()
        row.subject.add((time.perf_counter() - start) * 1000)
        if due:
            log.tend()  # in a thread, elsewhere
    log.close()
    return [row]


def decisions(bench: setup.Bench) -> list[records.Row]:
    """Rows 12a and 12b: one question to a policy of usual size, and a claim's whole policy from its layers."""
    from cloche import policy
    from cloche.policy import explaining, rules

    hosts = [f"host{n}.example.org:443" for n in range(60)]
    ceiling = policy.Policy(network={"allow": ["**.example.org", "pypi.org"], "deny": ["gist.github.com"]})
    said = policy.Policy(
        network={"allow": [*hosts, "**.github.com", "10.1.0.0/16:5432"], "deny": ["*.evil.org"]}
    )
    sources = policy.Sources(ceilings=(ceiling,))
    merged = policy.resolve(policy.stack(profile="moderate", sources=sources, arguments=said))
    index = explaining.rule_set(merged.network)
    asked = [
        rules.Request(host, 443, "tls")
        for host in (
            "host7.example.org",
            "a.b.c.other.org",
            "10.1.2.3",
            "Host59.example.ORG.",
            "169.254.169.254",
        )
    ]
    for request in asked:
        rules.decide(index, request)
    one = records.Row(
        key="row12a", name="policy: one network decision", boundary="`decide(rules, request)` is called → its answer",
        subject=records.Series(name="cloche"), bars=[records.Bar(value=0.02)],
        notes=["mean of 5 requests, 63 rules narrowed by a ceiling"],
    )  # fmt: skip
    whole = records.Row(
        key="row12b", name="policy: a claim's layers become one", boundary="layers are given → merged policy and rule index",
        subject=records.Series(name="cloche"), bars=[records.Bar(value=1)],
        notes=["profile and 10 allow rules as arguments"],
    )  # fmt: skip
    small = policy.Policy(network={"allow": hosts[:10]})
    for _ in range(bench.count(2000)):
        start = time.perf_counter()
        for request in asked:
            rules.decide(index, request)
        one.subject.add((time.perf_counter() - start) * 1000 / len(asked))
        start = time.perf_counter()
        made = policy.resolve(policy.stack(profile="moderate", arguments=small))
        _ = explaining.rule_set(made.network).index
        whole.subject.add((time.perf_counter() - start) * 1000)
    return [one, whole]
