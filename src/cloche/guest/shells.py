"""The bootstrap of stateful *bash* contexts.

Started as ``bash --norc --noprofile -c BASH bash`` with descriptor 3 a connected stream socket (the channel), stdin
/dev/null, and stdout and stderr ordinary pipes. The leader should head its own process group.

    host → context    <code>\\0          one run; code is any text without NUL
    context → host    <status>\\0        its exit status in decimal, after everything it wrote to its pipes

State is kept between runs: directory, variables, functions, aliases, options, traps. There is no "ready" message:
what is sent early waits in the socket. The environment or the directory of a run is changed by code (``export``, ``cd``).

What ends a run and what ends the context:

- `exit 3`, a failure under ``set -e``, an unset variable under ``set -u`` and SIGINT all make a script's shell exit.
  The EXIT trap then writes the state down and the shell *executes itself anew* in the same process with that state,
  so only the run ends (status 3, the failure's, 127, 130). Lost in this: the job table (``wait``, ``fg``), ``$!`` and
  the positional parameters. Background processes themselves live on.
- `exec program`, or `exit` after the code has set an EXIT trap of its own, is seen by the host as end of file.
- SIGINT goes to the *process group*: bash does not look up from a foreground child until that child is gone. While
  idle it is ignored. A child that bash is just forking may miss it; a second one, a moment later, reaches it. One that
  comes in the few milliseconds in which an ended shell starts anew ends the context.

The channel is closed while code runs (bash keeps it aside, close-on-exec), so commands do not inherit it; a background
*subshell* that executes nothing does hold a copy, hence the host should watch the leader's end and not only the socket.

Bash only: POSIX `sh` cannot read up to a NUL nor write its state down. Without bash there is no shell context.
"""

from __future__ import annotations

CHANNEL_FD = 3
INTERRUPTED = 130  # the status of a run that SIGINT ended

# Notes on the text below, which stays short because every shell context parses it:
# - it is joined into one line, so that "line 1" in bash's messages is line 1 of the code;
# - the loop is not in a function, else `return` or `local` in the code would mean the loop's;
# - all bookkeeping is in the loop's condition: there `set -e` does not apply, `continue` in the code leads to it too,
#   and one redirection hides it from `set -x`; `break` leaves the loop, hence the script, hence meets the EXIT trap;
# - the handler traps INT with `:` rather than ignoring it: a signal ignored across exec could not be trapped again;
# - an unset variable under `set -eu` is the one end for which bash does not undo the redirection of `eval` before the
#   trap; the channel is then still where bash put it aside, at its first descriptor for such things, 10
#   (fetched through 0, because a copy made straight into 3 would be close-on-exec too);
# - `set -e` and `set -x` travel in a variable, because the substitution that writes the state down drops the former
#   and would be traced by the latter; they come back last, when nothing of ours is left to fail.
_LOOP = r"""
__cloche_revive() {
  [ -n "$__cloche_busy" ] || return 0;
  trap : INT;
  { : >&3; } 2>/dev/null || exec 0<&10 3<&0 0</dev/null;
  exec "$BASH" --norc --noprofile -c "$BASH_EXECUTION_STRING" bash "$__cloche_status"
    4<<<"$( { declare -p; declare -f; alias -p; trap -p; shopt -p; set +o; } 2>/dev/null)";
};
__cloche_busy= __cloche_given= __cloche_options=;
if [ -n "${1-}" ]; then
  IFS= read -r -d '' -u 4 __cloche_code;
  exec 4<&-;
  eval "$__cloche_code" 2>/dev/null 3<&-;
  __cloche_busy=1 __cloche_given=$1;
  set --;
fi;
trap '{ __cloche_status=$? __cloche_options=$-; set +ex; } 2>/dev/null; __cloche_revive' EXIT;
case $__cloche_options in *e*) set -e;; esac;
case $__cloche_options in *x*) set -x;; esac;
while {
  __cloche_status=${__cloche_given:-$?} __cloche_given=;
  trap '' INT;
  [ -z "$__cloche_busy" ] || printf '%s\0' "$__cloche_status" >&3;
  __cloche_busy=;
  IFS= read -r -d '' -u 3 __cloche_code && { __cloche_busy=1; trap 'exit 130' INT; };
} 2>/dev/null;
do eval "$__cloche_code" 3<&-; done
"""
BASH = " ".join(line.strip() for line in _LOOP.strip().splitlines())


def command() -> list[str]:
    """What to execute; descriptor 3 must be the channel."""
    return ["bash", "--norc", "--noprofile", "-c", BASH, "bash"]
