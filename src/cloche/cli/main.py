"""Everything that the thin client leaves: the parser, and the verbs by group."""

from cloche import errors
from cloche.cli import results, thin


def main(arguments: list[str]) -> int:
    options = thin.scan(arguments) if arguments[:1] in (["run"], ["exec"]) else None
    if options is None:
        return results.tell(errors.error("flag_unknown", "only `cloche run [FLAGS] -- CMD` is understood so far"))
    thin.complete(options)
    from cloche.cli import here

    engine = here.Here()
    session = thin.Session(engine.sock, options)
    session.run()
    engine.join()
    return thin.conclude(session)
