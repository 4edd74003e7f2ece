"""The handlers, a file per noun. Importing this package fills the table."""

from cloche.server.http.routes import (
    contexts,
    executions,
    files,
    journal,
    policies,
    running,
    sandboxes,
    snapshots,
    stocks,
    volumes,
)
from cloche.server.http.routes.table import TABLE

__all__ = [
    "TABLE",
    "contexts",
    "executions",
    "files",
    "journal",
    "policies",
    "running",
    "sandboxes",
    "snapshots",
    "stocks",
    "volumes",
]
