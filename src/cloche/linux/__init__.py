"""Linux primitives: system calls, filters, control groups, processes, and a probe of what this host allows.

What lives here knows the kernel and nothing of ours: no module of this folder knows what a sandbox, a policy
or a template is, reads a setting, or logs. What does not live here: deciding (that is vocabulary and engine)
and combining (that is a driver). `syscalls`, `seccomp`, `landlock`, `cgroups` and `processes` are imported by
a process that is forked for every sandbox, so they use only the cheapest parts of the standard library.
"""
