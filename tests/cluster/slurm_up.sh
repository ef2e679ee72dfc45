#!/usr/bin/env bash
# A real Slurm of N nodes on this machine:  slurm_up.sh FOLDER [N=2] [CPUS=8]
# It needs root, and slurmctld slurmd slurm-client munge iproute2.
# Each node has a network (10.66.0.R+1), a host name and a spool folder of its own; the controller has 10.66.0.1. Nothing outside is touched:
# all of it lives in new network, mount and PID namespaces, and ends with this process. When it is up, FOLDER/up exists, and
#   FOLDER/in COMMAND …          runs a command beside the controller, such as sbatch, squeue, scontrol   (by nsenter)
#   FOLDER/on R COMMAND …        the same on node R (0, 1, …)
#   FOLDER/node R                (inside: FOLDER/in FOLDER/node R) starts node R's slurmd once more
#   kill -9 $(cat FOLDER/pid)    ends it all (unshare ignores SIGTERM; its child is tied to it by --kill-child)
set -euo pipefail
folder=$(realpath "${1:?usage: slurm_up.sh FOLDER [NODES] [CPUS]}")
nodes=${2:-2} cpus=${3:-8}

if [ "${SLURM_UP_INSIDE:-}" != 1 ]; then
    mkdir -p "$folder"
    rm -rf "$folder/up" "$folder/spool" "$folder/state"
    echo $$ > "$folder/pid"
    cat > "$folder/in" <<END
#!/usr/bin/env bash
pid=\$(cat "$folder/pid"); init=\$(tr -d ' ' < /proc/\$pid/task/\$pid/children)
export SLURM_CONF=$folder/slurm.conf
exec nsenter -t "\$init" -n -m -p -- bash -c 'cd "\$0" && exec "\$@"' "\$PWD" "\$@"
END
    cat > "$folder/on" <<END
#!/usr/bin/env bash
node=node\$1; shift
exec "$folder/in" nsenter --net=/run/netns/\$node unshare -u bash -c 'hostname "\$0"; exec "\$@"' \$node "\$@"
END
    cat > "$folder/node" <<END
#!/usr/bin/env bash
exec nsenter --net=/run/netns/node\$1 unshare -u bash -c 'hostname node'\$1'; export SLURM_CONF=$folder/slurm.conf; exec slurmd -D -N node'\$1 > "$folder/slurmd-\$1.out" 2>&1
END
    chmod +x "$folder"/{in,on,node}
    SLURM_UP_INSIDE=1 exec unshare --mount --net --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi

# From here: process 1 of the new namespaces.
mount -t tmpfs tmpfs /run # ip netns keeps its names there
mkdir -p /run/netns /run/lock
ip link set lo up
ip link add lan type bridge && ip addr add 10.66.0.1/24 dev lan && ip link set lan up
{ echo "127.0.0.1 localhost"; echo "10.66.0.1 controller"; } > "$folder/hosts"
for ((r = 0; r < nodes; r++)); do
    ip netns add node$r
    ip link add lan$r type veth peer name eth0 netns node$r
    ip link set lan$r master lan up
    ip -n node$r addr add 10.66.0.$((r + 2))/24 dev eth0
    ip -n node$r link set eth0 up
    ip -n node$r link set lo up
    echo "10.66.0.$((r + 2)) node$r" >> "$folder/hosts"
    mkdir -p "$folder/spool/node$r"
done
mount --bind "$folder/hosts" /etc/hosts
mkdir -p "$folder/state" "$folder/munge"
chmod 700 "$folder/munge"
head -c 128 /dev/urandom > "$folder/munge/key" && chmod 400 "$folder/munge/key"
munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" > "$folder/munge/out" 2>&1 &
cat > "$folder/slurm.conf" <<END
ClusterName=one-machine
SlurmctldHost=controller(10.66.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=${CRED_EXPIRE:-15}
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=60
TCPTimeout=20
SlurmdTimeout=${SLURMD_TIMEOUT:-30}
KillWait=${KILL_WAIT:-30}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=5,sched_interval=5
SlurmctldDebug=info
SlurmdDebug=info
NodeName=node[0-$((nodes - 1))] CPUs=$cpus RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=${GRACE:-30}
PartitionName=first Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
echo "CgroupPlugin=cgroup/v1" > "$folder/cgroup.conf" # of which nothing is used; the default asks for systemd's
export SLURM_CONF=$folder/slurm.conf
for ((i = 0; i < 100; i++)); do
    if [ -S "$folder/munge/socket" ]; then break; fi
    sleep 0.1
done
unshare -u bash -c 'hostname controller; exec slurmctld -D -c' > "$folder/slurmctld.out" 2>&1 &
for ((r = 0; r < nodes; r++)); do "$folder/node" $r & done
for ((i = 0; i < 600; i++)); do
    [ "$(sinfo -h -N -p main -t idle -o %N 2> /dev/null | wc -l)" = "$nodes" ] && break
    sleep 0.2
done
sinfo -N -l
touch "$folder/up"
wait
