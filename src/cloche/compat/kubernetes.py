"""Manifests of kubernetes-sigs/agent-sandbox (v1beta1, v1alpha1), read as nouns of ours.

A `SandboxTemplate` is accepted as it is. The rule for each field: what can be honoured on this machine is; what bears on
security and cannot be honoured is refused by name (`field_refused`), because a template that asked for a boundary must not
run without it; everything else has no meaning here and is listed in `warnings`. A field that is in no list is an error.

The pod's first container is the sandbox. Its `image` is the template's, its limits are the resources (requests where there
are none), `env` with plain values is the env, `command` and `args` become the first startup action, started in the
background, because a pod's container is what keeps running; probes become `wait_for`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from cloche import errors, model, stock

GROUP = "extensions.agents.x-k8s.io"
VERSIONS = ("v1beta1", "v1alpha1")
MAX_FILE = 1 << 20

# Kept by what a sandbox is anyway: asking for it is asking for nothing more.
_GIVEN: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "hostNetwork": False,
    "hostPID": False,
    "hostIPC": False,
    "shareProcessNamespace": False,
    "privileged": False,
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
}
# They bear on security, and nothing here holds them.
_REFUSED = {
    "hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "privileged", "allowPrivilegeEscalation",
    "procMount", "seLinuxOptions", "appArmorProfile", "windowsOptions", "hostUsers", "supplementalGroups", "sysctls",
    "volumeDevices", "ephemeralContainers", "automountServiceAccountToken", "envFrom", "volumes", "volumeMounts",
    "initContainers", "fsGroup", "resourceClaims", "runtimeClassName", "imagePullSecrets", "runAsGroup",
}  # fmt: skip
# They are about a cluster: where a pod runs and who restarts it.
_MEANINGLESS = {
    "restartPolicy", "terminationGracePeriodSeconds", "dnsPolicy", "dnsConfig", "nodeSelector", "nodeName", "affinity",
    "tolerations", "topologySpreadConstraints", "schedulerName", "priority", "priorityClassName", "preemptionPolicy",
    "hostname", "subdomain", "hostAliases", "enableServiceLinks", "serviceAccountName", "serviceAccount", "overhead",
    "readinessGates", "setHostnameAsFQDN", "schedulingGates", "activeDeadlineSeconds", "imagePullPolicy",
    "terminationMessagePath", "terminationMessagePolicy", "lifecycle", "livenessProbe", "resizePolicy", "stdin",
    "stdinOnce", "tty", "fsGroupChangePolicy", "os",
}  # fmt: skip


class Template(NamedTuple):
    spec: stock.TemplateSpec
    warnings: tuple[str, ...]


def load_template(path: str) -> Template:
    """A template from a YAML file: ours, or a manifest."""
    return read_template(_read(path), path)


def read_template(text: str, where: str = "the template") -> Template:
    data = _parse(text, where)
    if not isinstance(data, dict):
        raise errors.error("template_invalid", f"{where} is not a mapping of fields", hint="name: data")
    if "apiVersion" in data or "kind" in data:
        return from_manifest(data)
    try:
        return Template(msgspec.convert(data, stock.TemplateSpec), ())
    except msgspec.ValidationError as problem:
        code = "field_unknown" if "unknown field" in str(problem) else "template_invalid"
        raise errors.error(code, f"{where}: {problem}", hint="see docs/concepts/templates.md") from None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE + 1)
    except OSError as problem:
        raise errors.error("file_not_found", f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise errors.error("template_invalid", f"{path} is not UTF-8 text") from None
    if len(text) > MAX_FILE:
        raise errors.error("template_invalid", f"{path} exceeds 1 MiB")
    return text


def _parse(text: str, where: str) -> Any:
    import yaml  # only who brings YAML pays for it

    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as problem:
        raise errors.error("template_invalid", f"{where} is not YAML: {problem}") from None
    if len(documents) != 1:
        raise errors.error(
            "template_invalid",
            f"{where} holds {len(documents)} documents; one is wanted",
            hint="split the file",
        )
    return documents[0]


# ── SandboxTemplate ────────────────────────────────────────────────────────────────────────────────


class _Reader:
    """Walks a manifest and remembers what had no meaning."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def take(self, data: dict[str, Any], path: str, known: set[str]) -> dict[str, Any]:
        """The known fields; the others are judged by name."""
        found = {}
        for field, value in data.items():
            where = f"{path}.{field}"
            if field in known:
                found[field] = value
            elif field in _GIVEN and value == _GIVEN[field]:
                continue
            elif field in _REFUSED and value not in (None, [], {}):
                raise _refuse(where, value)
            elif field in _MEANINGLESS or value in (None, [], {}):
                self.warnings.append(f"{where} has no meaning here")
            else:
                raise errors.error("field_unknown", f"{where} is not a field that Cloche knows", field=where)
        return found


