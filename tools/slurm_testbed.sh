#!/usr/bin/env bash
# A real Slurm cluster of several nodes on one Linux machine, to test what needs one.
#
#   host: PATH=$TB/bin:$PATH sbatch ...          the commands in bin/ enter "ctl" and run there
#     ctl      slurmctld, munged, a bridge       10.77.0.1   --+
#     node01   slurmd, its own hostname, GPUs    10.77.0.11  --+  virtual cables (`link NODE down` pulls one)
#     node02   ...                               10.77.0.12  --+
#
# A node is a set of namespaces (network, hostname, mounts, IPC, PIDs, boot time) around one slurmd; files are shared, as
# on a cluster with a common disk. Nothing is added to the host's network, /etc/hosts or /etc/slurm. Two nodes or more
# hang on two leaf switches under a spine, odd and even in turn, so that order by switch differs from order by name.
# GPUs are character devices that hold nothing. Slurm's time-outs are short: a dead node is noticed after SlurmdTimeout
# (6 s) and a ping, which makes about 15 s.
#
#   check                        whether this machine can do it; says why not        (exit code 0 or 1)
#   install                      install Slurm and munge by apt-get, as root
#   up [N]                       start N nodes (2); repeated, boot those that are off
#   down                         power everything off and remove it; logs stay
#   status                       daemons and nodes
#   exec NODE|ctl COMMAND...     run a command there
#   crash NODE|ctl               power off: SIGKILL to every process of it
#   boot NODE|ctl                power on, with the cable plugged; the node returns to service
#   link NODE up|down            plug or pull its network cable
#   daemon NODE|ctl stop|kill|start    slurmd or slurmctld alone; jobs and the machine go on
#
# Settings (environment): SLURM_TB_DIR (/tmp/slurm-testbed), TB_CPUS a node (8), TB_GPUS a node (2), TB_MEM MB a node
# (8000), TB_SUBNET (10.77.0), TB_DISK MB of a small disk SLURM_TB_DIR/small that all nodes see (0: none), TB_EXTRA (more
# lines of slurm.conf), TB_OWNER (a PID: the cluster goes down with it), TB_NORESUME (leave a booted node to Slurm's own
# rules). Made for Debian 12's Slurm 22.05 and later ones.
set -u
umask 022

