"""Where a sandbox's root comes from. `host` is the template `base`: this machine's own programs, read-only."""