def _refuse(where: str, value: Any) -> errors.ClocheError:
    return errors.error(
        "field_refused",
        f"{where} bears on security and cannot be honoured on this machine (it is {str(value)[:100]!r})",
        hint="leave it out of the template, or run it on a cluster",
        field=where,
    )


def from_manifest(data: dict[str, Any]) -> Template:
    kind, version = data.get("kind"), str(data.get("apiVersion", ""))
    if kind != "SandboxTemplate" or version not in [f"{GROUP}/{v}" for v in VERSIONS]:
        raise errors.error(
            "template_invalid",
            f"this is a {kind or 'manifest without kind'} of {version or 'no apiVersion'}; a SandboxTemplate is wanted",
            hint=f"apiVersion: {GROUP}/v1beta1, kind: SandboxTemplate",
        )
    reader = _Reader()
    top = reader.take(data, "", {"apiVersion", "kind", "metadata", "spec", "status"})
    metadata = _mapping(top.get("metadata"), "metadata")
    name = str(metadata.get("name", ""))
    spec = reader.take(
        _mapping(top.get("spec"), "spec"),
        "spec",
        {
            "podTemplate", "service", "networkPolicy", "networkPolicyManagement", "envVarsInjectionPolicy",
            "volumeClaimTemplates", "volumeClaimTemplatesPolicy",
        },
    )  # fmt: skip
    _whole_template(reader, spec)
    pod = _mapping(spec.get("podTemplate"), "spec.podTemplate")
    pod = reader.take(pod, "spec.podTemplate", {"spec", "metadata"})
    fields = _pod(reader, _mapping(pod.get("spec"), "spec.podTemplate.spec"), "spec.podTemplate.spec")
    labels = {
        **_texts(_mapping(metadata.get("labels"), "metadata.labels")),
        **_texts(_mapping(_mapping(pod.get("metadata"), "").get("labels"), "")),
    }
    made = stock.TemplateSpec(name=name, labels=labels, policy=_network(reader, spec), **fields)
    return Template(made, tuple(reader.warnings))


def _whole_template(reader: _Reader, spec: dict[str, Any]) -> None:
    if spec.get("volumeClaimTemplates"):
        raise _refuse("spec.volumeClaimTemplates", "a list; use volumes of ours instead")
    for field in ("service", "volumeClaimTemplatesPolicy"):
        if spec.get(field) is not None:
            reader.warnings.append(f"spec.{field} has no meaning here")
    if spec.get("envVarsInjectionPolicy") == "Disallowed":
        reader.warnings.append("spec.envVarsInjectionPolicy: claims here may always bind env")


def _pod(reader: _Reader, pod: dict[str, Any], path: str) -> dict[str, Any]:
    taken = reader.take(pod, path, {"containers", "securityContext"})
    containers = taken.get("containers") or []
    if not containers:
        raise errors.error("template_invalid", f"{path}.containers is empty; the first one is the sandbox")
    if len(containers) > 1:
        raise _refuse(f"{path}.containers[1]", "a second container; a sandbox is one")
    fields = _security(reader, _mapping(taken.get("securityContext"), ""), f"{path}.securityContext")
    container = _mapping(containers[0], f"{path}.containers[0]")
    return {**fields, **_container(reader, container, f"{path}.containers[0]")}


