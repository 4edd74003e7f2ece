"""E2B's wire: its control plane and its data plane, spoken so that E2B's own clients work against this server unmodified.

* *A face never decides.* Each call becomes calls of a guarded `interfaces.Backend`; what is here is spelling, and the little that E2B
  promises and our nouns have no word for (which watcher, which tag, what a client called its process), kept per sandbox while it lives.
* *Path first, header second, host before both.* Some clients send the routing headers on every request, so a path of the control
  plane is the control plane's whatever the headers say. A host name `<port>-<sandbox>.<domain>` is always the data plane.
* *What is not honoured says so.* `control.TABLE` lists the whole control plane; a row without a handler answers 501 with its name,
  and so does a field of a request that asks for something we would have to ignore.
* *Two tokens, both ours to check.* A sandbox's access token opens its files and processes, its traffic token the code interpreter.
  Each stands for the key that asked for it, as that key is now: a revoked key's tokens open nothing.
* Three failures are three errors: a sandbox that is gone (502, "was not found"), a port that nothing listens on (502, "port is not open"),
  and a command that took too long (`deadline_exceeded`).
"""

from cloche.compat.e2b.face import Entrance, Face

__all__ = ["Entrance", "Face"]
