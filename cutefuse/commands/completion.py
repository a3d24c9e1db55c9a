"""`cutefuse completion bash|zsh`: a script that completes commands, their options, and files.

    eval "$(cutefuse completion bash)"     # in ~/.bashrc, or once in this shell
    eval "$(cutefuse completion zsh)"      # in ~/.zshrc, or once in this shell

The options are those that `--help` lists, asked for once for each command and kept by the shell: nothing to bring up to
date, and no package.
"""

from __future__ import annotations

import argparse

from cutefuse.cli import COMMANDS
from cutefuse.errors import command_line
from cutefuse.output import json_alone, parsed

_BASH = """declare -A _cutefuse_options
_cutefuse() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    COMPREPLY=()
    case $word in -*)
        if [ -z "${{_cutefuse_options[$command]}}" ]; then
            _cutefuse_options[$command]=$("${{COMP_WORDS[0]}}" "$command" --help 2>/dev/null |
                grep -oE -- '--[a-z][a-z0-9-]*' | sort -u)
        fi
        COMPREPLY=($(compgen -W "${{_cutefuse_options[$command]}}" -- "$word"))
    esac
}}
complete -o default -F _cutefuse cutefuse
"""
_ZSH = """typeset -gA _cutefuse_options
_cutefuse() {{
    local command=$words[2]
    if (( CURRENT == 2 )); then
        compadd -- {commands}
    elif [[ $PREFIX == -* ]]; then
        if [[ -z $_cutefuse_options[$command] ]]; then
            _cutefuse_options[$command]=$($words[1] $command --help 2>/dev/null |
                grep -oE -- '--[a-z][a-z0-9-]*' | sort -u)
        fi
        compadd -- ${{(f)_cutefuse_options[$command]}}
    else
        _files
    fi
}}
whence compdef >/dev/null || {{ autoload -Uz compinit && compinit }}
compdef _cutefuse cutefuse
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH}


@command_line
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="cutefuse completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=sorted(SHELLS), help="the shell that will read the script")
    args = parsed(parser, argv)
    script = SHELLS[args.shell].format(commands=" ".join(COMMANDS))
    with json_alone(args.json) as show:
        show({"shell": args.shell, "script": script})
        print(script, end="")