def _container(reader: _Reader, data: dict[str, Any], path: str) -> dict[str, Any]:
    known = {
        "name", "image", "command", "args", "env", "ports", "resources", "workingDir", "securityContext",
        "readinessProbe", "startupProbe",
    }  # fmt: skip
    taken = reader.take(data, path, known)
    fields: dict[str, Any] = _security(
        reader, _mapping(taken.get("securityContext"), ""), f"{path}.securityContext"
    )
    if taken.get("image"):
        fields["image"] = str(taken["image"])
    if taken.get("workingDir"):
        fields["cwd"] = str(taken["workingDir"])
    fields["env"] = _environment(taken.get("env") or [], f"{path}.env")
    fields["ports"] = tuple(int(port["containerPort"]) for port in taken.get("ports") or [])
    fields["resources"] = _resources(reader, _mapping(taken.get("resources"), ""), f"{path}.resources")
    fields["startup"] = tuple(_startup(reader, taken, path))
    fields["timeout_s"] = None  # a pod has no end of its own
    return fields


def _environment(entries: list[Any], path: str) -> dict[str, str]:
    found = {}
    for index, entry in enumerate(entries):
        if "valueFrom" in entry:
            raise _refuse(f"{path}[{index}].valueFrom", entry["valueFrom"])
        found[str(entry["name"])] = str(entry.get("value", ""))
    return found


def _security(reader: _Reader, data: dict[str, Any], path: str) -> dict[str, Any]:
    taken = reader.take(data, path, {"runAsUser", "readOnlyRootFilesystem", "capabilities", "seccompProfile"})
    fields: dict[str, Any] = {}
    if taken.get("runAsUser") == 0:
        fields["user"] = "root"
    elif taken.get("runAsUser") not in (None, 1000):
        raise _refuse(f"{path}.runAsUser", f"{taken['runAsUser']}; users inside are root (0) and user (1000)")
    if taken.get("readOnlyRootFilesystem"):
        fields["profile"] = "restrictive"
        reader.warnings.append(f"{path}.readOnlyRootFilesystem is the profile 'restrictive'")
    added = _mapping(taken.get("capabilities"), "").get("add")
    if added:
        raise _refuse(f"{path}.capabilities.add", added)
    profile = _mapping(taken.get("seccompProfile"), "").get("type")
    if profile not in (None, "RuntimeDefault"):
        raise _refuse(f"{path}.seccompProfile", profile)
    return fields


def _resources(reader: _Reader, data: dict[str, Any], path: str) -> model.Resources:
    taken = reader.take(data, path, {"limits", "requests", "claims"})
    wanted = {**_mapping(taken.get("requests"), ""), **_mapping(taken.get("limits"), "")}
    fields: dict[str, Any] = {}
    for name, value in wanted.items():
        match name:
            case "memory":
                fields["memory_mib"] = max(8, round(quantity(value, path) / (1 << 20)))
            case "cpu":
                fields["cpus"] = quantity(value, path)
            case "ephemeral-storage":
                fields["disk_mib"] = max(4, round(quantity(value, path) / (1 << 20)))
            case _:
                reader.warnings.append(f"{path}: {name} has no meaning here")
    return model.Resources(**fields)


_QUANTITY = re.compile(r"([0-9.]+)([a-zA-Z]*)")
_SUFFIX = {
    "": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
}  # fmt: skip


