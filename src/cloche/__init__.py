"""Cloche: a glass bell for the code that AI agents write.

The public names, resolved on first use so that a command pays only for what it touches. They are listed three times: for
type checkers, for `import *`, and with their homes for `__getattr__`; tests/sdk/test_public_names.py compares.
"""

TYPE_CHECKING = False  # what `typing` calls it; importing `typing` would cost a command more than all of this
if TYPE_CHECKING:
    from cloche.errors import (
        CapacityExceeded,
        ClocheError,
        CommandFailed,
        Conflict,
        InternalError,
        InvalidInput,
        NotFound,
        NotSupported,
        PolicyRefused,
        SandboxError,
        SandboxLost,
        ServerUnavailable,
    )
    from cloche.model import (
        AccessToken,
        CodeBegan,
        CodeEnded,
        CodeError,
        CodeEvent,
        CodeFailed,
        CodeOutput,
        CodeResult,
        CodeShown,
        ContextInfo,
        Denial,
        Denied,
        ExecResult,
        ExecutionInfo,
        Exited,
        FileEvent,
        FileInfo,
        ImageInfo,
        ImageProgress,
        Isolation,
        Limit,
        Output,
        PortInfo,
        SandboxInfo,
        SandboxUsage,
        StreamEvent,
        Truncated,
    )
    from cloche.policy import Policy
    from cloche.sdk.pools import (
        AsyncPool,
        Template,
    )
    from cloche.sdk.sandboxes import (
        AsyncContext,
        AsyncForward,
        AsyncImage,
        AsyncProcess,
        AsyncSandbox,
        AsyncSnapshot,
        AsyncTunnel,
        AsyncVolume,
    )
    from cloche.sdk.sync import (
        Context,
        Forward,
        Image,
        Process,
        Sandbox,
        Snapshot,
        Tunnel,
        Volume,
        run,
    )
    from cloche.sdk.sync_pools import (
        Pool,
        put_template,
    )
    from cloche.stock import (
        ClaimInfo,
        PoolInfo,
        Requirements,
        SnapshotInfo,
        TemplateInfo,
        VolumeInfo,
    )

__version__ = "0.1.0"

__all__ = [
    "AccessToken",
    "AsyncContext",
    "AsyncForward",
    "AsyncImage",
    "AsyncPool",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSnapshot",
    "AsyncTunnel",
    "AsyncVolume",
    "CapacityExceeded",
    "ClaimInfo",
    "ClocheError",
    "CodeBegan",
    "CodeEnded",
    "CodeError",
    "CodeEvent",
    "CodeFailed",
    "CodeOutput",
    "CodeResult",
    "CodeShown",
    "CommandFailed",
    "Conflict",
    "Context",
    "ContextInfo",
    "Denial",
    "Denied",
    "ExecResult",
    "ExecutionInfo",
    "Exited",
    "FileEvent",
    "FileInfo",
    "Forward",
    "Image",
    "ImageInfo",
    "ImageProgress",
    "InternalError",
    "InvalidInput",
    "Isolation",
    "Limit",
    "NotFound",
    "NotSupported",
    "Output",
    "Policy",
    "PolicyRefused",
    "Pool",
    "PoolInfo",
    "PortInfo",
    "Process",
    "Requirements",
    "Sandbox",
    "SandboxError",
    "SandboxInfo",
    "SandboxLost",
    "SandboxUsage",
    "ServerUnavailable",
    "Snapshot",
    "SnapshotInfo",
    "StreamEvent",
    "Template",
    "TemplateInfo",
    "Truncated",
    "Tunnel",
    "Volume",
    "VolumeInfo",
    "put_template",
    "run",
]

_HOMES = {
    "cloche.errors": (
        "CapacityExceeded ClocheError CommandFailed Conflict InternalError InvalidInput NotFound "
        "NotSupported PolicyRefused SandboxError SandboxLost ServerUnavailable"
    ),
    "cloche.model": (
        "AccessToken CodeBegan CodeEnded CodeError CodeEvent CodeFailed CodeOutput CodeResult CodeShown ContextInfo Denial Denied "
        "ExecResult ExecutionInfo Exited FileEvent "
        "FileInfo ImageInfo ImageProgress Isolation Limit Output PortInfo SandboxInfo SandboxUsage StreamEvent Truncated"
    ),
    "cloche.policy": "Policy",
    "cloche.sdk.pools": "AsyncPool Template",
    "cloche.sdk.sandboxes": "AsyncContext AsyncForward AsyncImage AsyncProcess AsyncSandbox AsyncSnapshot AsyncTunnel AsyncVolume",
    "cloche.sdk.sync": "Context Forward Image Process Sandbox Snapshot Tunnel Volume run",
    "cloche.sdk.sync_pools": "Pool put_template",
    "cloche.stock": "ClaimInfo PoolInfo Requirements SnapshotInfo TemplateInfo VolumeInfo",
}


if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for an object

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for home, names in _HOMES.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(home), name)
                return value
        raise AttributeError(f"module 'cloche' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
