"""Run code that somebody else wrote: limits, a time-out, and what it tried."""

import cloche

CODE = """
import os, urllib.request
print("I am", os.getuid(), "in", os.getcwd())
try:
    urllib.request.urlopen("http://example.com", timeout=3)
except OSError as error:
    print("no network:", type(error).__name__)
try:
    open("/usr/bin/sneaky", "w")
except OSError as error:
    print("no writing there:", error.strerror)
while True:
    pass
"""

with cloche.Sandbox(profile="restrictive", memory_mib=256, pids=32) as box:
    box.files.write("main.py", CODE)
    result = box.exec(["python3", "-u", "main.py"], timeout_s=3)
    print(result.stdout, end="")
    print("timed out:", result.timed_out)
    print("isolation:", result.isolation.level)
