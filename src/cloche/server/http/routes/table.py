"""The one table that all handlers enter."""

from __future__ import annotations

from cloche.server.http import operations

TABLE = operations.Table()
operation = TABLE.operation
