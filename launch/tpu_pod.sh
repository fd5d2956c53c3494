#!/bin/bash
# Trains on all hosts of a TPU pod slice: launch/tpu_pod.sh [--config.key=value ...]
# Runs the same command on every worker. The workers find each other through the metadata of the
# machine. Run it again to resume. DRY_RUN=1 only prints the command.
# Each worker needs the package: `pip install 'jaxrl_llm[gcs,tpu]'`, or the image of Dockerfile.
set -euo pipefail

# To change, here or in the environment: the slice, its zone and its project.
TPU_NAME=${TPU_NAME:-my-slice}
ZONE=${ZONE:-us-central2-b}
PROJECT=${PROJECT:-my-project}
# To change: the config; the model, a name on the hub or a folder of every worker; the data; and the
# folder of the run, which all workers can write to.
CONFIG=${CONFIG:-grpo_8b}
MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-gs://my-bucket/data}
WORKDIR=${WORKDIR:-gs://my-bucket/runs/grpo_8b}
# To change: the command on the workers, where it is not on the path.
PROGRAM=${PROGRAM:-jaxrl_llm}

printf -v arguments ' %q' --start=tpu --config="$CONFIG" --workdir="$WORKDIR" \
    --config.model.path="$MODEL" \
    --config.data.train_files="('$DATA/train.parquet',)" \
    --config.data.eval_files="('$DATA/eval.parquet',)" "$@"
command=(
    gcloud compute tpus tpu-vm ssh "$TPU_NAME"
    --zone="$ZONE" --project="$PROJECT" --worker=all
    --command="$PROGRAM train$arguments"
)
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
else
    exec "${command[@]}"
fi
