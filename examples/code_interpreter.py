"""A conversation with an interpreter that keeps its state, as an agent has it."""

import cloche

with cloche.Sandbox() as box:
    for code in (
        "numbers = [3, 1, 2]",
        "sorted(numbers)",
        "print('sum', sum(numbers))",
        "numbers[10]",
        "len(numbers)  # still there after the error",
    ):
        result = box.run_code(code)
        print(">>>", code)
        print(result.stdout, end="")
        if result.text is not None:
            print(result.text)
        if result.error is not None:
            print(f"{result.error.name}: {result.error.value}")
