"""Runs inside the glass: standard library only, imports nothing of ours but `guest` itself.

The host imports from here only what both sides must agree on (frames, limits, start commands) and treats every
byte that comes back as an attacker's.
"""
