"""The table of threats: each row of network, secret and configuration names the tests that try it, and those tests exist.

The rows are the classes of escape and bypass that this field has seen, with the advisories that taught them. A row is served by cases (an
attack beside its permitted twin, `Case.threat` names the row), by tests of their own, or both.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.security import attacks, test_attacks_network, test_attacks_secrets, test_attacks_workspace
from tests.security.attacks import Case

ROOT = Path(__file__).parents[1]
LEAST = 150


class Threat(NamedTuple):
    area: str
    lesson: str
    tests: tuple[str, ...] = ()
    """`file::test`, below tests/."""


NET, WORK, KEPT = (
    "security/test_attacks_network.py",
    "security/test_attacks_workspace.py",
    "security/test_attacks_secrets.py",
)
OFF = "security/test_network_off.py"
THREATS: dict[str, Threat] = {
    # the network
    "allow and deny": Threat("network", "what no rule allows is refused, by name and by address, on every way out"),
    "empty allow list": Threat(
        "network", "CVE-2025-66479: an empty list denies all", (f"{NET}::test_an_empty_list_is_no_network",)
    ),
    "NUL and CR LF": Threat(
        "network",
        "a NUL in a SOCKS5 host passed the match and was cut by the resolver: match and dial one canonical value",
        (f"{NET}::test_every_spelling_on_every_way_out_of_a_live_sandbox",
         "security/test_spellings.py::test_a_spelling_without_one_meaning_is_refused_everywhere"),
    ),
    "wildcard apex": Threat("network", "*.x is not x, and nothing that merely ends alike"),
    "port rule": Threat("network", "a rule with a port allows that port"),
    "method rule": Threat(
        "network", "a broad host is not a trusted tenant (CVE-2026-54316): methods and paths narrow it, however they are spelled",
        ("engine/test_network.py::test_methods_and_paths_are_seen_in_tls",),
    ),
    "upload cap": Threat("network", "what may be sent can be bounded", (f"{NET}::test_an_upload_is_cut_at_its_cap",)),
    "domain fronting": Threat("network", "the host of the request is the host of the connection; no second request hides in the first"),
    "SNI mismatch": Threat("network", "the name in the greeting is the name of the tunnel"),
    "nested CONNECT": Threat("network", "no tunnel within a tunnel to an allowed host"),
    "proxy env ignored": Threat(
        "network", "a client that knows no proxy is captured all the same",
        ("egress/test_real_clients.py", "egress/test_clients.py::test_captured_traffic_on_any_port_and_both_families"),
    ),
    "DNS exfil": Threat(
        "network", "CVE-2025-55284: a name that no rule matches is never asked outside",
        (f"{NET}::test_a_name_that_no_rule_matches_is_never_asked_outside", f"{OFF}::test_names_are_not_resolved"),
    ),
    "odd IP spellings": Threat(
        "network", "decimal, octal, hexadecimal, short, mapped, zoned: one meaning or none",
        ("security/test_spellings.py::test_what_is_not_public_is_refused_in_every_spelling_even_when_open",),
    ),
    "IPv6": Threat("network", "the same rules for the other family"),
    "private addresses": Threat("network", "an open network does not lead inward"),
    "IMDS": Threat(
        "network", "metadata services are refused in every form, whatever a rule says",
        ("security/test_spellings.py::test_no_rule_reaches_a_metadata_service",),
    ),
    "DNS rebinding": Threat("network", "resolved once, checked, and that address dialled"),
    "redirects to denied host": Threat("network", "a redirection comes back to the proxy"),
    "UDP": Threat("network", "nothing but TCP and the name service", ("egress/test_clients.py::test_nothing_but_tcp_and_dns_goes_anywhere",)),
    "raw sockets and ICMP": Threat(
        "network", "families and kinds that no rule could judge are not made",
        (f"{NET}::test_other_sockets_cannot_be_made", f"{OFF}::test_no_echo_is_sent"),
    ),
    "host loopback": Threat(
        "network", "the host's loopback has one name and needs a rule",
        (f"{NET}::test_the_host_s_loopback_is_reached_only_by_its_name_and_a_rule", f"{OFF}::test_the_host_is_not_reached"),
    ),
    "own loopback": Threat(
        "network", "servers and clients inside always meet",
        (f"{NET}::test_the_sandbox_s_own_loopback_always_works", f"{OFF}::test_a_server_and_its_client_inside_meet"),
    ),
    "capture taken down": Threat(
        "network", "nobody inside may change routes, rules or namespaces",
        (f"{NET}::test_the_capture_cannot_be_taken_down", f"{OFF}::test_the_network_cannot_be_reconfigured"),
    ),
    "unix sockets in files": Threat(
        "network", "docker, ssh-agent, dbus, X11, gpg", (f"{OFF}::test_sockets_in_the_host_s_files_are_not_reached",)
    ),
    "abstract sockets": Threat("network", "they belong to the namespace", (f"{OFF}::test_abstract_sockets_of_the_host_are_not_reached",)),
    "rules that change": Threat(
        "network", "new rules hold at once, for connections that are there too",
        (f"{NET}::test_rules_that_change_hold_at_once", "egress/test_proxy.py::test_tightening_ends_what_it_refuses_and_spares_the_rest"),
    ),
    "proxy gone": Threat(
        "network", "no proxy, no network, and never an open one",
        ("engine/test_network.py::test_a_killed_proxy_is_replaced_and_the_command_is_told",
         "engine/test_network.py::test_with_no_proxy_there_is_no_sandbox"),
    ),
    "browser on a local server": Threat("network", "Host and Origin are checked", ("server/test_http.py::test_a_web_page_is_refused",)),
    "calls home": Threat(
        "network", "Cloche opens no connection of its own accord", ("security/test_no_calls_home.py::test_a_run_connects_to_nothing",)
    ),
    # secrets
    "env secrets": Threat("secrets", "nothing of the caller's environment enters, and nothing that is handed in is written down"),
    "reads of home": Threat("files", "keys, tokens, histories and browser profiles are not shown"),
    "credentials": Threat(
        "secrets", "a placeholder inside; the value goes to its host, in its field, and no echo comes back",
        (f"{KEPT}::test_a_stolen_placeholder_is_worth_nothing",
         f"{KEPT}::test_the_value_is_nowhere_inside_and_nowhere_written_down"),
    ),
    "inherited descriptors": Threat(
        "secrets", "what the caller has open stays the caller's", ("security/test_descriptors.py::test_descriptors_of_the_caller_do_not_enter",)
    ),
    "cross-run leaks": Threat(
        "secrets", "nothing of a former sandbox is found in the next", ("security/test_tenants.py::test_nothing_of_a_former_sandbox_is_found",)
    ),
    # files
    "writes outside": Threat("files", "only the workspace is written, whatever leads out of it"),
    "symlinks followed outside": Threat(
        "files", "CVE-2026-39861: what the host opens for a sandbox is opened inside it",
        ("security/test_files.py::test_a_planted_symlink_leads_nowhere",
         "security/test_files.py::test_a_directory_swapped_for_a_symlink_is_not_followed"),
    ),
    # configuration
    "git hooks and config": Threat(
        "config", "CVE-2026-19592, CVE-2026-19593: what the host's git would run does not reach it",
        (f"{WORK}::test_a_bare_repository_planted_in_the_workspace_runs_nothing",
         f"{WORK}::test_a_submodule_planted_in_the_index_runs_nothing"),
    ),
    "agent config": Threat(
        "config", "CVE-2026-25725, CVE-2025-61260, CVE-2026-21852: control files of agents, shells and editors stay, there or not yet there"
    ),
    "renamed parents": Threat(
        "config", "ancestors are pinned", ("workspaces/test_protection.py::test_every_protected_name_withstands_every_attack",)
    ),
    "roots from a call": Threat(
        "config", "CVE-2025-59532: what is writable is fixed when the sandbox is made",
        ("security/test_descriptors.py::test_the_caller_s_directory_is_not_the_command_s",),
    ),
    "project policy": Threat(
        "config", "a file in the workspace only tightens, until its owner trusts it",
        ("policy/test_layers.py::test_tightening_never_loosens", "policy/test_layers.py::test_what_cannot_tighten_is_refused_until_trusted"),
    ),
    "policy not applied": Threat(
        "config", "unreadable, unknown or unenforceable: no sandbox",
        ("security/test_fail_closed.py::test_unreadable_settings_make_nothing",
         "security/test_fail_closed.py::test_an_unknown_field_of_a_policy_is_refused",
         "security/test_fail_closed.py::test_a_required_feature_that_is_not_there_makes_nothing"),
    ),
}  # fmt: skip

BY_AREA: dict[str, list[Case]] = {
    "network": [*test_attacks_network.CASES, *test_attacks_network.INWARD_CASES],
    "secrets": [*test_attacks_secrets.CASES, *test_attacks_secrets.CREDENTIAL_CASES],
    "config": [*test_attacks_workspace.CASES, *test_attacks_workspace.GIT_CASES],
    "files": [*test_attacks_workspace.READ_CASES, *test_attacks_workspace.WRITE_CASES],
}
CASES = [case for cases in BY_AREA.values() for case in cases]


def test_there_are_enough_attacks_in_every_area() -> None:
    assert set(BY_AREA) == set(attacks.AREAS)
    assert all(len(cases) >= 25 for cases in BY_AREA.values()), {
        area: len(cases) for area, cases in BY_AREA.items()
    }
    assert len(CASES) >= LEAST


def test_every_attack_is_another_one_and_has_its_twin() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(case.permitted for case in CASES)


def test_every_attack_belongs_to_a_threat() -> None:
    assert {case.threat for case in CASES} <= set(THREATS)


@pytest.mark.parametrize("name", THREATS)
def test_every_threat_is_tried(name: str) -> None:
    threat = THREATS[name]
    assert threat.area in attacks.AREAS
    assert threat.tests or any(case.threat == name for case in CASES)
    for reference in threat.tests:
        file, _, test = reference.partition("::")
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        }
        assert functions if not test else test in functions, reference