TB=${SLURM_TB_DIR:-/tmp/slurm-testbed}
SELF=$(readlink -f "$0")
CPUS=${TB_CPUS:-8}
GPUS=${TB_GPUS:-2}
MEMORY=${TB_MEM:-8000}
SUBNET=${TB_SUBNET:-10.77.0}
DISK=${TB_DISK:-0}
NETNS_PREFIX="sl$(cksum <<<"$TB" | cut -c1-4)-" # a folder of its own gives network namespaces of its own
PACKAGES="slurmctld slurmd slurm-client munge iproute2 procps"
APT_OPTIONS="-y -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60"
PROGRAMS="slurmctld slurmd sbatch munged ip pgrep nsenter unshare flock setpriv"
NAMESPACES="--uts --mount --ipc --time --pid --fork --kill-child --mount-proc"
# without root's right to pass over permissions, which jobs of ordinary users do not have either
AS_OWNER="setpriv --bounding-set -dac_override,-dac_read_search"
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
# what is found on it goes into bin/: a command there that found itself would call itself for ever
PATH=:$PATH: && while [[ $PATH == *:"$TB/bin":* ]]; do PATH=${PATH/:"$TB/bin":/:}; done && PATH=${PATH#:} && PATH=${PATH%:}

die() { echo "slurm_testbed: $*" >&2; exit 1; }
usage() { sed -n '/^#   check/,/^#   daemon/s/^# //p' "$SELF"; exit 2; }

# ---------------------------------------------------------------------------------------------- may it run here?

missing_programs() {
  local program
  for program in $PROGRAMS; do command -v "$program" >/dev/null || printf '%s ' "$program"; done
}

# One line with the reason on stdout when it cannot run.
why_not() {
  local programs probe
  [ "$(uname -s)" = Linux ] || { echo "namespaces need Linux"; return; }
  [ "$(id -u)" = 0 ] || { echo "it needs root, to make namespaces"; return; }
  programs=$(missing_programs)
  [ -z "$programs" ] || { echo "not installed: $programs(tools/slurm_testbed.sh install)"; return; }
  probe='ip link add name br0 type bridge && ip link add name v0 type veth peer name v1 && rm -f "$0" && mknod -m 666 "$0" c 1 3 && rm "$0"'
  # shellcheck disable=SC2086
  probe=$(unshare --net $NAMESPACES sh -c "$probe" "/tmp/.slurm-testbed-$$" 2>&1) ||
    echo "no namespaces, bridges or devices here: $(tail -n 1 <<<"$probe")"
}

check() {
  local reason
  reason=$(why_not)
  [ -z "$reason" ] || die "cannot run here: $reason"
}

# shellcheck disable=SC2086
apt_install() { DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq $APT_OPTIONS install --no-install-recommends $PACKAGES; }

install_packages() {
  [ -n "$(missing_programs)" ] || { echo "slurm_testbed: everything is installed"; return; }
  [ "$(id -u)" = 0 ] || die "not installed: only root can install $PACKAGES"
  command -v apt-get >/dev/null || die "not installed: no apt-get here; install $PACKAGES by other means"
  # packages start services when they are unpacked; a testbed needs none, and a container may have no way to run them
  local policy=/usr/sbin/policy-rc.d made=
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=yes; }
  local log code; log=$(mktemp)
  # shellcheck disable=SC2086
  { apt_install || { apt-get -qq $APT_OPTIONS update && apt_install; }; } </dev/null >"$log" 2>&1
  code=$?
  [ -z "$made" ] || rm -f $policy
  [ $code = 0 ] || { tail -n 5 "$log" >&2; die "not installed: apt-get failed, see above"; }
  rm -f "$log"
  echo "slurm_testbed: installed $PACKAGES"
}

# --------------------------------------------------------------------------------------------- files of a cluster

node_names() { cat "$TB/nodes" 2>/dev/null; }

join_names() { local IFS=,; echo "$*"; }

