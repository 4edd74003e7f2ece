"""The shortest use: one command, its output, its exit code."""

import cloche

result = cloche.run("echo hello from under the glass; whoami; exit 7")
print(result.stdout, end="")
print("exit code", result.exit_code)
