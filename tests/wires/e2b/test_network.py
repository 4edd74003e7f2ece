"""E2B's rules are translated with their own precedence: what is allowed wins over what is denied."""

import ipaddress
from typing import Any

import pytest

from cloche.compat.e2b import faults, network


def made(internet: bool | None = None, **fields: Any) -> dict:
    return network.translate(network.Config(**fields), internet=internet)


def test_names_without_a_denied_rest_are_refused() -> None:
    with pytest.raises(faults.Fault, match=r"0\.0\.0\.0/0"):
        made(allow_out=["example.org"])
    with pytest.raises(faults.Fault, match="denyOut"):
        made(deny_out=["example.org"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("open", [], [])),
        ({"deny_out": ["0.0.0.0/0"]}, ("off", [], [])),
        ({"internet": False}, ("off", [], [])),
        ({"internet": False, "allow_out": ["a.test", "1.1.1.1"]}, ("rules", ["1.1.1.1/32", "a.test"], [])),
        ({"deny_out": ["0.0.0.0/0"], "allow_out": ["*.a.test"]}, ("rules", ["*.a.test"], [])),
        ({"deny_out": ["0.0.0.0/0"], "allow_out": ["0.0.0.0/0"]}, ("open", [], [])),
        ({"deny_out": ["8.8.8.8"]}, ("open", [], ["8.8.8.8/32"])),
        ({"deny_out": ["8.8.8.8"], "allow_out": ["8.8.8.0/24"]}, ("open", [], [])),
    ],
)
def test_translation(given: dict, expected: tuple) -> None:
    found = made(**given)
    assert (found["mode"], found["allow"], found["deny"]) == expected


def test_an_allowed_part_of_a_denied_network_is_left_out_of_it() -> None:
    left = [
        ipaddress.ip_network(part) for part in made(deny_out=["8.8.0.0/16"], allow_out=["8.8.8.0/24"])["deny"]
    ]
    inside, outside = ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("8.8.9.1")
    assert not any(inside in part for part in left)
    assert any(outside in part for part in left)
    assert sum(part.num_addresses for part in left) == 2**16 - 2**8
