"""Prints a script that lets bash and zsh complete programs and flags.

    eval "$(gshard completion)"                                       # in ~/.bashrc
    autoload -Uz bashcompinit; bashcompinit; eval "$(gshard completion)"    # in ~/.zshrc

The script asks `gshard PROGRAM --help`, so it is right for every version that is installed.
"""

from lingvo_gshard import cli

# Programs and flags stand after two spaces in the help; a flag's value and negation are cut.
_SCRIPT = r"""_gshard() {
    local typed=() word offered
    for word in "${COMP_WORDS[@]:0:$COMP_CWORD}"; do
        case $word in -*|=) break ;; esac
        typed+=("$word")
    done
    offered=$("${typed[@]}" --help 2>/dev/null |
        sed -n 's/^  \([^ ][^ =]*=\{0,1\}\).*/\1/p' | sed 's/^--\[no\]/--/')
    COMPREPLY=($(compgen -W "$offered" -- "${COMP_WORDS[COMP_CWORD]}"))
    case "${COMPREPLY[*]}" in *=) type compopt >/dev/null 2>&1 && compopt -o nospace ;; esac
}
complete -o default -F _gshard gshard"""


def main() -> None:
    """Prints the script."""
    print(_SCRIPT)


if __name__ == "__main__":
    cli.run("completion", main)
