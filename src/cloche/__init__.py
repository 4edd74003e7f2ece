"""Cloche: a glass bell for the code that AI agents write.

The public names, resolved on first use so that a command pays only for what it touches.
"""

__version__ = "0.1.0"

_HOMES = {
    "AsyncSandbox": "cloche.sdk.sandboxes",
    "ClocheError": "cloche.errors",
    "CodeResult": "cloche.model",
    "CommandFailed": "cloche.errors",
    "Denial": "cloche.model",
    "ExecResult": "cloche.model",
    "FileInfo": "cloche.model",
    "Policy": "cloche.policy",
    "Sandbox": "cloche.sdk.sync",
    "SandboxInfo": "cloche.model",
    "run": "cloche.sdk.sync",
}

__all__ = [
    "AsyncSandbox",
    "ClocheError",
    "CodeResult",
    "CommandFailed",
    "Denial",
    "ExecResult",
    "FileInfo",
    "Policy",
    "Sandbox",
    "SandboxInfo",
    "run",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cloche' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
