"""What an attack is: a thing that must not happen, beside the thing closest to it that must.

Each is judged by its effect outside: what a server of ours noted, what lies on the host's disk, whether a planted token came out. A
case names the row of THREATS that it stands for; `test_threats.py` counts them and sees that no row is left without one.
"""

from typing import Any, NamedTuple

AREAS = ("files", "network", "secrets", "config")


class Case(NamedTuple):
    id: str
    threat: str
    forbidden: Any
    permitted: Any