write_slurm_conf() { # NUM_NODES
  local last; last=$(printf %02d "$1")
  cat <<E
ClusterName=testbed
SlurmctldHost=ctl($SUBNET.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$TB/run/munge.sock
StateSaveLocation=$TB/state
SlurmdSpoolDir=$TB/spool/%n
SlurmctldPidFile=$TB/run/ctl.pid
SlurmdPidFile=$TB/run/%n.pid
SlurmctldLogFile=$TB/log/slurmctld.log
SlurmdLogFile=$TB/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no control groups: plain processes, found by their parents
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# believe this file, not the machine, about cores and memory
SlurmdParameters=config_overrides
PrologFlags=Alloc
ReturnToService=1
JobRequeue=1
# short, so that tests of failures do not wait
SlurmdTimeout=6
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=1
BatchStartTimeout=5
KillWait=30
InactiveLimit=0
UnkillableStepTimeout=10
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
PriorityType=priority/basic
# sacct -c reads this; there is no database
JobCompType=jobcomp/filetxt
JobCompLoc=$TB/log/jobcomp.txt
AccountingStorageType=accounting_storage/none
TopologyPlugin=topology/tree
${TB_EXTRA:-}
E
  local gres=
  [ "$GPUS" = 0 ] || { echo "GresTypes=gpu"; gres="Gres=gpu:$GPUS"; }
  echo "NodeName=node[01-$last] NodeAddr=$SUBNET.[11-$((10 + $1))] CPUs=$CPUS RealMemory=$MEMORY $gres State=UNKNOWN"
  echo "PartitionName=main Nodes=node[01-$last] Default=YES MaxTime=INFINITE State=UP"
}

write_topology() {
  local odd=() even=() name number=0
  for name in $(node_names); do
    if ((number++ % 2)); then even+=("$name"); else odd+=("$name"); fi
  done
  echo "SwitchName=leaf1 Nodes=$(join_names "${odd[@]}")"
  [ ${#even[@]} = 0 ] || printf 'SwitchName=leaf2 Nodes=%s\nSwitchName=spine Switches=leaf[1-2]\n' "$(join_names "${even[@]}")"
}

# Commands for the host: they run in ctl, or as they are when called on a node.
write_commands() {
  local name
  for name in sbatch srun salloc squeue sinfo scontrol scancel sacct sstat; do
    cat >"$TB/bin/$name" <<E
#!/bin/sh
grep -qa _init /proc/1/cmdline && exec $(command -v "$name") "\$@"
exec $SELF exec ctl $(command -v "$name") "\$@"
E
    sed -i "2i export SLURM_TB_DIR=$TB" "$TB/bin/$name"
    chmod 755 "$TB/bin/$name"
  done
}

write_files() { # NUM_NODES
  local number name
  mkdir -p "$TB"/{etc,run,log,state,spool,dev,bin}
  [ "$DISK" = 0 ] || { mkdir -p "$TB/small" && mount -t tmpfs -o "size=${DISK}m" small "$TB/small"; }
  : >"$TB/nodes"
  printf '127.0.0.1 localhost\n%s.1 ctl\n' "$SUBNET" >"$TB/etc/hosts"
  for number in $(seq 1 "$1"); do
    name=$(printf 'node%02d' "$number")
    echo "$name" >>"$TB/nodes"
    echo "$SUBNET.$((10 + number)) $name" >>"$TB/etc/hosts"
  done
  [ -s "$TB/run/munge.key" ] || { head -c 1024 /dev/urandom >"$TB/run/munge.key" && chmod 400 "$TB/run/munge.key"; }
  : >"$TB/etc/gres.conf"
  if [ "$GPUS" != 0 ]; then
    echo "Name=gpu File=$TB/dev/nvidia[0-$((GPUS - 1))]" >"$TB/etc/gres.conf"
    for number in $(seq 0 $((GPUS - 1))); do
      [ -e "$TB/dev/nvidia$number" ] || mknod -m 666 "$TB/dev/nvidia$number" c 1 3 # as /dev/null
    done
  fi
  write_slurm_conf "$1" >"$TB/etc/slurm.conf"
  write_topology >"$TB/etc/topology.conf"
  echo 'CgroupPlugin=cgroup/v1' >"$TB/etc/cgroup.conf" # named, so that slurmd does not look for /sys/fs/cgroup
  write_commands
}

# --------------------------------------------------------------------------------------------------- life of a node

# A process is known by its PID and its start time, so that a PID used anew is never taken for it.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" {print $20}'; }

# Print the PID of a node's first process, seen from the host; fail when the node is off.
host_pid() {
  local pid started
  { read -r pid started <"$TB/run/$1.host"; } 2>/dev/null
  [ -n "${started:-}" ] && [ "$(start_time "$pid")" = "$started" ] && echo "$pid"
}

enter() { # NODE COMMAND...
  local pid; pid=$(host_pid "$1") || die "$1 is not running"
  shift
  nsenter -t "$pid" -n -u -m -i -T -p -- "$@"
}

plug_in() { # NODE: its network namespace, and a cable to ctl's bridge
  local name=$1 ns=$NETNS_PREFIX$1 hub=${NETNS_PREFIX}ctl address
  address=$(awk -v name="$name" '$2 == name {print $1}' "$TB/etc/hosts")
  [ -n "$address" ] || die "there is no node $name; there are: ctl $(node_names | tr '\n' ' ')"
  [ -e "/run/netns/$ns" ] || { ip netns add "$ns" && ip -n "$ns" link set lo up; }
  if [ "$name" = ctl ]; then
    ip -n "$ns" link show br0 >/dev/null 2>&1 || ip -n "$ns" link add br0 type bridge
    ip -n "$ns" addr replace "$address/24" dev br0
    ip -n "$ns" link set br0 up
  else
    ip -n "$ns" link show eth0 >/dev/null 2>&1 || {
      ip -n "$hub" link add "v-$name" type veth peer name eth0 netns "$ns"
      ip -n "$hub" link set "v-$name" master br0
    }
    ip -n "$hub" link set "v-$name" up
    ip -n "$ns" addr replace "$address/24" dev eth0
    ip -n "$ns" link set eth0 up
  fi
}

power_on() { # NODE
  local name=$1 outer child boot_offset
  plug_in "$name"
  host_pid "$name" >/dev/null && return
  boot_offset=-$(cut -d. -f1 /proc/uptime) # the node has been up since now
  # shellcheck disable=SC2086
  SLURM_TB_DIR=$TB setsid nsenter --net="/run/netns/$NETNS_PREFIX$name" unshare --boottime "$boot_offset" $NAMESPACES \
    /bin/bash "$SELF" _init "$name" </dev/null >>"$TB/log/init.$name.log" 2>&1 9>&- &
  outer=$!
  for _ in $(seq 150); do
    for child in $(cat "/proc/$outer/task/$outer/children" 2>/dev/null); do # unshare has a helper child at first
      [ "$(cat "/proc/$child/comm" 2>/dev/null)" = bash ] || continue
      echo "$child $(start_time "$child")" >"$TB/run/$name.host"
      return
    done
    sleep .02
  done
  die "could not start $name; see $TB/log/init.$name.log"
}

power_off() { # NODE
  local pid
  pid=$(host_pid "$1") && { kill -9 "$pid"; for _ in $(seq 100); do host_pid "$1" >/dev/null || break; sleep .05; done; }
  rm -f "$TB/run/$1.host"
}

# The first process of a node. It outlives its daemons and reaps orphans.
init() { # NODE
  hostname "$1"
  mount --make-rprivate /
  mount --bind "$TB/etc/hosts" /etc/hosts
  mkdir -p /etc/slurm && mount --bind "$TB/etc" /etc/slurm
  mount -t sysfs sysfs /sys 2>/dev/null
  mount -t tmpfs tmpfs /dev/shm
  mkdir -p "$TB/spool/$1"
  cd / || exit 1
  trap : TERM HUP INT
  start_daemons "$1"
  while :; do sleep 100000 & wait $!; done
}

start_daemons() { # NODE
  rm -f "$TB/run/$1.pid"
  if [ "$1" = ctl ]; then
    pgrep -x munged >/dev/null || munged --foreground --force --key-file="$TB/run/munge.key" --socket="$TB/run/munge.sock" \
      --pid-file="$TB/run/munged.pid" --log-file="$TB/log/munged.log" --seed-file="$TB/run/munge.seed" &
    for _ in $(seq 100); do [ -S "$TB/run/munge.sock" ] && break; sleep .05; done
    slurmctld -D &
  else
    $AS_OWNER slurmd -D -N "$1" &
  fi
}

daemon() { # NODE stop|kill|start
  local pid; pid=$(cat "$TB/run/$1.pid" 2>/dev/null) # inside the node's own PIDs
  case ${2:-} in
    stop) enter "$1" kill -TERM "$pid" ;;
    kill) enter "$1" kill -KILL "$pid" ;;
    start) if [ "$1" = ctl ]; then enter ctl slurmctld; else enter "$1" $AS_OWNER slurmd -N "$1"; fi ;;
    *) die "daemon NODE|ctl stop|kill|start" ;;
  esac
}

