# docker build -t fastlatent .
# docker run --gpus all --shm-size 16g -v /data:/data fastlatent python train.py experiment=fullrun run_dir=/data/runs/mine
# The data workers and NCCL share memory in /dev/shm, of which a container has only 64 MB without --shm-size.
FROM pytorch/pytorch:2.14.1-cuda13.0-cudnn9-runtime

# Triton compiles a launcher for each kernel, for which it needs a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /fastlatent
COPY Makefile LICENSE README.md pyproject.toml constraints.txt train.py precompute_latents.py ./
COPY accel accel
COPY common common
COPY conf conf
COPY data data
COPY encoding encoding
COPY evaluation evaluation
COPY models models
COPY sampling sampling
COPY scripts scripts
COPY training training

# .venv sees the image's PyTorch, whose version constraints.txt names, so that pip does not install another. The image has
# Python 3.12; the versions in constraints.txt were tested on 3.11.
RUN python3 -m venv --system-site-packages .venv && make setup
ENV PATH=/fastlatent/.venv/bin:$PATH
