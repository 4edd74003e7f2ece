"""Ten sandboxes at once, each its own machine."""

import asyncio

import cloche


async def work(number: int) -> str:
    async with cloche.AsyncSandbox(memory_mib=64, env={"NUMBER": str(number)}) as box:
        await box.files.write("input", str(number))
        result = await box.exec("echo $(( $(cat input) * NUMBER ))", check=True)
        return result.stdout.strip()


async def main() -> None:
    print(await asyncio.gather(*(work(number) for number in range(10))))


asyncio.run(main())
