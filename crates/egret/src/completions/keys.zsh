
# The keys of an option's argument: egret itself knows them, and where it does not the value is taken for a file.
_egret_keys() {
    local -a found
    found=(${(f)"$(egret completions zsh -- $1 "$PREFIX" 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -a found
    else
        compset -P '*='
        _files
    fi
}

