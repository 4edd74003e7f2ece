"""The handlers, a file per noun. Importing this package fills the table."""

from cloche.server.http.routes import (
    audits,
    contexts,
    describing,
    executions,
    files,
    images,
    journal,
    policies,
    ports,
    running,
    sandboxes,
    snapshots,
    stocks,
    upkeep,
    volumes,
)
from cloche.server.http.routes.table import TABLE

__all__ = [
    "TABLE",
    "audits",
    "contexts",
    "describing",
    "executions",
    "files",
    "images",
    "journal",
    "policies",
    "ports",
    "running",
    "sandboxes",
    "snapshots",
    "stocks",
    "upkeep",
    "volumes",
]