# ------------------------------------------------------------------------------------------------- the whole cluster

lock() { mkdir -p "$TB"; exec 9>"$TB/.lock"; flock 9; }

up() { # NUM_NODES
  local num_nodes=$1 name wanted
  check
  lock
  wanted="$num_nodes $CPUS $GPUS $MEMORY $SUBNET $DISK ${TB_EXTRA:-}"
  if [ "$(cat "$TB/config" 2>/dev/null)" != "$wanted" ]; then
    [ ! -e "$TB/config" ] || down
    write_files "$num_nodes"
    echo "$wanted" >"$TB/config"
  fi
  power_on ctl
  SECONDS=0
  until enter ctl timeout 3 scontrol ping 2>/dev/null | grep -q "is UP"; do
    [ $SECONDS -lt 90 ] || die "slurmctld did not start; see $TB/log"
    sleep .1
  done
  for name in $(node_names); do power_on "$name"; done
  SECONDS=0
  until [ "$(enter ctl timeout 5 sinfo -h -N -r -t idle,alloc,mix,comp,drain -o %N 2>/dev/null | sort -u | wc -l)" = "$num_nodes" ]; do
    [ $SECONDS -lt 40 ] || { enter ctl timeout 5 sinfo -R; die "nodes did not come up in 40 s; see $TB/log"; }
    sleep .1
  done
  [ -z "${TB_OWNER:-}" ] || follow_owner
  enter ctl sinfo
}

