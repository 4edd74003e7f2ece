"""The clients: `AsyncSandbox` written by hand, `Sandbox` generated from it (scripts/generate_sync).

Both work on one `interfaces.Backend`, found by `connecting`; all of a process's engines and connections live in one
event loop in one daemon thread (`portal`), so handles may be used from any thread and any loop.
"""
