"""Adapters that make sandboxes: each implements `interfaces.Driver` on the platform, unaware of the others.

`launcher` is not a driver but the process that drivers start; it is kept free of everything but the standard library,
`linux` and `guest`, because sandboxes are forked from it.
"""
