
# The keys of an option's argument: egret itself knows them.
function __egret_keys
    egret completions fish -- $argv[1] (commandline -ct | string replace -r -- '^--[a-z-]+=' '') 2>/dev/null
end

