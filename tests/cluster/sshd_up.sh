#!/usr/bin/env bash
# Two real sshd on loopback, with separate keys:  sshd_up.sh FOLDER PORT0 PORT1      (openssh-server; as any user, who alone can log in)
# Nothing of ~/.ssh is read or written. When it is up, FOLDER/up exists, and FOLDER/bin/ssh is the real ssh with FOLDER/config, where the
# hosts node0 and node1 are. The servers end with this process.
set -euo pipefail
mkdir -p "${1:?usage: sshd_up.sh FOLDER PORT0 PORT1}" && folder=$(realpath "$1")
ports=("$2" "$3")
chmod 700 "$folder"
mkdir -p "$folder/bin"
echo $$ > "$folder/pid"
[ -e "$folder/key" ] || ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
cp "$folder/key.pub" "$folder/authorized"
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd # sshd's own folder, where it is root
: > "$folder/config"
: > "$folder/known"
for r in 0 1; do
    [ -e "$folder/host$r" ] || ssh-keygen -q -t ed25519 -N '' -f "$folder/host$r"
    echo "[127.0.0.$((r + 1))]:${ports[r]} $(cut -d' ' -f1,2 "$folder/host$r.pub")" >> "$folder/known"
    cat > "$folder/sshd$r" <<END
ListenAddress 127.0.0.$((r + 1)):${ports[r]}
HostKey $folder/host$r
PidFile $folder/sshd$r.pid
AuthorizedKeysFile $folder/authorized
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
SetEnv PATH=$PATH PYTHONPATH=${PYTHONPATH:-} OMP_NUM_THREADS=1
END
    cat >> "$folder/config" <<END
Host node$r 127.0.0.$((r + 1))
  HostName 127.0.0.$((r + 1))
  Port ${ports[r]}
  User $(id -un)
  IdentityFile $folder/key
  IdentitiesOnly yes
  UserKnownHostsFile $folder/known
  StrictHostKeyChecking yes
END
    "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$folder/sshd$r" 2> "$folder/sshd$r.log" &
done
printf '#!/usr/bin/env bash\nexec %q -F %q "$@"\n' "$(command -v ssh)" "$folder/config" > "$folder/bin/ssh"
chmod +x "$folder/bin/ssh"
trap 'kill $(jobs -p) 2> /dev/null' EXIT
trap 'exit 0' TERM INT
for r in 0 1; do
    for ((i = 0; i < 100; i++)); do
        if "$folder/bin/ssh" -o BatchMode=yes node$r true 2> /dev/null; then break; fi
        sleep 0.1
    done
done
touch "$folder/up"
wait
