"""`/metrics`: what the server counts, in Prometheus's text format.

Labels are bounded: operations, statuses, codes and reasons are ours, pools are the operator's, clients come from a list (`clients`). No sandbox,
key, path or host ever becomes a label. `docs/reference/metrics.md` has every family, and a test holds it to this module. Histograms begin at 1 ms.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from cloche import __version__, interfaces, measures, stock
from cloche.server.http import clients, connections, ledger

T = TypeVar("T")
Labels = tuple[tuple[str, str], ...]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_VERSIONS = 200
_POOL = (
    ("size", "gauge", "Ready members that are wanted."),
    ("ready", "gauge", "Members that wait for a claim."),
    ("making", "gauge", "Members under way."),
    ("outdated", "gauge", "Members of an older version of the template."),
    ("hits", "counter", "Claims that a warm member served."),
    ("misses", "counter", "Claims that started cold."),
)


class Meters:
    """Counts requests; asks the engine and the connections for the rest when somebody looks."""

    def __init__(
        self, watch: connections.Watch | None = None, engine: measures.Measures | None = None
    ) -> None:
        self._watch = watch
        self._engine = engine or measures.Measures()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._times: dict[str, measures.Histogram] = {}
        self._clients: Counter[clients.Client] = Counter()
        self._calls: Counter[tuple[str, str, str]] = Counter()

    def observe(self, entry: ledger.Entry, seconds: float) -> None:
        """An answer over HTTP has begun."""
        self._answers[entry.operation, entry.status] += 1
        times = self._times.get(entry.operation)
        if times is None:
            times = self._times[entry.operation] = measures.Histogram()
        times.observe(seconds)
        self._clients[self._told_apart(entry.client)] += 1

    def called(self, call: str, code: str) -> None:
        """A call in frames was answered: `socket exec`, `websocket exec`."""
        wire, _, operation = call.partition(" ")
        self._calls[wire, operation, code] += 1

    def _told_apart(self, client: clients.Client) -> clients.Client:
        if client in self._clients or len(self._clients) < _MOST_VERSIONS:
            return client
        return clients.Client(client.name, "other")

    async def render(self, backend: interfaces.Backend) -> bytes:
        phases = Counter(info.phase for info in await backend.list())
        lines = [
            *_one(
                "cloche_build_info", "gauge", "The version of the server.", {(("version", __version__),): 1}
            ),
            *_one("cloche_sandboxes", "gauge", "Sandboxes, by phase.", _by("phase", phases)),
            *_pools(await backend.pools()),
            *self._lives(),
            *self._network(),
            *self._requests(),
            *self._connections(),
            *_process(),
        ]
        return ("\n".join(lines) + "\n").encode()

    def _lives(self) -> Iterator[str]:
        engine = self._engine
        yield from _histograms(
            "cloche_create_seconds",
            "Creating a sandbox, by whether one waited.",
            _by("start", engine.created),
        )
        yield from _histograms(
            "cloche_claim_seconds", "Claiming a sandbox, by whether one waited.", _by("start", engine.claimed)
        )
        yield from _histograms(
            "cloche_first_instruction_seconds", "Getting a sandbox plus starting its first command; what the client did between is left out.",
            {(): engine.first_instruction},
        )  # fmt: skip
        yield from _histograms(
            "cloche_first_output_seconds",
            "From a command being asked for to its first byte of output.",
            {(): engine.first_output},
        )
        yield from _one(
            "cloche_sandboxes_ended_total",
            "counter",
            "Sandboxes that ended, by the reason.",
            _by("reason", engine.ended),
        )
        yield from _one("cloche_executions_running", "gauge", "Commands that run.", {(): engine.running})
        yield from _one(
            "cloche_executions_total",
            "counter",
            "Commands that ended, by how.",
            _by("outcome", engine.executions),
        )
        yield from _one(
            "cloche_code_runs_total",
            "counter",
            "Pieces of code that were run in contexts.",
            {(): engine.code_runs},
        )
        yield from _one(
            "cloche_denials_total",
            "counter",
            "What the glass stopped, by its kind.",
            _by("kind", engine.denials),
        )
        yield from _one(
            "cloche_refusals_total",
            "counter",
            "Requests that were turned down, by the error's code.",
            _by("code", engine.refusals),
        )

    def _network(self) -> Iterator[str]:
        engine = self._engine
        decisions: dict[Labels, float] = {
            (("verdict", verdict), ("reason", reason)): count
            for (verdict, reason), count in engine.decisions.items()
        }
        yield from _one(
            "cloche_egress_connections_total",
            "counter",
            "Connections out of sandboxes, by what was decided and why.",
            decisions,
        )
        carried = {"up": engine.bytes_up, "down": engine.bytes_down}
        yield from _one(
            "cloche_egress_bytes_total",
            "counter",
            "Bytes of connections that have ended.",
            _by("direction", carried),
        )
        yield from _one(
            "cloche_egress_credentials_total",
            "counter",
            "Credentials that were put into requests.",
            {(): engine.credentials},
        )

    def _requests(self) -> Iterator[str]:
        answers: dict[Labels, float] = {
            (("operation", operation), ("status", str(status))): count
            for (operation, status), count in self._answers.items()
        }
        yield from _one("cloche_http_requests_total", "counter", "Answers, by operation and status.", answers)
        yield from _histograms(
            "cloche_http_request_seconds", "How long an answer took to begin.", _by("operation", self._times)
        )
        agents: dict[Labels, float] = {
            (("client", client.name), ("version", client.version)): count
            for client, count in self._clients.items()
        }
        yield from _one(
            "cloche_clients_total", "counter", "Requests, by the client's name and version.", agents
        )
        calls: dict[Labels, float] = {
            (("wire", wire), ("operation", operation), ("outcome", code)): count
            for (wire, operation, code), count in self._calls.items()
        }
        yield from _one(
            "cloche_calls_total", "counter", "Calls in frames, by wire, operation and outcome.", calls
        )

    def _connections(self) -> Iterator[str]:
        if self._watch is None:
            return
        quiet = self._watch.quiet
        states = {"active": self._watch.count - quiet, "idle": quiet}
        yield from _one(
            "cloche_connections",
            "gauge",
            "Connections over HTTP, by whether they have a request.",
            _by("state", states),
        )
        yield from _one(
            "cloche_connections_cut_total",
            "counter",
            "Connections that the server ended, by the code that says why.",
            _by("code", self._watch.cut),
        )


def _by(label: str, values: Mapping[Any, T]) -> dict[Labels, T]:
    return {((label, word),): value for word, value in values.items()}


def _pools(pools: list[stock.PoolInfo]) -> Iterator[str]:
    for field, kind, words in _POOL:
        name = f"cloche_pool_{field}" + ("_total" if kind == "counter" else "")
        yield from _one(name, kind, words, _by("pool", {pool.name: getattr(pool, field) for pool in pools}))
    name = "cloche_pool_claim_seconds"
    yield from _family(name, "summary", "How long claims of a pool took; exact, over the last 10,000.")
    for pool in pools:
        quantiles = (("0.5", pool.claim.p50_ms), ("0.9", pool.claim.p90_ms), ("0.99", pool.claim.p99_ms))
        for quantile, milliseconds in quantiles:
            yield f"{name}{_labels((('pool', pool.name), ('quantile', quantile)))} {milliseconds / 1000:.6f}"
        yield f"{name}_count{_labels((('pool', pool.name),))} {pool.claim.count}"


def _process() -> Iterator[str]:
    """Of this process, by the names that every client library uses for them."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    times = os.times()
    yield from _one(
        "process_resident_memory_bytes",
        "gauge",
        "Memory of the server.",
        {(): pages * os.sysconf("SC_PAGE_SIZE")},
    )
    yield from _one(
        "process_cpu_seconds_total",
        "counter",
        "Time of processors that the server has used.",
        {(): round(times.user + times.system, 2)},
    )
    yield from _one(
        "process_open_fds",
        "gauge",
        "Descriptors that the server has open.",
        {(): len(os.listdir("/proc/self/fd"))},
    )


def _one(name: str, kind: str, words: str, values: Mapping[Labels, float]) -> Iterator[str]:
    yield from _family(name, kind, words)
    for labels, value in sorted(values.items()):
        yield f"{name}{_labels(labels)} {value}"


def _histograms(name: str, words: str, values: Mapping[Labels, measures.Histogram]) -> Iterator[str]:
    yield from _family(name, "histogram", words)
    for labels, histogram in sorted(values.items(), key=lambda pair: pair[0]):
        total = 0
        for bound, count in zip((*map(str, measures.BOUNDS), "+Inf"), histogram.buckets, strict=True):
            total += count
            yield f"{name}_bucket{_labels((*labels, ('le', bound)))} {total}"
        yield f"{name}_sum{_labels(labels)} {histogram.seconds:.6f}"
        yield f"{name}_count{_labels(labels)} {total}"


def _family(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {name} {words}", f"# TYPE {name} {kind}"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
