"""What tests of and with Cloche use: a clock that only moves when told, and what plays the other parts.

Shipped with the package, because users test too. Nothing here patches anything: a fake implements an interface and is
passed in where the real one would be. Nothing in the product imports this folder.
"""
