# shellcheck shell=bash
# The keys of an option's argument: egret itself knows them, and says nothing where the argument is none of keys.

_egret_or_keys() {
    local words word option kept
    read -ra words <<<"${COMP_LINE:0:COMP_POINT}."
    word=${words[-1]%.} option=${words[-2]}
    if [[ $word == --*=* ]]; then
        option=${word%%=*} word=${word#*=}
    fi
    COMPREPLY=()
    if [[ $option == --* ]]; then
        mapfile -t COMPREPLY < <("$1" completions bash -- "${option#--}" "$word" 2>/dev/null)
    fi
    if ((${#COMPREPLY[@]} == 0)); then
        _egret "$@"
        return
    fi
    # To bash a word begins anew behind = and :
    kept=${word%"${word##*["$COMP_WORDBREAKS"]}"}
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    compopt -o nospace
}

complete -F _egret_or_keys -o bashdefault -o default egret
