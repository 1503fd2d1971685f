package cmd

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/flag"
)

const completionUsage = `agentzip completion bash - print what makes bash complete commands and flags:
                         source <(runsc-agentzip agentzip completion bash)
`

// completion runs "agentzip completion" with the arguments that follow it.
func (a *Agentzip) completion(args []string) subcommands.ExitStatus {
	if len(args) != 1 || args[0] != "bash" {
		util.Fatalf("agentzip completion: want bash, got %q", strings.Join(args, " "))
	}
	if err := writeCompletion(os.Stdout, registeredWords(subcommands.DefaultCommander, flag.CommandLine)); err != nil {
		util.Fatalf("agentzip completion: %v", err)
	}
	return subcommands.ExitSuccess
}

// words are what may follow a command: other commands, and flags.
type words struct{ commands, flags []string }

// usageFlag is a flag where a usage describes it, at the beginning of a line.
var usageFlag = regexp.MustCompile(`(?m)^ +--?([a-z][a-z-]*)`)

// registeredWords returns the words for each command, by its path: that of "runsc-agentzip
// agentzip stats" is "agentzip stats", and the empty one is before a command.
func registeredWords(cdr *subcommands.Commander, global *flag.FlagSet) map[string]*words {
	all := map[string]*words{"": {flags: flagNames(global)}}
	at := func(path string) *words {
		if all[path] == nil {
			all[path] = &words{}
		}
		return all[path]
	}
	cdr.VisitCommands(func(g *subcommands.CommandGroup, c subcommands.Command) {
		if g.Name() == "internal use only" {
			return
		}
		f := flag.NewFlagSet(c.Name(), flag.ContinueOnError)
		c.SetFlags(f)
		at("").commands = append(at("").commands, c.Name())
		at(c.Name()).flags = flagNames(f)
	})
	// The commands of "agentzip" say in their usage which flags they have.
	sub := func(parent, name, usage string) {
		at(parent).commands = append(at(parent).commands, name)
		for _, m := range usageFlag.FindAllStringSubmatch(usage, -1) {
			at(parent + " " + name).flags = append(at(parent+" "+name).flags, m[1])
		}
	}
	const own = "agentzip"
	for name := range commands {
		sub(own, name, " -json")
	}
	sub(own, "prefetch", " -save")
	sub(own, "hint", " -phase")
	sub(own, "top", topUsage)
	sub(own, "metrics", metricsUsage)
	sub(own, "template", "")
	for _, name := range []string{"create", "verify", "info"} {
		sub(own+" template", name, templateUsage)
	}
	sub(own, "pool", "")
	for _, name := range []string{"serve", "stats", "drain"} {
		sub(own+" pool", name, poolUsage)
	}
	sub(own, "completion", "")
	sub(own+" completion", "bash", "")
	for _, w := range all {
		for _, s := range []*[]string{&w.commands, &w.flags} {
			slices.Sort(*s)
			*s = slices.Compact(*s)
		}
	}
	return all
}

func flagNames(f *flag.FlagSet) (names []string) {
	f.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	return names
}

// writeCompletion writes a script for bash. A path grows by each word that is a command
// there, whatever flags and their values are in between.
func writeCompletion(w io.Writer, all map[string]*words) error {
	var commands, flags bytes.Buffer
	paths := make([]string, 0, len(all))
	for path := range all {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	for _, path := range paths {
		if c := all[path].commands; len(c) > 0 {
			fmt.Fprintf(&commands, "\t%q) echo %q ;;\n", path, strings.Join(c, " "))
		}
		if f := all[path].flags; len(f) > 0 {
			fmt.Fprintf(&flags, "\t%q) echo %q ;;\n", path, "--"+strings.Join(f, " --"))
		}
	}
	_, err := fmt.Fprintf(w, `# Completion of runsc-agentzip's commands and flags, for bash.
_runsc_agentzip_commands() {
	case "$1" in
%s	esac
}
_runsc_agentzip_flags() {
	case "$1" in
%s	esac
}
_runsc_agentzip() {
	local cur=${COMP_WORDS[COMP_CWORD]} path= word
	for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
		case " $(_runsc_agentzip_commands "$path") " in
		*" $word "*) path=${path:+$path }$word ;;
		esac
	done
	case $cur in
	-*)
		# One dash is as good as two.
		case $cur in --* | -) ;; *) cur=-$cur ;; esac
		COMPREPLY=($(compgen -W "$(_runsc_agentzip_flags "$path")" -- "$cur"))
		;;
	*) COMPREPLY=($(compgen -W "$(_runsc_agentzip_commands "$path")" -- "$cur")) ;;
	esac
}
complete -o default -F _runsc_agentzip runsc-agentzip
`, commands.String(), flags.String())
	return err
}
