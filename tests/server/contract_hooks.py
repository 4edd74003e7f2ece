"""What schemathesis is told about our server, beyond the document: things that are there, and sizes that fit this machine.

Half of the cases name what exists, so that they get past "not found". Numbers that would fill the machine or its time are kept small; that
large ones are refused is tested elsewhere. Loaded by schemathesis itself (`SCHEMATHESIS_HOOKS`), never by pytest.
"""

import copy
import os
import zlib
from collections.abc import MutableMapping
from typing import Any

import schemathesis

HERE = dict(pair.split("=", 1) for pair in os.environ["CONTRACT_HERE"].split())
MOST = {
    "size": 1, "count": 2, "min": 1, "max": 1, "timeout_s": 1, "wait_s": 0.1, "ready": 1, "background_after_s": 1, "memory_mib": 64,
    "cpus": 1, "pids": 64, "disk_mib": 64, "size_mib": 8, "ttl_s": 60,
}  # fmt: skip
FINAL = ("/extend", "/restore")  # these, like DELETE, would take what is there from the others


GOOD: dict[str, Any] = {
    "create_sandbox": {"labels": {"by": "schemathesis"}}, "create_context": {}, "exec_command": {"command": "true"},
    "start_execution": {"command": "true"}, "run_code": {"code": "6 * 7"}, "take_snapshot": {}, "fork_sandbox": {"count": 1},
}  # fmt: skip
"""Bodies that make something: chains of operations begin with one that worked."""


def _is_valid(case: Any) -> bool:
    return case.meta is not None and case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE


@schemathesis.serializer("application/x-tar")
def tar(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
    if context.operation.method.upper() != "DELETE" and not context.operation.path.endswith(FINAL):
        for name, value in (path_parameters or {}).items():
            if name in HERE and zlib.crc32(repr(value).encode()) % 2 == 0:
                path_parameters[name] = HERE[name]
    return path_parameters


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    name = case.operation.definition.raw.get("operationId")
    if name in GOOD and _is_valid(case) and zlib.crc32(repr(case.body).encode()) % 2 == 0:
        case.body = copy.deepcopy(GOOD[name])
    _shrink(case.query)
    _shrink(case.body)


def _number(value: Any) -> float:
    try:
        return 0.0 if isinstance(value, (bool, list, dict)) else float(value)
    except (TypeError, ValueError):
        return 0.0


def _shrink(given: Any) -> None:
    """Numbers of these names, wherever they stand."""
    if not isinstance(given, MutableMapping):
        return
    for name, value in list(given.items()):
        if name in MOST and _number(value) > MOST[name]:
            given[name] = MOST[name]
        _shrink(value)
