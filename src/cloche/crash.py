"""Points at which a test kills the process: before and after every durable write.

Whoever writes something that outlives the process calls `point("what:before")` and `point("what:after")` around it. Nothing
happens unless a test armed that very point in this process; then the process is gone as by a power cut, without a handler, a
`finally` or a flush. tests/test_crash.py finds the points in the source, dies at each, and looks at what the next start
makes of it; a durable write without points fails it.
"""

import os
import signal

_armed = ""


def arm(name: str) -> None:
    """Die at this point, the next time it is passed."""
    global _armed
    _armed = name


def point(name: str) -> None:
    if _armed and name == _armed:
        os.kill(os.getpid(), signal.SIGKILL)
