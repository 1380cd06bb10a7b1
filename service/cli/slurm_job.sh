#!/bin/bash
@HEADER@
#
# Written by `baton slurm`. Ray's head runs on the first node and a worker on every other node; `baton run` runs here.
# Near the time limit, or if the run cannot go on without a lost node, the job requeues itself and resumes the run.
# shellcheck disable=SC2317 # functions are called by traps and by srun
set -u
export PATH=@BIN@:"$PATH" SLURM_EXPORT_ENV=ALL RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
unset RAY_ADDRESS RAY_AUTH_TOKEN_PATH

run=@RUN@
logs=@LOGS@/$SLURM_JOB_ID
settings=(@SETTINGS@)
begin=(baton run @CONFIGS@ "${settings[@]}" run.dir=@DIR@ run.name="${run##*/}")
go_on=(baton run --resume "$run" @RESUMED@ "${settings[@]}")
parts=(@PARTS@)
RAY_SECONDS=300      # for Ray's head to answer
END_SECONDS=40       # for Ray to end on all nodes; what is left then ends with the job
FRUITLESS_STARTS=4   # starts in a row without a new checkpoint, after which the job fails instead of requeueing itself

say() { echo "baton slurm: $*"; }

# Ray on one node, until the batch script sends USR1. The arguments are those of `ray start`.
on_node() {
    trap : TERM # scancel sends it to all nodes; the run needs Ray until it has stopped
    trap 'told=1' USR1
    local told="" folder=/tmp/baton-$SLURM_JOB_ID
    for setting in RAY_USAGE_STATS_ENABLED=0 RAY_raylet_start_wait_time_s=60 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 \
        RAY_grpc_client_keepalive_time_ms=60000 RAY_grpc_client_keepalive_timeout_ms=20000 \
        TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1; do
        name=${setting%%=*}
        [ -n "${!name+set}" ] || export "${setting?}"
    done
    rm -rf -- "$folder"
    mkdir -m 700 -- "$folder" || exit 1 # another user's
    ray start --block --temp-dir="$folder" --num-cpus="$SLURM_CPUS_ON_NODE" --dashboard-agent-listen-port=$((PORT + 1)) \
        --metrics-export-port=$((PORT + 2)) "$@" &
    while [ -z "$told" ] && kill -0 $! 2>/dev/null; do wait $!; done
    if [ -z "$told" ]; then
        tail -n 20 "$folder"/session_latest/logs/{gcs_server,raylet}.{out,err} 2>/dev/null
        # Slurm requeues no job of --no-kill whose first node is lost, so the other nodes do.
        if ! timeout 10 bash -c ": < /dev/tcp/$HEAD/$PORT" && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
            echo "baton slurm: $SLURMD_NODENAME: the first node, $HEAD, is lost; the job is requeued"
            scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    kill $! 2>/dev/null
    SECONDS=0
    while kill -0 $! 2>/dev/null && ((SECONDS < 15)); do sleep 0.2; done
    rm -rf -- "$folder"
    [ -n "$told" ]
}

# Start Ray on a node; the arguments are the number of its component, its name, and those of `ray start`.
start() {
    local component=() node=$2
    [ -z "${SLURM_HET_SIZE:-}" ] || component=(--het-group="$1" --export=ALL)
    [ -z "${parts[$1]:-}" ] || set -- "$@" --labels="part=${parts[$1]}"
    srun "${component[@]}" --nodes=1 --ntasks=1 --nodelist="$node" --overlap --cpu-bind=none \
        bash -c "$(declare -f on_node); on_node \"\$@\"" on_node "${@:3}" </dev/null >>"$logs/node-$node.log" 2>&1 &
    sruns+=($!)
}

# The address by which this node reaches another one.
own_address() {
    local node
    node=$(scontrol show node --oneliner "$1" | grep -o 'NodeAddr=[^ ]*')
    python -I -c 'if True:
        import socket, sys
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((sys.argv[1], 9))
            print(route.getsockname()[0])' "${node#*=}"
}