def quantity(text: Any, path: str) -> float:
    """A Kubernetes quantity as a number: `512Mi`, `250m`, `1.5`."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in _SUFFIX:
        raise errors.error("template_invalid", f"{path}: {text!r} is not a quantity", field=path)
    try:
        return float(match[1]) * _SUFFIX[match[2]]
    except ValueError:
        raise errors.error("template_invalid", f"{path}: {text!r} is not a quantity", field=path) from None


def _startup(reader: _Reader, container: dict[str, Any], path: str) -> list[model.Action]:
    argv = [str(word) for word in (*(container.get("command") or []), *(container.get("args") or []))]
    found = []
    if argv:
        # It goes on: a container's command is what the pod is for.
        found.append(model.Action(run=["/bin/sh", "-c", '"$@" >/tmp/container.log 2>&1 &', "sh", *argv]))
    for name in ("startupProbe", "readinessProbe"):
        if container.get(name):
            probe = _probe(reader, _mapping(container[name], ""), f"{path}.{name}")
            found.append(model.Action(wait_for=probe))
    return found


def _probe(reader: _Reader, data: dict[str, Any], path: str) -> model.Probe:
    known = {
        "exec", "httpGet", "tcpSocket", "periodSeconds", "failureThreshold", "timeoutSeconds", "initialDelaySeconds",
        "successThreshold", "grpc", "terminationGracePeriodSeconds",
    }  # fmt: skip
    taken = reader.take(data, path, known)
    every = float(taken.get("periodSeconds", 10))
    patience = max(30.0, every * float(taken.get("failureThreshold", 3)))
    if "exec" in taken:
        command = [str(word) for word in taken["exec"]["command"]]
        return model.Probe(command=command, timeout_s=patience, every_s=min(every, 1.0))
    for kind in ("httpGet", "tcpSocket", "grpc"):
        if kind in taken:
            if kind == "httpGet":
                reader.warnings.append(f"{path}.httpGet is a connection to its port here")
            port = taken[kind].get("port")
            if not isinstance(port, int):
                raise errors.error("template_invalid", f"{path}.{kind}.port is {port!r}; a number is wanted")
            return model.Probe(port=port, timeout_s=patience, every_s=min(every, 1.0))
    raise errors.error("template_invalid", f"{path} has no exec, httpGet, tcpSocket or grpc")


def _network(reader: _Reader, spec: dict[str, Any]) -> dict[str, Any]:
    """CIDR rules of a network policy; selectors of pods and namespaces are a cluster's."""
    if spec.get("networkPolicyManagement") == "Unmanaged":
        raise _refuse(
            "spec.networkPolicyManagement", "Unmanaged; the network here is off unless rules open it"
        )
    given = spec.get("networkPolicy")
    if given is None:
        return {}
    rules = reader.take(_mapping(given, "spec.networkPolicy"), "spec.networkPolicy", {"ingress", "egress"})
    if rules.get("ingress"):
        reader.warnings.append("spec.networkPolicy.ingress has no meaning here: nothing reaches in by itself")
    allow: list[str] = []
    for index, rule in enumerate(rules.get("egress") or []):
        allow += _egress(rule, f"spec.networkPolicy.egress[{index}]")
    return {"network": {"mode": "rules", "allow": allow}} if "egress" in rules else {}


def _egress(rule: dict[str, Any], path: str) -> list[str]:
    ports = [str(port["port"]) for port in rule.get("ports") or [] if port.get("protocol", "TCP") == "TCP"]
    if any(port.get("protocol", "TCP") != "TCP" for port in rule.get("ports") or []):
        raise _refuse(f"{path}.ports", "a protocol other than TCP")
    blocks = []
    for index, peer in enumerate(rule.get("to") or []):
        block = _mapping(peer.get("ipBlock"), "") if set(peer) == {"ipBlock"} else None
        if block is None:
            raise _refuse(f"{path}.to[{index}]", peer)
        if block.get("except"):
            raise _refuse(f"{path}.to[{index}].ipBlock.except", block["except"])
        blocks.append(str(block["cidr"]))
    if not blocks:
        raise _refuse(path, "a rule without `to`; say which addresses")
    return [f"{block}:{port}" for block in blocks for port in ports] if ports else blocks


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise errors.error("template_invalid", f"{path} is not a mapping of fields")
    return value


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}
