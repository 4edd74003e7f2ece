"""Follow a command while it runs, and answer it."""

import cloche

with cloche.Sandbox() as box:
    for event in box.exec_stream("for i in 1 2 3; do echo step $i; done; echo careful >&2; exit 4"):
        match event:
            case cloche.Output(stream=stream, data=data):
                print(f"{stream}: {data.decode()!r}")
            case cloche.Exited(result=result):
                print("ended with", result.exit_code)

    process = box.start("read -p 'name? ' name; echo hello $name", pty=True)
    process.write("world\n")
    print(process.wait().stdout.splitlines()[-1])
