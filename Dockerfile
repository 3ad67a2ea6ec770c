# An image with the package and this repository, which launch/kubernetes.yaml and launch/vm.sh can run.
#
#   docker build --tag pcmepp-openclip .                                        with torch for CUDA; the host has the driver
#   docker build --tag pcmepp-openclip:cpu --build-arg TORCH_INDEX=URL .        torch from the index of its CPU wheels
#   docker run --gpus all --ipc host --volume /data:/data --volume /runs:/runs pcmepp-openclip pcmepp train ...
#   apptainer build pcmepp.sif docker-daemon://pcmepp-openclip:latest           for a cluster without Docker
#
# pip resolves the pinned versions together. No container engine has built this image yet, and no GPU has run it.
ARG PYTHON=3.11-slim
FROM python:${PYTHON}
ARG TORCH_INDEX=
# A compiler serves --torchcompile.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/pcmepp_openclip
COPY constraints.txt .
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision; fi
COPY . .
# The pinned versions are of the wheels for CUDA; with another torch the versions are those that pip chooses.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--upgrade-strategy only-if-needed} \
    $([ -n "$TORCH_INDEX" ] || echo --constraint constraints.txt) '.[tensorboard,wandb]'
RUN useradd --uid 1000 --create-home pcmepp
USER pcmepp
ENV PYTHONUNBUFFERED=1
CMD ["pcmepp", "--help"]
