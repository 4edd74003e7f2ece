"""The numbers Cloche holds itself to, measured.

`scripts/bench` runs `python -m bench`. Each row of the table is measured by one function in `latency`, `commands`,
`density`, `throughput` or `leaks`; what stands beside it (the floor in C, bubblewrap, plain subprocess, other people's
sandboxes) is in `baselines` and `peers` and is timed in the same run, interleaved with it. `records` holds the figures
and decides what they mean, `noise` decides whether the machine was quiet enough to publish them, `tables` and `plots`
show them. Nothing of the product imports this package.
"""