# In a session of its own: what kills the owner with its whole process group leaves this.
follow_owner() {
  SLURM_TB_DIR=$TB setsid /bin/bash "$SELF" _follow "$TB_OWNER" "$(start_time "$TB_OWNER")" </dev/null >/dev/null 2>&1 9>&- &
}

follow() { # PID START_TIME
  while [ -e "$TB/config" ] && [ -n "$2" ] && [ "$(start_time "$1")" = "$2" ]; do sleep 1; done
  [ ! -e "$TB/config" ] || { lock && down; }
}

down() { # with the lock held
  local name
  for name in $(node_names) ctl; do
    power_off "$name"
    [ ! -e "/run/netns/$NETNS_PREFIX$name" ] || ip netns del "$NETNS_PREFIX$name"
  done
  ! mountpoint -q "$TB/small" || umount --lazy "$TB/small"
  rm -rf "$TB/state" "$TB/spool" "$TB/config" "$TB/log/jobcomp.txt" "$TB"/run/*.pid "$TB"/run/*.sock*
}

boot() { # NODE
  local was_on; was_on=$(host_pid "$1")
  power_on "$1"
  [ "$1" != ctl ] && [ -z "${TB_NORESUME:-}" ] || return 0
  for _ in $(seq 50); do # a rebooted node may be left DOWN ("Node unexpectedly rebooted"): do what an operator does
    case $(enter ctl sinfo -h -n "$1" -o %T 2>/dev/null) in
      idle | mixed | allocated) break ;;
      down | drained) enter ctl scontrol update nodename="$1" state=resume ;;
      *\*) # it does not answer: it was cut off, and registers anew at once if slurmd begins again
        [ -z "$was_on" ] || { daemon "$1" kill; daemon "$1" start; was_on=; } ;;
    esac
    sleep .2
  done
}

status() {
  local name pid
  for name in ctl $(node_names); do
    if pid=$(host_pid "$name"); then echo "$name up pid=$pid"; else echo "$name down"; fi
  done
  if host_pid ctl >/dev/null; then enter ctl timeout 10 sinfo -N -o '%N %T %C %G %E'; fi
}

run_on() { # NODE COMMAND...: in this folder, with this environment
  local pid; pid=$(host_pid "$1") || die "$1 is not running"
  shift
  exec nsenter -t "$pid" -n -u -m -i -T -p --wd="$PWD" -- "$@"
}

command=${1:-}
[ $# = 0 ] || shift
case $command in
  check) check ;;
  install) install_packages ;;
  up) up "${1:-2}" ;;
  down) lock && down ;;
  status) status ;;
  exec) [ $# -ge 2 ] || usage; run_on "$@" ;;
  crash) pid=$(host_pid "${1:-}") || die "${1:-} is not running"; kill -9 "$pid" ;;
  boot) [ $# = 1 ] || usage; boot "$1" ;;
  link) [ $# = 2 ] || usage; ip -n "${NETNS_PREFIX}ctl" link set "v-$1" "$2" ;;
  daemon) [ $# = 2 ] || usage; daemon "$@" ;;
  _init) init "$@" ;;
  _commands) mkdir -p "$TB/bin" && write_commands ;;
  _follow) follow "$@" ;;
  *) usage ;;
esac
