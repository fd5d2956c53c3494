#!/bin/bash
# Trains on all hosts of a TPU pod slice: launch/tpu_pod.sh [--config.key=value ...]
# Runs the same command on every worker. The workers find each other through the metadata of the
# machine. Run it again to resume. DRY_RUN=1 only prints the command.
set -euo pipefail

# To change: the slice, its zone and its project, here or in the environment.
TPU_NAME=${TPU_NAME:-my-slice}
ZONE=${ZONE:-us-central2-b}
PROJECT=${PROJECT:-my-project}
# To change: the folder of this repository on the workers, the config, and the folder of the run. All
# workers must be able to access it (a mounted bucket or an NFS share).
REPOSITORY=${REPOSITORY:-\$HOME/jaxrl_llm}
CONFIG=${CONFIG:-configs/ppo_8b.py}
WORKDIR=${WORKDIR:-/mnt/runs/ppo_8b}

printf -v arguments ' %q' --start=tpu --config="$CONFIG" --workdir="$WORKDIR" "$@"
command=(
    gcloud compute tpus tpu-vm ssh "$TPU_NAME"
    --zone="$ZONE" --project="$PROJECT" --worker=all
    --command="cd $REPOSITORY && python3 launch/train.py$arguments"
)
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
else
    exec "${command[@]}"
fi
