# `make trt-check` in NVIDIA's TensorRT container, from the root of a clone:
#
#   docker build -f docker/trt-check.Dockerfile --build-arg ARCHS=89 -t cutefuse-trt-check .
#   docker run --rm --gpus all -v "$PWD/trt_check:/cutefuse/trt_check" cutefuse-trt-check
#
# ARCHS is the compute capability of the GPU without its dot, 90a for Hopper. The report is trt_check/trt_check.md.
# Written, not run: neither this container nor a TensorRT was at hand.
ARG IMAGE=nvcr.io/nvidia/tensorrt:25.12-py3
FROM ${IMAGE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /cutefuse
COPY . .

ARG ARCHS="80;90a"
ENV ARCHS=${ARCHS}
RUN make setup
# The container's own TensorRT package, which trt-check loads plugins with, lies outside of the environment.
RUN sed -i 's/^include-system-site-packages = false/include-system-site-packages = true/' .venv/pyvenv.cfg

CMD ["make", "trt-check"]
