"""`completions bash|zsh|fish`: a script made from the parser itself, so it never lags behind.

Ids complete too: the script asks `cloche list --json` when a word that may be one is wanted.
"""

import argparse

from cloche.cli import files, main, pools, secrets

_SHELLS = ("bash", "zsh", "fish")
_TAKES_ID = (
    "exec",
    "shell",
    "info",
    "logs",
    "delete",
    "extend",
    "suspend",
    "resume",
    "usage",
    "token",
    "events",
    "diff",
    "apply",
)
_IDS = """cloche list --json 2>/dev/null | tr ',{' '\\n\\n' | sed -n 's/^ *"id": *"\\([a-z0-9]*\\)"$/\\1/p'"""


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help="bash, zsh or fish")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[chosen.shell](), end="")
    return 0


def _flags(verb: str) -> list[tuple[str, str]]:
    """Long flags of a verb with their help."""
    found = []
    for action in main.flags_of(verb):
        found += [(flag, action.help or "") for flag in action.option_strings if flag.startswith("--")]
    return found


def _words(verb: str) -> str:
    words = [flag for flag, _ in _flags(verb)]
    words += {
        "files": list(files.ACTS),
        "pool": list(pools.ACTS["pool"]),
        "template": list(pools.ACTS["template"]),
        "secret": list(secrets.ACTS),
        "completions": list(_SHELLS),
        "help": list(main.VERBS),
    }.get(verb, [])
    return " ".join(words)


def _bash() -> str:
    cases = "\n".join(f'        {verb}) words="{_words(verb)}" ;;' for verb in main.VERBS)
    return f"""# cloche completions for bash:  source <(cloche completions bash)
_cloche() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words= i
    COMPREPLY=()
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [[ ${{COMP_WORDS[i]}} == -- ]]; then COMPREPLY=($(compgen -c -f -- "$word")); return; fi
    done
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{" ".join(main.VERBS)}" -- "$word")); return
    fi
    case $verb in
{cases}
    esac
    case " {" ".join(_TAKES_ID)} " in
        *" $verb "*) [[ $word == -* ]] || words="$words $({_IDS})" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ $word == -* || ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _cloche cloche
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh() -> str:
    verbs = "\n".join(f"        {_quoted(f'{verb}:{row.summary}')}" for verb, row in main.VERBS.items())
    cases = "\n".join(
        f"        {verb}) flags=({' '.join(_quoted(f'{flag}:{help_}') for flag, help_ in _flags(verb))}) ;;"
        for verb in main.VERBS
    )
    return f"""#compdef cloche
# cloche completions for zsh:  source <(cloche completions zsh)
_cloche() {{
    local -a verbs flags ids
    verbs=(
{verbs}
    )
    if (( CURRENT == 2 )); then _describe verb verbs; return; fi
    if (( ${{words[(I)--]}} && ${{words[(I)--]}} < CURRENT )); then _command_names; _files; return; fi
    case ${{words[2]}} in
{cases}
    esac
    case ${{words[2]}} in
        {"|".join(_TAKES_ID)}) ids=(${{(f)"$({_IDS})"}}) ;;
    esac
    [[ ${{words[CURRENT]}} == -* ]] && _describe flag flags
    (( $#ids )) && compadd -a ids
    _files
}}
compdef _cloche cloche
"""


def _fish() -> str:
    lines = ["# cloche completions for fish:  cloche completions fish | source", "complete -c cloche -f"]
    for verb, row in main.VERBS.items():
        lines.append(f"complete -c cloche -n __fish_use_subcommand -a {verb} -d {_fish_quoted(row.summary)}")
        for flag, help_ in _flags(verb):
            seen = f"'__fish_seen_subcommand_from {verb}'"
            lines.append(f"complete -c cloche -n {seen} -l {flag[2:]} -d {_fish_quoted(help_)}")
    lines.append(
        f"complete -c cloche -n '__fish_seen_subcommand_from {' '.join(_TAKES_ID)}' -a {_fish_quoted(f'({_IDS})')}"
    )
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
