# One image for every role: `docker build -t baton:dev .`, then `docker run baton:dev prefill --help`.
# TORCH_INDEX_URL chooses the build of PyTorch.
FROM python:3.11-slim AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/baton
WORKDIR /src
# The largest layer first, and by itself: a changed source file does not load PyTorch again.
COPY constraints.txt ./
RUN /opt/baton/bin/pip install -c constraints.txt --index-url "$TORCH_INDEX_URL" torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proto/batonpb proto/batonpb
COPY baton baton
COPY engine engine
COPY kvtransfer kvtransfer
COPY cachestore cachestore
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY node node
COPY mixed_node mixed_node
COPY router router
COPY cli cli
RUN /opt/baton/bin/pip install -c constraints.txt '.[redis,k8s]'

FROM python:3.11-slim
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
ENTRYPOINT ["baton"]
