# An image for S-workers, R-workers and prefill workers: `docker build -t fastdecode:0.1.0 .`
# For NVIDIA GPUs:
#   docker build -t fastdecode:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# With Ray:
#   docker build -t fastdecode:0.1.0-ray --build-arg EXTRAS=serve,structured,otel,gguf,ray .
# Where package indexes have mirrors: --build-arg PIP_INDEX_URL=…

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG PIP_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY rworker_cpp rworker_cpp
COPY sworker sworker
COPY cluster cluster
COPY perfmodel perfmodel
COPY fastdecode fastdecode
COPY examples/kubernetes/base examples/kubernetes/base
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG PIP_INDEX_URL
# Of torch alone; the version is that of constraints-cpu.txt, in the build that this index has.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve,structured,otel,gguf
# KubeRay's probes ask with wget.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
COPY constraints-cpu.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep '^torch==' /tmp/constraints.txt)"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/fastdecode-*.whl)[${EXTRAS}]" \
    && useradd --uid 10001 --user-group --create-home fastdecode
# /tmp, since the root file system may be read-only. The last is what NVIDIA's container runtime mounts.
ENV HOME=/tmp XDG_CACHE_HOME=/tmp/cache PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
# serve, R-workers, health ports of R-workers, --pool-listen, prefill workers
EXPOSE 8000 5580 8080 5590 9700
ENTRYPOINT ["fastdecode"]
CMD ["--help"]
