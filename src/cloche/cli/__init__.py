"""The command line.

`thin` is the entry: it answers `run` and `exec` by itself when a keeper listens, with next to no imports, and leaves
everything else to `main`. Every verb speaks the keeper's frames; where no keeper is, `here` serves the same frames from
an engine in this process. So there is one way in which a command is run, signals are passed and errors are told.
"""
