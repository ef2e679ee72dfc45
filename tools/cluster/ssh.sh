#!/usr/bin/env bash
# A training on several machines by ssh alone:  tools/cluster/ssh.sh "HOST0 HOST1 …" RECIPE --output-dir DIR [OPTION … KEY=VALUE …]
# The first host is node 0. Ctrl-C, or a SIGTERM, stops all of them after one update with a checkpoint, a second one at once.
# FOLDER: where it runs on each host (here: the current one); PORT, or MASTER=HOST:PORT: where the nodes meet. See README.md beside this.
set -uo pipefail

usage='usage: ssh.sh "HOST0 HOST1 ..." RECIPE --output-dir DIR [OPTION ... KEY=VALUE ...]'
read -r -a hosts <<< "${1:?$usage}"
: "${2:?$usage}"
shift
# The first host may be a name that only ssh's configuration knows.
address=$(ssh -G "${hosts[0]}" 2> /dev/null | sed -n 's/^hostname //p')
master=${MASTER:-${address:-${hosts[0]#*@}}:${PORT:-29500}}
pidfile=/tmp/paddle-dp-$(id -un)-$$-$RANDOM

words=$(printf ' %q' paddle-dp train "$@" --nodes "${#hosts[@]}" --master "$master")
sessions=()
for node in "${!hosts[@]}"; do
    there="cd $(printf %q "${FOLDER:-$PWD}") && echo \$\$ > $pidfile.$node && exec$words --node-rank $node"
    # In a group of its own: the terminal's Ctrl-C is for this script, which passes it on.
    setsid ssh -o BatchMode=yes "${hosts[node]}" "$there" < /dev/null &
    sessions+=("$!")
done

told=0
# All nodes hear of it from the one that is told.
trap 'told=1; ssh -o BatchMode=yes "${hosts[0]}" "kill -s TERM \$(cat $pidfile.0)" < /dev/null' INT TERM HUP USR1

status=0
for session in "${sessions[@]}"; do
    while told=0; do
        wait "$session"
        ended=$?
        [ "$told" -eq 0 ] && break # else a signal has ended the wait, not the session
    done
    if [ "$ended" -ne 0 ] && [ "$status" -eq 0 ]; then
        status=$ended # of node 0, if it failed
    fi
done
trap - INT TERM HUP USR1
for node in "${!hosts[@]}"; do
    ssh -o BatchMode=yes "${hosts[node]}" "rm -f $pidfile.$node" < /dev/null
done
exit "$status"
