#!/usr/bin/env bash
# A training on several machines by ssh alone:  tools/cluster/ssh.sh "HOST0 HOST1 …" RECIPE --output-dir DIR [OPTION … KEY=VALUE …]
# The first host is node 0. Ctrl-C, or a SIGTERM, stops all of them after one update with a checkpoint, a second one at once.
# Where one has failed, the others have GRACE seconds (10) to end by themselves, and are then stopped.
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
declare -A sessions # of the nodes that have not ended
for node in "${!hosts[@]}"; do
    there="cd $(printf %q "${FOLDER:-$PWD}") && echo \$\$ > $pidfile.$node && exec$words --node-rank $node"
    # In a group of its own: the terminal's Ctrl-C is for this script, which passes it on.
    setsid ssh -o BatchMode=yes "${hosts[node]}" "$there" < /dev/null &
    sessions[$node]=$!
done

stop() { # every node that has not ended: one that has failed cannot pass it on to the others
    for node in "${!sessions[@]}"; do
        setsid ssh -o BatchMode=yes "${hosts[node]}" "kill -s TERM \$(cat $pidfile.$node)" < /dev/null &
    done
}

requests=0 signals=0 status=0 lost='' late='' deadline='' grace=${GRACE:-10}
trap 'signals=$((signals + 1))' INT TERM HUP USR1
while [ "${#sessions[@]}" -gt 0 ]; do
    for node in "${!sessions[@]}"; do
        kill -0 "${sessions[$node]}" 2> /dev/null && continue
        wait "${sessions[$node]}"
        ended=$?
        unset "sessions[$node]"
        [ "$ended" -eq 0 ] && continue
        failed="has ended with $ended"
        if [ "$ended" -eq 255 ]; then # ssh's own: the others' status says more, unless this script has stopped them
            failed="is lost: its ssh has ended with 255 (no connection, or its paddle-dp was killed)" lost=1
        elif [ "$status" -eq 0 ] && [ -z "$late" ]; then
            status=$ended
        else
            continue
        fi
        [ "$ended" -eq 75 ] && continue # the others are stopping, too
        if [ "${#sessions[@]}" -gt 0 ] && [ -z "$deadline" ]; then
            failed="$failed; hosts that run in $grace s are stopped"
            deadline=$((SECONDS + grace))
        fi
        [ "$ended" -ne 255 ] && [ "${#sessions[@]}" -eq 0 ] || echo "ssh.sh: ${hosts[node]} $failed" >&2
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
        signals=$((signals + 1)) deadline=$((SECONDS + grace + 1)) late=1 # the second time at once
    fi
    if [ "$signals" -gt "$requests" ]; then
        requests=$((requests + 1))
        stop
    fi
    sleep 0.2
done
wait # for the requests
trap - INT TERM HUP USR1
for node in "${!hosts[@]}"; do
    ssh -o BatchMode=yes "${hosts[node]}" "rm -f $pidfile.$node" < /dev/null
done
[ "$status" -eq 0 ] && [ -n "$lost" ] && status=1 # of a job that has lost a node
exit "$status"
