"""`/metrics`: what the server counts, in Prometheus's text format.

Labels are bounded: operations and statuses are ours, pools are the operator's. No sandbox, key, path or host ever becomes a label.
Pools report the exact quantiles that `info` has; requests are a histogram, from 1 ms up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from cloche import interfaces, stock
from cloche.server.http import connections

MEDIA_TYPE = "text/plain; version=0.0.4"
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_POOL = (
    ("size", "gauge", "Ready members that are wanted."),
    ("ready", "gauge", "Members that wait for a claim."),
    ("making", "gauge", "Members under way."),
    ("outdated", "gauge", "Members of an older version of the template."),
    ("hits", "counter", "Claims that a warm member served."),
    ("misses", "counter", "Claims that started cold."),
)


class Meters:
    """Counts requests; asks the engine for the rest when somebody looks."""

    def __init__(self, watch: connections.Watch | None = None) -> None:
        self._watch = watch
        self._answers: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def observe(self, operation: str, _caller: str, status: int, seconds: float) -> None:
        self._answers[operation, status] += 1
        buckets = self._buckets.setdefault(operation, [0] * (len(_BOUNDS) + 1))
        buckets[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds[operation] = self._seconds.get(operation, 0.0) + seconds

    async def render(self, backend: interfaces.Backend) -> bytes:
        phases = Counter(info.phase for info in await backend.list())
        lines = [
            *_family("cloche_sandboxes", "gauge", "Sandboxes, by phase."),
            *(f'cloche_sandboxes{{phase="{phase}"}} {count}' for phase, count in sorted(phases.items())),
            *_pools(await backend.pools()),
            *self._requests(),
            *self._connections(),
        ]
        return ("\n".join(lines) + "\n").encode()

    def _requests(self) -> Iterator[str]:
        yield from _family("cloche_http_requests_total", "counter", "Answers, by operation and status.")
        for (operation, status), count in sorted(self._answers.items()):
            yield f'cloche_http_requests_total{{operation="{operation}",status="{status}"}} {count}'
        yield from _family("cloche_http_request_seconds", "histogram", "How long an answer took to begin.")
        for operation, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), buckets, strict=True):
                total += count
                yield f'cloche_http_request_seconds_bucket{{operation="{operation}",le="{bound}"}} {total}'
            yield f'cloche_http_request_seconds_sum{{operation="{operation}"}} {self._seconds[operation]:.6f}'
            yield f'cloche_http_request_seconds_count{{operation="{operation}"}} {total}'

    def _connections(self) -> Iterator[str]:
        if self._watch is None:
            return
        yield from _family(
            "cloche_connections", "gauge", "Connections over HTTP, by whether they have a request."
        )
        quiet = self._watch.quiet
        yield f'cloche_connections{{state="active"}} {self._watch.count - quiet}'
        yield f'cloche_connections{{state="idle"}} {quiet}'
        yield from _family(
            "cloche_connections_cut_total",
            "counter",
            "Connections that the server ended, by the code that says why.",
        )
        for code, count in sorted(self._watch.cut.items()):
            yield f'cloche_connections_cut_total{{code="{code}"}} {count}'


def _pools(pools: list[stock.PoolInfo]) -> Iterator[str]:
    for field, kind, words in _POOL:
        name = f"cloche_pool_{field}" + ("_total" if kind == "counter" else "")
        yield from _family(name, kind, words)
        for pool in pools:
            yield f'{name}{{pool="{pool.name}"}} {getattr(pool, field)}'
    yield from _family(
        "cloche_claim_seconds", "summary", "How long claims took; exact, over the last 10,000."
    )
    for pool in pools:
        quantiles = (("0.5", pool.claim.p50_ms), ("0.9", pool.claim.p90_ms), ("0.99", pool.claim.p99_ms))
        for quantile, milliseconds in quantiles:
            yield f'cloche_claim_seconds{{pool="{pool.name}",quantile="{quantile}"}} {milliseconds / 1000:.6f}'
        yield f'cloche_claim_seconds_count{{pool="{pool.name}"}} {pool.claim.count}'


def _family(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {name} {words}", f"# TYPE {name} {kind}"
