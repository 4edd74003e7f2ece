"""Manifests of agent-sandbox: what bears on security and cannot be honoured is refused by name, the rest works or is listed."""

import copy
from typing import Any

import pytest

from cloche import errors, model
from cloche.compat import kubernetes
from cloche.engine import templates

MANIFEST: dict[str, Any] = {
    "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
    "kind": "SandboxTemplate",
    "metadata": {"name": "python-runtime", "labels": {"team": "data"}},
    "spec": {
        "podTemplate": {
            "metadata": {"labels": {"sandbox": "python"}},
            "spec": {
                "automountServiceAccountToken": False,
                "restartPolicy": "Never",
                "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
                "containers": [
                    {
                        "name": "python-runtime",
                        "image": "registry.example/python-runtime:v1",
                        "command": ["python3", "-m", "http.server"],
                        "args": ["8888"],
                        "ports": [{"containerPort": 8888}],
                        "env": [{"name": "MODE", "value": "test"}],
                        "workingDir": "/srv",
                        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1},
                        "resources": {
                            "requests": {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "2Gi"},
                            "limits": {"memory": "1Gi"},
                        },
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
            },
        },
        "networkPolicy": {
            "egress": [
                {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 5432}, {"port": 443}]}
            ]
        },
        "envVarsInjectionPolicy": "Allowed",
    },
}


def changed(path, value):
    made = copy.deepcopy(MANIFEST)
    place: Any = made
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part)] if part.isdigit() else place.setdefault(part, {})
    place[last] = value
    return made


POD = "spec.podTemplate.spec"
REFUSED = [
    (f"{POD}.hostNetwork", True),
    (f"{POD}.hostPID", True),
    (f"{POD}.hostIPC", True),
    (f"{POD}.automountServiceAccountToken", True),
    (f"{POD}.runtimeClassName", "gvisor"),
    (f"{POD}.volumes", [{"name": "v", "hostPath": {"path": "/"}}]),
    (f"{POD}.initContainers", [{"name": "i"}]),
    (f"{POD}.containers.0.volumeMounts", [{"name": "v", "mountPath": "/v"}]),
    (f"{POD}.containers.0.envFrom", [{"secretRef": {"name": "s"}}]),
    (f"{POD}.containers.0.env", [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
    (f"{POD}.containers.0.securityContext.privileged", True),
    (f"{POD}.containers.0.securityContext.allowPrivilegeEscalation", True),
    (f"{POD}.containers.0.securityContext.capabilities", {"add": ["NET_ADMIN"]}),
    (f"{POD}.containers.0.securityContext.seccompProfile", {"type": "Unconfined"}),
    (f"{POD}.containers.0.securityContext.runAsUser", 4711),
    (f"{POD}.containers.0.securityContext.appArmorProfile", {"type": "Localhost"}),
    ("spec.volumeClaimTemplates", [{"metadata": {"name": "v"}}]),
    ("spec.networkPolicyManagement", "Unmanaged"),
    ("spec.networkPolicy", {"egress": [{"to": [{"podSelector": {}}]}]}),
    ("spec.networkPolicy", {"egress": [{}]}),
    (
        "spec.networkPolicy",
        {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]}]},
    ),
    (
        "spec.networkPolicy",
        {
            "egress": [
                {"to": [{"ipBlock": {"cidr": "1.1.1.1/32"}}], "ports": [{"port": 53, "protocol": "UDP"}]}
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=lambda value: str(value)[-60:])
def test_what_bears_on_security_and_cannot_be_honoured_is_refused_by_name(path, value):
    with pytest.raises(errors.ClocheError) as caught:
        kubernetes.from_manifest(changed(path, value))
    assert caught.value.code == "field_refused"
    assert path.split(".")[-1].split("[")[0].rstrip("0123456789") in caught.value.message


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (f"{POD}.gpus", 1, "field_unknown"),
        ("spec.replicas", 3, "field_unknown"),
        ("kind", "Deployment", "template_invalid"),
        ("apiVersion", "v1", "template_invalid"),
        (f"{POD}.containers", [], "template_invalid"),
        (f"{POD}.containers.0.resources", {"limits": {"memory": "lots"}}, "template_invalid"),
    ],
)
def test_what_is_not_such_a_manifest_is_an_error(path, value, code):
    with pytest.raises(errors.ClocheError) as caught:
        kubernetes.from_manifest(changed(path, value))
    assert caught.value.code == code


def test_a_manifest_is_taken_as_it_is():
    spec, warnings = kubernetes.from_manifest(MANIFEST)
    assert spec.name == "python-runtime"
    assert spec.image == "registry.example/python-runtime:v1"
    assert spec.labels == {"team": "data", "sandbox": "python"}
    assert spec.env == {"MODE": "test"}
    assert spec.cwd == "/srv"
    assert spec.ports == (8888,)
    assert spec.resources == model.Resources(memory_mib=1024, cpus=0.25, disk_mib=2048)
    assert spec.timeout_s is None
    assert spec.policy == {"network": {"mode": "rules", "allow": ["10.1.0.0/16:5432", "10.1.0.0/16:443"]}}
    run, wait = spec.startup
    assert run.run is not None
    assert list(run.run)[-4:] == ["python3", "-m", "http.server", "8888"]
    assert wait.wait_for is not None
    assert wait.wait_for.port == 8888
    assert [w for w in warnings if "restartPolicy" in w]
    assert [w for w in warnings if "httpGet" in w]
    templates.check(spec)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- a\n- b", "template_invalid"),
        ("name: [", "template_invalid"),
        ("name: a\n---\nname: b", "template_invalid"),
        ("", "template_invalid"),
        ("name: a\ncolour: blue", "field_unknown"),
        ("name: a\nenv: 7", "template_invalid"),
        ("name: !!python/object/apply:os.system ['true']", "template_invalid"),
    ],
)
def test_a_file_that_is_no_template_is_an_error(text, code):
    with pytest.raises(errors.ClocheError) as caught:
        kubernetes.read_template(text)
    assert caught.value.code == code


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(errors.NotFound):
        kubernetes.load_template(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    ("text", "number"), [("512Mi", 512 << 20), ("1.5", 1.5), ("250m", 0.25), ("2G", 2e9), (1, 1.0)]
)
def test_quantities(text, number):
    assert kubernetes.quantity(text, "x") == number
