"""MCP: sandboxes as tools of a coding agent.

    nouns     what each tool takes and gives, as structs; their JSON schemas are made from them
    tools     the table of tools, and what each does with a backend
    serving   the official SDK's server around them: requests, errors, progress, resources; stdio
    http      the same over streamable HTTP, for a server to mount
    clients   the configuration files of the agents that start us

Invariants:

* A failing command is a result; a failing sandbox (or a wrong argument) is an error that the model can read: code, message,
  hint. Only a tool that does not exist is a protocol error.
* A caller reaches only sandboxes that were made through MCP. A model that was talked into something must not get at the
  user's other sandboxes by an id that it has seen.
* Nothing outlives its cause: a cancelled call has killed what it started, and the end of a stdio client ends its sandboxes.

The SDK is imported by `serving` only, which is imported when it is used.
"""
