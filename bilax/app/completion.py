"""Shell completion, written from the same tables as the help."""

import dataclasses
from typing import Literal

import tyro

from bilax.app.cli import COMMANDS, VERBS, load


@dataclasses.dataclass
class Completion:
    """Prints a script that completes commands, names and options; zsh reads it after `autoload bashcompinit`."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]] = "bash"

    def main(self) -> None:
        """Writes the script to standard output."""
        cases = [f'    "bilax {command}") words="{" ".join(things)}" ;;' for command, things in COMMANDS.items()]
        for command, things in COMMANDS.items():
            for name, (place, _) in things.items():
                cases.append(f'    "bilax {command} {name}") words="{_options(place)}" ;;')
        for verb, (place, _) in VERBS.items():
            cases.append(f'    "bilax {verb}"*) words="{_options(place)}" ;;')
        first = " ".join([*COMMANDS, *VERBS])
        lines = ["autoload -U +X bashcompinit && bashcompinit"] if self.shell == "zsh" else []
        lines += [
            "_bilax() {",
            '  local depth=$(( COMP_CWORD < 3 ? COMP_CWORD : 3 )) words=""',
            '  case "${COMP_WORDS[*]:0:depth}" in',
            f'    "bilax") words="{first}" ;;',
            *cases,
            "  esac",
            '  COMPREPLY=( $(compgen -W "$words --help" -- "${COMP_WORDS[COMP_CWORD]}") )',
            '  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=( $(compgen -f -- "${COMP_WORDS[COMP_CWORD]}") )',
            "}",
            "complete -F _bilax bilax",
        ]
        print("\n".join(lines))


def _options(place: str) -> str:
    return " ".join("--" + field.name.replace("_", "-") for field in dataclasses.fields(load(place)))
