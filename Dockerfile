# An image for S-workers, R-workers and prefill workers: `docker build -t fastdecode:0.1.0 .`
# Of R-workers alone, without torch:
#   docker build -t fastdecode-r-worker:0.1.0 --target r-worker .
# For ARM servers: docker buildx build --platform linux/arm64 …
# For NVIDIA GPUs:
#   docker build -t fastdecode:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# With Ray:
#   docker build -t fastdecode:0.1.0-ray --build-arg EXTRAS=serve,structured,otel,gguf,ray .
# Where package indexes have mirrors: --build-arg PIP_INDEX_URL=…

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG PIP_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY rworker_cpp rworker_cpp
COPY sworker sworker
COPY cluster cluster
COPY perfmodel perfmodel
COPY fastdecode fastdecode
COPY examples/kubernetes/base examples/kubernetes/base
COPY scripts/r_worker_wheel.py scripts/r_worker_wheel.py
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python scripts/r_worker_wheel.py /wheels/fastdecode-*.whl --out /wheels

FROM python:${PYTHON}-slim AS base
# Containers write to /run/fastdecode, /hub (models, where a volume is mounted) and /tmp alone, since the root file system
# may be read-only.
RUN useradd --uid 10001 --user-group --create-home fastdecode \
    && install --directory --owner=fastdecode --group=fastdecode --mode=0700 /run/fastdecode /hub
ENV HOME=/tmp XDG_CACHE_HOME=/tmp/cache PYTHONUNBUFFERED=1
WORKDIR /tmp
ENTRYPOINT ["fastdecode"]
CMD ["--help"]

FROM base AS r-worker
ARG PIP_INDEX_URL
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-compile /wheels/fastdecode_r_worker-*.whl
USER 10001:10001
# R-workers, their health ports
EXPOSE 5580 8080

FROM base
ARG PIP_INDEX_URL
# Of torch alone; the version is that of constraints-cpu.txt, in the build that this index has.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve,structured,otel,gguf
# KubeRay's probes ask with wget. (Versions are those of the base image's Debian, here and above.)
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
COPY constraints-cpu.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep '^torch==' /tmp/constraints.txt)"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/fastdecode-*.whl)[${EXTRAS}]"
# What NVIDIA's container runtime mounts.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
# serve, R-workers, health ports of R-workers, --pool-listen, prefill workers
EXPOSE 8000 5580 8080 5590 9700
