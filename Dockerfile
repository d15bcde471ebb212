# syntax=docker/dockerfile:1
#
# Octavo in a container, for a CPU or for an NVIDIA GPU:
#
#   docker build --target cpu  -t octavo:cpu .
#   docker build --target cuda -t octavo:cuda .
#   docker run --init -p 127.0.0.1:8000:8000 -v octavo-cache:/home/octavo/.cache octavo:cpu MODEL --max-model-len 8K
#
# What follows the image's name is what follows `octavo serve`. docs/deployment.md says more.

ARG PYTHON_VERSION=3.12
# The CUDA release that torch was built with; used only to compile flash-attn.
ARG CUDA_VERSION=13.0.1
# on: flash-attn in the cuda image. Off by default, since it has no ready wheel for every torch: where there is none it
# is compiled, which takes an hour or more and some 4 GB of memory for each of MAX_JOBS. Octavo serves without it.
ARG FLASH_ATTN=off


# ---------------------------------------------------------------- our wheel, native kernels included
FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY engine engine
COPY kernels kernels
COPY server server
# One library holds the kernels for every instruction set (portable, AVX2, AVX-512, AMX); the CPU decides at run time.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python -c "import glob, zipfile; [wheel] = glob.glob('/wheels/octavo-*.whl'); \
assert any('/liboctavo-' in name for name in zipfile.ZipFile(wheel).namelist()), 'the kernels were not built'"


# ---------------------------------------------------------------- packages; a layer that our sources do not touch
FROM python:${PYTHON_VERSION}-slim-bookworm AS packages
ENV PATH=/opt/octavo/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml ./
RUN python -m venv /opt/octavo \
    && python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt

FROM packages AS packages-cpu
# PyPI's torch brings CUDA along; this index has it without.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url "${TORCH_INDEX}" "$(grep '^torch[<>=]' requirements.txt)" \
    && pip install -r requirements.txt

FROM packages AS packages-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -r requirements.txt


# ---------------------------------------------------------------- flash-attn, on request
FROM python:${PYTHON_VERSION}-slim-bookworm AS flash-attn-off
RUN mkdir /flash-attn

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu22.04 AS cuda-toolkit

FROM packages-cuda AS flash-attn-on
ARG FLASH_ATTN_VERSION=2.8.3.post2
ARG MAX_JOBS=4
COPY --from=cuda-toolkit /usr/local/ /usr/local/
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --upgrade setuptools wheel packaging ninja psutil \
    && CUDA_HOME="$(echo /usr/local/cuda-*.*)" MAX_JOBS="${MAX_JOBS}" \
        pip wheel --no-build-isolation --no-deps --wheel-dir /flash-attn "flash-attn==${FLASH_ATTN_VERSION}"

# hadolint ignore=DL3006
FROM flash-attn-${FLASH_ATTN} AS flash-attn


# ---------------------------------------------------------------- installed; the last lines prove that the kernels load
FROM packages-cpu AS installed-cpu
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && python -c "from kernels.cpu import library; assert library.load(), library.refusal()"

FROM packages-cuda AS installed-cuda
COPY --from=wheel /wheels /wheels
COPY --from=flash-attn /flash-attn /wheels
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && python -c "from kernels.cpu import library; assert library.load(), library.refusal()"


# ---------------------------------------------------------------- what both images share; no compiler from here on
FROM python:${PYTHON_VERSION}-slim-bookworm AS runtime
# Group 0 may write what the user may, so that any other user id works too: docker run --user 4711:0.
RUN useradd --uid 1000 --gid 0 --create-home octavo \
    && install --directory --owner=1000 --group=0 --mode=0775 /home/octavo/.cache \
    && chmod 0775 /home/octavo
# A container's loopback is not the host's, so the server listens everywhere: who may connect is decided where the port
# is published.
ENV PATH=/opt/octavo/bin:$PATH \
    HOME=/home/octavo \
    PYTHONUNBUFFERED=1 \
    OCTAVO_HOST=0.0.0.0
WORKDIR /home/octavo
USER 1000:0
# Models, from the Hugging Face Hub and from packages.
VOLUME ["/home/octavo/.cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# /ready by Python (there is no curl); loading counts as starting. It sees OCTAVO_PORT but no flags: leave --port alone
# and publish port 8000 elsewhere (-p 127.0.0.1:9000:8000).
HEALTHCHECK --interval=20s --timeout=10s --start-period=1h --retries=3 \
    CMD ["python", "-P", "-m", "server.healthcheck"]
ENTRYPOINT ["octavo", "serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=installed-cuda /opt/octavo /opt/octavo

# The last target is what `docker build .` makes.
FROM runtime AS cpu
COPY --from=installed-cpu /opt/octavo /opt/octavo
