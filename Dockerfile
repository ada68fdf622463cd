# docker build -t autoprec .                           rehearsals and CPU searches, with PyTorch's CPU build
# docker build --build-arg INDEX= -t autoprec:cuda .   PyTorch with CUDA; run it with --gpus all
# docker run --rm -v "$PWD:/workspace" autoprec search --target h100 train.py
FROM python:3.13-slim

ARG TORCH=2.13.0
ARG INDEX=https://download.pytorch.org/whl/cpu
# torch.compile calls a C++ compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==${TORCH} ${INDEX:+--index-url ${INDEX}}
COPY . /opt/autoprec
RUN pip install --no-cache-dir "/opt/autoprec[ui]"

WORKDIR /workspace
ENTRYPOINT ["autoprec"]
CMD ["doctor"]
