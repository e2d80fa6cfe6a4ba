# The trainer and the other programs of `gshard`, from the wheel.
#
#     docker build --tag=lingvo-gshard .                              # CPUs
#     docker build --tag=lingvo-gshard --build-arg=EXTRA=cuda12 .     # NVIDIA GPUs; also cuda13, tpu
#
# launch/jobset.yaml and `xpk workload create --docker-image` take the image. Give it a name that
# your cluster can pull, and push it there.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements.txt ./
COPY requirements requirements
COPY lingvo_gshard lingvo_gshard
COPY data_prep data_prep
COPY params params
COPY xla_plan xla_plan
COPY xla_spmd xla_spmd
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG PYTHON
# What is installed besides the wheel: cuda12, cuda13, tpu, or nothing.
ARG EXTRA=""
COPY constraints/${PYTHON}.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
# `kubernetes` is what JAX finds the other pods of a job with.
RUN set -eu; \
    extras="serve,gcs,s3${EXTRA:+,${EXTRA}}"; \
    python -m pip install --no-cache-dir -c /tmp/constraints.txt \
        "$(ls /tmp/wheels/*.whl)[${extras}]" kubernetes; \
    rm -r /tmp/wheels
RUN useradd --create-home --uid=1000 gshard
USER 1000
WORKDIR /home/gshard
# Not a shell: SIGTERM, which stops a training after the call under way, must reach the program.
ENTRYPOINT ["gshard"]
