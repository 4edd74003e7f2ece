"""What this host gives, as JSON: which rung is taken (or why none) for each demand, whether it works, and the probe."""

import asyncio
import json
import os
import sys
import tempfile

from cloche import errors, model, settings, wiring
from cloche.engine import Engine
from cloche.linux import probe


async def rung(engine: Engine, minimum: model.Level) -> dict[str, str]:
    try:
        info = await engine.create(model.SandboxSpec(minimum_isolation=minimum))
    except errors.ClocheError as problem:
        return {"refused": problem.code, "because": problem.message}
    result = await engine.exec(info.id, model.ExecRequest(command="echo works"))
    await engine.delete(info.id)
    return {"driver": info.isolation.driver, "said": result.stdout}


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        settings.make_home(home)
        engine = wiring.make_engine({**os.environ, "CLOCHE_HOME": home})
        found = {minimum: await rung(engine, minimum) for minimum in ("namespaces", "process")}
        await engine.aclose()
    facts = {fact.name: fact._asdict() for fact in probe.probe()}
    json.dump({"rungs": found, "facts": facts}, sys.stdout)


asyncio.run(main())