newest_checkpoint() { compgen -G "$run/checkpoints/step_*/manifest.json" | sort -V | tail -n 1; }

stop() {
    reason=$1
    [ -z "$driver" ] || kill -TERM "$driver" 2>/dev/null
}

requeue() {
    if (($(tail -n "$FRUITLESS_STARTS" "$logs/starts" | grep -cFx -e "$(newest_checkpoint)") == FRUITLESS_STARTS)); then
        say "$1, and $FRUITLESS_STARTS starts brought no checkpoint: the job ends. Is --time too short, a node too small?"
        return
    fi
    say "$1: the job requeues itself, and goes on from $(newest_checkpoint)"
    scontrol requeue "$SLURM_JOB_ID" && exit
}

mkdir -p "$logs"
reason="" driver="" sruns=() begun=$(newest_checkpoint)
echo "$begun" >>"$logs/starts"
trap 'stop limit' USR1
trap 'stop cancelled' TERM

hosts=() groups=()
for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
    list=SLURM_JOB_NODELIST_HET_GROUP_$group
    mapfile -t names < <(scontrol show hostnames "${!list:-$SLURM_JOB_NODELIST}")
    for name in "${names[@]}"; do hosts+=("$name") groups+=("$group"); done
done
HEAD=$(own_address "${hosts[-1]}") || exit 1
PORT=$((20000 + SLURM_JOB_ID % 4000 * 3))
export HEAD PORT RAY_ADDRESS=$HEAD:$PORT
say "job $SLURM_JOB_ID, start $(wc -l <"$logs/starts"), on ${hosts[*]}; Ray at $RAY_ADDRESS; logs in $logs"

start 0 "${hosts[0]}" --head --node-ip-address="$HEAD" --port="$PORT" --include-dashboard=false
SECONDS=0
until (: < "/dev/tcp/$HEAD/$PORT") 2>/dev/null; do
    if [ -n "$reason" ] || ! kill -0 "${sruns[0]}" 2>/dev/null || ((SECONDS >= RAY_SECONDS)); then break; fi
    sleep 0.2
done
for ((i = 1; i < ${#hosts[@]}; i++)); do start "${groups[i]}" "${hosts[i]}" --address="$RAY_ADDRESS"; done

if [ -n "$begun" ] || ((@IS_RESUMED@)); then
    command=("${go_on[@]}")
else
    [ ! -e "$run" ] || mv -- "$run" "$run.start-$(($(wc -l <"$logs/starts") - 1))"
    command=("${begin[@]}")
fi
code=1
if [ -z "$reason" ]; then
    "${command[@]}" </dev/null &
    driver=$!
    [ -z "$reason" ] || kill -TERM "$driver" # the signal came meanwhile
    (
        until [ -d "$run/logs" ]; do sleep 1; done
        for host in "${hosts[@]}"; do ln -sf "$logs/node-$host.log" "$run/logs/"; done
    ) &
    linking=$!
    while :; do
        wait "$driver"
        code=$?
        kill -0 "$driver" 2>/dev/null || break
    done
    kill "$linking" 2>/dev/null
fi

trap '' TERM USR1
lost=()
for ((i = 0; i < ${#sruns[@]}; i++)); do kill -USR1 "${sruns[i]}" 2>/dev/null || lost+=("${hosts[i]}"); done
SECONDS=0
while kill -0 "${sruns[@]}" 2>/dev/null && ((SECONDS < END_SECONDS)); do sleep 0.2; done
[ ${#lost[@]} = 0 ] || say "Ray ended before the run on: ${lost[*]}"
if [ "$reason" = limit ] && [ "$code" != 0 ]; then requeue "the time limit is near"; fi
if [ -z "$reason" ] && [ "$code" = 1 ] && [ ${#lost[@]} != 0 ]; then requeue "the run ended without the lost nodes"; fi
if [ "$code" != 0 ] && [ -n "$(newest_checkpoint)" ]; then
    say "unless Slurm requeues this job, a new one goes on: baton slurm --resume $run -- OPTIONS OF SBATCH"
fi
exit "$code"
