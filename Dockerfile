# An image for TPU and GPU hosts, with the wheel of this repository:
#   docker build --build-arg PLATFORM=tpu -t jaxrl_llm .
#   docker run jaxrl_llm train --config=grpo_tiny --workdir=gs://BUCKET/runs/grpo_tiny
# The image runs `jaxrl_llm`. Give GPUs with `--gpus all`, a token of the hub with `-e HF_TOKEN`.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY jaxrl_llm jaxrl_llm
COPY configs configs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=wheels .

FROM python:${PYTHON}-slim
# tpu, cuda12 (driver 525 or newer), cuda13 (driver 580 or newer) or cpu
ARG PLATFORM=tpu
# Further extras of docs/install.md.
ARG EXTRAS=gcs,gguf,math,plot,s3,serve
WORKDIR /work
COPY constraints.txt ./
COPY --from=build /build/wheels wheels
RUN case "$PLATFORM" in \
        tpu | cuda13) extras="$PLATFORM,$EXTRAS" ;; \
        cuda12) extras="cuda,$EXTRAS" ;; \
        cpu) extras="$EXTRAS" ;; \
        *) echo "PLATFORM is '$PLATFORM'; give tpu, cuda12, cuda13 or cpu" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir -c constraints.txt "$(echo wheels/*.whl)[$extras]" \
    && rm -r wheels
RUN jaxrl_llm --version && jaxrl_llm configs
ENTRYPOINT ["jaxrl_llm"]
CMD ["--help"]
