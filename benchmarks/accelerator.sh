#!/usr/bin/env bash
# Measures the accelerator of this machine in at most nine minutes, installation included:
#
#     benchmarks/accelerator.sh --out=accelerator.md
#
# Prints and writes one table (see accelerator.py, which gets all arguments). It installs the package
# into a folder of its own if the Python here (PYTHON, else python3) cannot import it.
set -euo pipefail
limit=540
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Whether a Python has all that a run imports, and sees the accelerator that the machine has.
works() {
    "$1" -c 'import jaxrl_llm.trainer.rl, jax; jax.devices()' >/dev/null 2>&1
}

extra=
if [ -e /dev/nvidia0 ]; then
    extra=cuda
elif compgen -G '/dev/accel*' >/dev/null; then
    extra=tpu
fi
if ! works "$python"; then
    folder=${XDG_CACHE_HOME:-$HOME/.cache}/jaxrl_llm_accelerator
    # What the machine's image brings (jax, for one) is used as it is.
    "$python" -m venv --system-site-packages "$folder"
    python=$folder/bin/python
    timeout "$((limit - 60))" "$python" -m pip install --quiet -e ".${extra:+[$extra]}"
    works "$python" || {
        echo "error: the installation cannot be imported; see: $python -c 'import jaxrl_llm'" >&2
        exit 1
    }
fi
left=$((limit - SECONDS - 5))
# Half a minute less: what runs at that moment ends, and the table is whole.
exec timeout --kill-after=5 "$left" "$python" benchmarks/accelerator.py \
    "--seconds=$((left - 30))" "$@"
